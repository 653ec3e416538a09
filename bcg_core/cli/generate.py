"""``bcg generate``: a diffusers pipeline to a PNG, through replayed graphs if asked."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Annotated, Optional

import typer

from bcg_core.cli import values
from bcg_core.cli.model_folder import BUILTIN
from bcg_core.cli.output_file import replacing
from bcg_core.cli.request import (
    Placement,
    Request,
    check_outputs,
    check_placement,
    check_request,
)
from bcg_core.cli.stderr import tell

_DEFAULT = Request()
_NEEDED = ("diffusers", "transformers", "safetensors", "PIL")


def generate(
    prompt: Annotated[str, typer.Option(help="What to paint.")] = _DEFAULT.prompt,
    negative_prompt: Annotated[
        Optional[str],  # noqa: UP045 (typer reads it on Python 3.10 too)
        typer.Option(help="What to keep out of the picture.", show_default="none"),
    ] = None,
    width: Annotated[int, typer.Option(help="Pixels.")] = _DEFAULT.width,
    height: Annotated[int, typer.Option(help="Pixels.")] = _DEFAULT.height,
    num_inference_steps: Annotated[int, typer.Option(help="Denoising steps.")] = _DEFAULT.steps,
    guidance_scale: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(
            help="How strongly the prompt guides; 0 for distilled models.",
            show_default="the pipeline's own",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the starting noise.")] = _DEFAULT.seed,
    out: Annotated[str, typer.Option(metavar="FILE", help="The picture, a .png.")] = "bcg.png",
    model_path: Annotated[
        str, typer.Option(metavar="FOLDER", help="A diffusers folder on this disk.")
    ] = BUILTIN,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help=f"{', '.join(values.DTYPES)}.")] = "auto",
    enable_breakable_cuda_graph: Annotated[
        bool,
        typer.Option("--enable-breakable-cuda-graph", help="Capture the denoiser and replay it."),
    ] = False,
    bcg_breaks: Annotated[
        str, typer.Option(help="auto, attention, none, or patterns with a comma between.")
    ] = "auto",
    bcg_text_buckets: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="N,N", help="Caption lengths to capture ahead: 64,128.", show_default="none"
        ),
    ] = None,
    enable_torch_compile: Annotated[
        str, typer.Option(metavar="BOOL", help="Compile the denoiser; not with capture.")
    ] = "false",
    dit_layerwise_offload: Annotated[
        str, typer.Option(metavar="BOOL", help="Keep the denoiser's layers on the host.")
    ] = "false",
    dit_cpu_offload: Annotated[
        str, typer.Option(metavar="BOOL", help="Keep idle models on the host.")
    ] = "false",
    perf_dump_path: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="FILE", help="Stage times and statistics.", show_default="none"),
    ] = None,
    backend: Annotated[str, typer.Option(help=f"{', '.join(values.BACKENDS)}.")] = "auto",
) -> None:
    """Make a picture from a prompt and write it to a PNG."""
    request = Request(
        prompt=prompt,
        negative_prompt=negative_prompt,
        width=width,
        height=height,
        steps=num_inference_steps,
        guidance_scale=guidance_scale,
        seed=seed,
        bcg=enable_breakable_cuda_graph,
        breaks=values.breaks("--bcg-breaks", bcg_breaks),
        text_buckets=values.buckets("--bcg-text-buckets", bcg_text_buckets),
        backend=values.choice("--backend", backend, values.BACKENDS),
    )
    dump_file = None if perf_dump_path is None else Path(perf_dump_path)
    placement = Placement(
        device=values.device("--device", device),
        dtype=values.choice("--dtype", dtype, values.DTYPES),
        compile=values.boolean("--enable-torch-compile", enable_torch_compile),
        layerwise_offload=values.boolean("--dit-layerwise-offload", dit_layerwise_offload),
        cpu_offload=values.boolean("--dit-cpu-offload", dit_cpu_offload),
        model_folder=check_request(request, model_path),
    )
    check_placement(placement, request)
    check_outputs(Path(out), dump_file)
    for package in _NEEDED:
        if importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    if not request.bcg and (request.breaks, request.text_buckets) != ("auto", ()):
        tell(
            "bcg generate: --bcg-breaks and --bcg-text-buckets do nothing without "
            "--enable-breakable-cuda-graph",
            "yellow",
        )
    run(request, placement, Path(out), dump_file)


def run(request: Request, placement: Placement, out: Path, dump_file: Path | None) -> None:
    """Load, paint, write. Imports torch, then diffusers."""
    from bcg_core.cli.load import check_device, check_fits, load, resolve_device
    from bcg_core.cli.progress import StepProgress

    device = resolve_device(placement.device, request.backend)
    check_device(placement, device)
    with StepProgress(request.steps) as progress:
        pipe = load(placement, device)
        check_fits(pipe, request)
        pipe.set_progress_bar_config(disable=True)
        # It imports the engine's pipeline support, which a refused request can do without.
        from bcg_core.cli.picture import make_picture, perf_dump

        progress.describe("denoising")
        picture = make_picture(pipe, request, device, progress.say, progress.advance)
        with replacing(out) as file:
            picture.image.save(file, format="PNG")
        if dump_file is not None:
            text = json.dumps(perf_dump(picture, request, device), indent=2)
            with replacing(dump_file) as file:
                file.write(text.encode() + b"\n")
        progress.say(f"Pixel data generated successfully in {picture.seconds:.2f} seconds: {out}")
