"""What one run of ``bcg generate`` is asked to do, checked as far as it can be without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bcg_core.cli import values
from bcg_core.cli.model_folder import BUILTIN, inspect_folder
from bcg_core.cli.option_error import OptionError
from bcg_core.cli.output_file import check_writable

_BUILTIN_MULTIPLE = 16


@dataclass(frozen=True)
class Request:
    """One picture. The defaults are those of the command."""

    prompt: str = "a lighthouse on a cliff at dawn, oil painting"
    negative_prompt: str | None = None
    width: int = 512
    height: int = 512
    steps: int = 8
    guidance_scale: float | None = None
    seed: int = 0
    bcg: bool = False
    breaks: str | tuple[str, ...] = "auto"
    text_buckets: tuple[int, ...] = ()
    backend: str = "auto"


@dataclass(frozen=True)
class Placement:
    """Where the pipeline comes from and how it lies on the device."""

    model_folder: Path | None = None
    device: str = "auto"
    dtype: str = "auto"
    compile: bool = False
    layerwise_offload: bool = False
    cpu_offload: bool = False


def check_request(request: Request, model_path: str) -> Path | None:
    """Refuse what no run could do. Returns the model folder, ``None`` for the built-in one."""
    if model_path == BUILTIN:
        folder, multiple = None, _BUILTIN_MULTIPLE
    else:
        inspected = inspect_folder(Path(model_path))
        folder, multiple = inspected.path, inspected.multiple
    values.text("--prompt", request.prompt)
    values.text("--negative-prompt", request.negative_prompt)
    values.side("--width", request.width, multiple)
    values.side("--height", request.height, multiple)
    values.whole("--num-inference-steps", request.steps, 1, values.MAX_STEPS)
    values.guidance("--guidance-scale", request.guidance_scale)
    values.whole("--seed", request.seed, 0, 2**64 - 1)
    return folder


def check_placement(placement: Placement, request: Request) -> None:
    """Refuse combinations that exclude each other."""
    offload = {
        "--dit-layerwise-offload": placement.layerwise_offload,
        "--dit-cpu-offload": placement.cpu_offload,
    }
    for option, given in {**offload, "--enable-torch-compile": placement.compile}.items():
        if given and request.bcg:
            why = (
                "a compiled denoiser cannot be captured"
                if option not in offload
                else "a graph cannot follow weights that move between calls"
            )
            raise OptionError(
                option,
                f"true and --enable-breakable-cuda-graph exclude each other ({why}); leave one out",
            )
    if all(offload.values()):
        raise OptionError(
            "--dit-layerwise-offload",
            "true and --dit-cpu-offload true exclude each other; leave one out",
        )
    for option, given in offload.items():
        if given and placement.device == "cpu":
            raise OptionError(option, "true needs a GPU to load onto; use --device cuda")
    on_cpu = placement.device == "cpu"
    if request.backend == "cuda" and on_cpu:
        raise OptionError("--backend", "cuda needs a GPU; use --backend simulated on --device cpu")
    if request.backend == "simulated" and placement.device.startswith("cuda"):
        raise OptionError("--backend", "simulated runs on the CPU; use --device cpu with it")


def check_outputs(out: Path, perf_dump: Path | None) -> None:
    if out.suffix.lower() != ".png":
        raise OptionError(
            "--out", f"{out} is not a name that ends in .png; only PNG files are written"
        )
    check_writable("--out", out)
    if perf_dump is not None:
        check_writable("--perf-dump-path", perf_dump)
        if perf_dump.resolve() == out.resolve():
            raise OptionError("--perf-dump-path", f"{perf_dump} is --out too; name another file")
