"""``bcg generate``: every bad input is one line, every good one the same picture as eager."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
from PIL import Image

from bcg_core import cli
from bcg_core.cli import commands, model_folder, picture
from bcg_core.cli.picture import make_picture
from bcg_core.cli.request import Request
from bcg_core.models import tiny

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.bcg

BCG = str(Path(sys.executable).with_name("bcg"))
SMALL = ("--width", "64", "--height", "48", "--num-inference-steps", "2", "--device", "cpu")


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The default ``--out`` is relative; what a refused run leaves would be seen here."""
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    # load() sets it for the process; the test's own process gets it back as it was.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "zimage"
    tiny.tiny_pipeline().save_pretrained(folder)
    return folder


def refused(capsys: pytest.CaptureFixture[str], option: str, *arguments: str) -> str:
    """Run a command that has to be refused; its one line."""
    before = sorted(Path.cwd().parent.rglob("*"))
    code = cli.main(["generate", *arguments])
    out, err = capsys.readouterr()
    assert code == 2, err
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("bcg generate: ")
    assert option in err
    assert "Traceback" not in err
    assert sorted(Path.cwd().parent.rglob("*")) == before
    return err


BAD_VALUES = [
    (("--width", "100"), "not divisible by 16; use 96 or 112"),
    (("--height", "8"), "not divisible by 16; use 16"),
    (("--width", "0"), "use a multiple of 16"),
    (("--height", "-512"), "use a multiple of 16"),
    (("--width", "8208"), "up to 8192"),
    (("--width", "abc"), "see bcg generate --help"),
    (("--num-inference-steps", "0"), "use 1 to 1000"),
    (("--num-inference-steps", "-3"), "use 1 to 1000"),
    (("--num-inference-steps", "1000000"), "use 1 to 1000"),
    (("--guidance-scale", "nan"), "use 0 (none) or more"),
    (("--guidance-scale", "inf"), "use 0 (none) or more"),
    (("--guidance-scale", "-1"), "use 0 (none) or more"),
    (("--seed", "-1"), "use 0 to"),
    (("--seed", str(2**64)), "use 0 to"),
    (("--bcg-text-buckets", "64,,128"), "such as 64,128"),
    (("--bcg-text-buckets", ""), "such as 64,128"),
    (("--bcg-text-buckets", "0"), "such as 64,128"),
    (("--bcg-text-buckets", "-64"), "such as 64,128"),
    (("--bcg-text-buckets", "64;128"), "such as 64,128"),
    (("--bcg-text-buckets", "abc"), "such as 64,128"),
    (("--bcg-text-buckets", "99999999"), "such as 64,128"),
    (("--bcg-text-buckets", "9" * 5000), "such as 64,128"),
    (("--bcg-text-buckets", "64,128,64"), "write it once"),
    (("--bcg-text-buckets", "64,064"), "write it once"),
    (("--prompt", "a \udcff"), "character 3 is not valid UTF-8"),
    (("--negative-prompt", "\udcff"), "character 1 is not valid UTF-8"),
    (("--bcg-breaks", "a,,b"), "write auto, attention, none"),
    (("--bcg-breaks", "auto,layers.*"), "stands alone"),
    (("--backend", "simulatd"), "did you mean simulated"),
    (("--backend", "rocm"), "auto, cuda, simulated"),
    (("--dtype", "float8"), "float32"),
    (("--device", "gpu"), "auto, cpu, cuda or cuda:N"),
    (("--device", "cuda:x"), "auto, cpu, cuda or cuda:N"),
    (("--dit-cpu-offload", "maybe"), "true nor false"),
    (("--enable-torch-compile", ""), "true nor false"),
    (("--out", "picture.jpg"), ".png"),
    (("--out", "picture"), ".png"),
    (("--out", ".png"), "not a name that ends in .png"),
    (("--out", "nowhere/picture.png"), "create it first"),
    (("--out", "/proc/picture.png"), "cannot be written"),
    (("--out", "n" * 300 + ".png"), "cannot be written"),
    (("--perf-dump-path", "nowhere/perf.json"), "create it first"),
    (("--perf-dump-path", "."), "is a folder"),
    (("--perf-dump-path", "/dev/null"), "not a regular file"),
    (("--perf-dump-path", "bcg.png"), "name another file"),
    (("--model-path", "nowhere"), "does not exist"),
    (("--model-path", "n" * 300), "cannot be read"),
    (("--model-path", "builtin:huge"), "builtin:tiny"),
    (("--no-such-option",), "see bcg generate --help"),
    (("--width",), "see bcg generate --help"),
]


@pytest.mark.parametrize(("arguments", "way_out"), BAD_VALUES, ids=lambda v: " ".join(v)[:40])
def test_a_bad_value_is_refused_in_one_line_that_names_option_and_way_out(
    arguments: tuple[str, ...], way_out: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert way_out in refused(capsys, arguments[0], *arguments)


CONFLICTS = [
    ("--enable-torch-compile", "--enable-torch-compile true --enable-breakable-cuda-graph"),
    ("--dit-cpu-offload", "--dit-cpu-offload true --enable-breakable-cuda-graph"),
    ("--dit-layerwise-offload", "--dit-layerwise-offload true --enable-breakable-cuda-graph"),
    ("--dit-layerwise-offload", "--dit-layerwise-offload true --dit-cpu-offload true"),
    ("--dit-cpu-offload", "--dit-cpu-offload true --device cpu"),
    ("--dit-layerwise-offload", "--dit-layerwise-offload true --device cpu"),
    ("--backend", "--backend cuda --device cpu"),
    ("--backend", "--backend simulated --device cuda"),
]


@pytest.mark.parametrize(("option", "line"), CONFLICTS, ids=[line for _, line in CONFLICTS])
def test_options_that_exclude_each_other_are_refused(
    option: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(capsys, option, *line.split())


@pytest.mark.parametrize(
    ("option", "line"),
    [
        ("--device", "--device cuda"),
        ("--backend", "--backend cuda"),
        ("--dit-cpu-offload", "--dit-cpu-offload true"),
    ],
)
def test_a_gpu_that_is_not_there_is_refused(
    option: str,
    line: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "torch sees no" in refused(capsys, option, *line.split())


def test_a_gpu_number_that_is_not_there_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert "use cuda:0 to cuda:1" in refused(capsys, "--device", "--device", "cuda:2")


class Canary:
    """Unpickling it makes a file."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("unpickled",)


def index(folder: Path, **content: Any) -> None:
    file = folder / "model_index.json"
    file.write_text(json.dumps({"_class_name": "ZImagePipeline"} | content))


def text_model(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))


def pickled_weights(folder: Path) -> None:
    index(folder, transformer=["diffusers", "ZImageTransformer2DModel"])
    (folder / "transformer").mkdir()
    (folder / "transformer" / "config.json").write_text("{}")
    (folder / "transformer" / "pytorch_model.bin").write_bytes(pickle.dumps(Canary()))


def no_weights(folder: Path) -> None:
    pickled_weights(folder)
    (folder / "transformer" / "pytorch_model.bin").unlink()


def code_of_a_component(folder: Path) -> None:
    index(folder, transformer=["modeling", "Mine"])
    (folder / "transformer").mkdir()
    (folder / "transformer" / "modeling.py").write_text("import os; os.mkdir('ran')")


def code_by_auto_map(folder: Path) -> None:
    index(folder, text_encoder=["transformers", "AutoModel"])
    (folder / "text_encoder").mkdir()
    config = {"auto_map": {"AutoModel": "modeling.Mine"}}
    (folder / "text_encoder" / "config.json").write_text(json.dumps(config))


BAD_FOLDERS: list[tuple[Callable[[Path], Any], str]] = [
    (lambda folder: None, "no model_index.json"),
    (text_model, "holds a LlamaForCausalLM, not a pipeline"),
    (lambda folder: (folder / "model_index.json").write_text("{"), "cannot be read"),
    (lambda folder: (folder / "model_index.json").write_bytes(b"\xff\xfe"), "cannot be read"),
    (lambda folder: (folder / "model_index.json").mkdir(), "cannot be read"),
    (lambda folder: (folder / "model_index.json").write_text("[]"), "not a JSON object"),
    (lambda folder: (folder / "model_index.json").write_text("[" * 10**5), "recursion depth"),
    (lambda folder: index(folder, _class_name="ZImageImg2ImgPipeline"), "starts from a picture"),
    (lambda folder: index(folder, _class_name="FluxControlNetPipeline"), "starts from a picture"),
    (lambda folder: index(folder, _class_name="WanPipeline"), "makes a video"),
    (lambda folder: index(folder, _class_name="DDPMPipeline"), "takes no prompt"),
    (lambda folder: index(folder, _class_name="NoSuchPipeline"), "not a pipeline of the installed"),
    (lambda folder: index(folder, _class_name=["pipeline", "Mine"]), "no code from a model folder"),
    (lambda folder: index(folder, vae=["some_library", "Vae"]), "no other code is run"),
    (lambda folder: index(folder, vae=["diffusers", {}]), "not a library and a class"),
    (lambda folder: index(folder, vae=["diffusers", "AutoencoderKL"]), "vae is missing"),
    (code_of_a_component, "no other code is run"),
    (code_by_auto_map, "no code from a model folder"),
    (no_weights, "no *.safetensors"),
    (pickled_weights, "pickled weights only (pytorch_model.bin)"),
]


@pytest.mark.parametrize(("build", "reason"), BAD_FOLDERS, ids=[why for _, why in BAD_FOLDERS])
def test_a_folder_that_is_no_safe_pipeline_is_refused(
    build: Callable[[Path], Any], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    build(folder)
    assert reason in refused(capsys, "--model-path", "--model-path", str(folder))


def test_a_file_is_no_model_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    line = refused(capsys, "--model-path", "--model-path", str(tmp_path / "model.safetensors"))
    assert "not a folder" in line


def test_broken_weights_are_refused_when_they_are_read(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(checkpoint, folder)
    with (folder / "vae" / "diffusion_pytorch_model.safetensors").open("r+b") as weights:
        weights.truncate(64)
    line = refused(capsys, "--model-path", "--model-path", str(folder), *SMALL)
    assert "cannot be loaded" in line


def test_missing_weights_are_refused_by_the_first_ones_name(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "incomplete"
    shutil.copytree(checkpoint, folder)
    file = folder / "transformer" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"n_layers": 3}))
    line = refused(capsys, "--model-path", "--model-path", str(folder), *SMALL)
    assert "transformer lacks 15 weights, such as layers.2." in line


def test_pixels_that_are_no_numbers_fail_and_write_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "x.png"
    arguments = ["generate", *SMALL, "--guidance-scale", "1e308", "--out", str(out)]
    assert cli.main(arguments) == 1
    assert "pixels that are no numbers" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("option", ["--out", "--perf-dump-path"])
def test_a_link_that_leads_to_itself_is_refused(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("loop.png").symlink_to("loop.png")
    assert "cannot be written" in refused(capsys, option, option, "loop.png")


@pytest.mark.parametrize(
    "class_name",
    ["ZImagePipeline", "QwenImagePipeline", "FluxPipeline", "StableDiffusionXLPipeline"],
)
def test_text_to_image_pipelines_pass_and_give_their_size_rule(
    class_name: str, tmp_path: Path
) -> None:
    index(tmp_path, _class_name=class_name, image_encoder=[None, None])
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "config.json").write_text('{"block_out_channels": [1, 1, 1]}')
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "config.json").write_text('{"all_patch_size": [2, 4]}')
    found = model_folder.inspect_folder(tmp_path)
    assert (found.class_name, found.multiple) == (class_name, 16)


def test_a_refusal_is_quick_and_needs_neither_torch_nor_diffusers() -> None:
    program = (
        "import sys\nfrom bcg_core.cli import main\ncode = main(sys.argv[1:])\n"
        "print([m for m in ('torch', 'diffusers', 'PIL') if m in sys.modules])\n"
        "sys.exit(code)"
    )
    arguments = ["generate", "--width", "100"]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "[]\n")
    # Processor time: the wall clock of a machine that runs other tests as well says nothing.
    package_alone, _ = _processor_seconds(sys.executable, "-c", "import bcg_core")
    refusal, done = _processor_seconds(BCG, *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "bcg generate: --width: 100 is not divisible by 16; use 96 or 112\n"
    assert refusal < package_alone + 1.5


def _processor_seconds(*command: str) -> tuple[float, subprocess.CompletedProcess[str]]:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done


# Pictures


@pytest.fixture
def pipe(bcg_device: torch.device) -> Any:
    made = tiny.tiny_pipeline(bcg_device)
    made.set_progress_bar_config(disable=True)
    return made


@pytest.mark.parametrize("seed", [0, 1, 2**63])
@pytest.mark.parametrize(("width", "height"), [(128, 64), (96, 96)])
def test_pixels_and_random_state_are_the_same_with_capture(
    pipe: Any, bcg_backend: str, bcg_device: torch.device, seed: int, width: int, height: int
) -> None:
    asked = Request(width=width, height=height, steps=4, seed=seed, guidance_scale=0.0)
    states = [_random_state(bcg_device)]
    eager = make_picture(pipe, asked, bcg_device)
    states.append(_random_state(bcg_device))
    captured = make_picture(pipe, replace(asked, bcg=True, backend=bcg_backend), bcg_device)
    states.append(_random_state(bcg_device))
    assert captured.image.size == (width, height)
    assert captured.image.tobytes() == eager.image.tobytes()
    assert states[0] == states[1] == states[2]
    assert captured.stats is not None
    assert (captured.stats.calls, captured.stats.replays) == (4, 3)
    assert (captured.stats.eager_calls, captured.failures) == (0, [])
    assert eager.stats is None


def _random_state(device: torch.device) -> list[bytes]:
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return [state.numpy().tobytes() for state in states]


@pytest.mark.parametrize("breaks", ["none", "attention"])
def test_guidance_with_a_negative_prompt_is_captured_as_one_batch(
    pipe: Any, bcg_backend: str, bcg_device: torch.device, breaks: str
) -> None:
    asked = Request(
        width=64, height=64, steps=3, guidance_scale=5.0, negative_prompt="blurred, dull"
    )
    eager = make_picture(pipe, asked, bcg_device)
    said: list[str] = []
    captured = make_picture(
        pipe, replace(asked, bcg=True, backend=bcg_backend, breaks=breaks), bcg_device, said.append
    )
    assert captured.image.tobytes() == eager.image.tobytes()
    assert captured.stats is not None
    assert captured.stats.replays == 2
    assert captured.stats.breaks == (4 if breaks == "attention" else 0)
    assert said[-1] == "[Diffusion BCG] replayed 2 of 3 denoiser calls (captured 1)"


def test_the_pipeline_is_left_as_it_was(
    pipe: Any, bcg_backend: str, bcg_device: torch.device
) -> None:
    def own() -> list[set[str]]:
        return [set(part.__dict__) for part in (pipe.transformer, pipe.vae, pipe.scheduler)]

    pipe.scheduler.set_timesteps(1, mu=1.0)
    pipe.scheduler.set_begin_index(0)
    before = own()
    make_picture(
        pipe, Request(width=32, height=32, steps=1, bcg=True, backend=bcg_backend), bcg_device
    )
    assert own() == before
    assert "encode_prompt" not in pipe.__dict__
    assert "forward" not in pipe.transformer.__dict__
    assert not pipe.transformer._forward_pre_hooks


def _reads_on_the_host(pipe: Any) -> Any:
    """A time step read on the host, which no graph can hold."""
    embed = pipe.transformer.t_embedder.forward
    pipe.transformer.t_embedder.forward = lambda t: embed(t * (1.0 + 0.0 * t.sum().item()))
    return pipe


def test_a_capture_that_fails_says_so_and_the_picture_is_eager(
    pipe: Any, bcg_backend: str, bcg_device: torch.device
) -> None:
    _reads_on_the_host(pipe)
    asked = Request(width=64, height=64, steps=3, guidance_scale=0.0)
    eager = make_picture(pipe, asked, bcg_device)
    said: list[str] = []
    picture = make_picture(
        pipe, replace(asked, bcg=True, backend=bcg_backend), bcg_device, said.append
    )
    failed = [line for line in said if line.startswith("[Diffusion BCG] capture failed: ")]
    assert len(failed) == 1
    assert "\n" not in failed[0]
    assert "[Diffusion BCG] replayed 0 of 3 denoiser calls (eager 3)" in said
    assert not any(line.startswith("[Diffusion BCG] captured") for line in said)
    assert picture.image.tobytes() == eager.image.tobytes()
    assert picture.stats is not None
    assert picture.stats.fallbacks == len(picture.failures) == 1


def test_the_command_goes_on_after_a_failed_capture(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    build = tiny.tiny_pipeline
    monkeypatch.setattr(tiny, "tiny_pipeline", lambda *a: _reads_on_the_host(build(*a)))
    assert cli.main(["generate", "--enable-breakable-cuda-graph", *SMALL]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("[Diffusion BCG] capture failed: ")
    assert out[-1].startswith("Pixel data generated successfully")
    assert Path("bcg.png").is_file()


def test_a_compiled_denoiser_is_refused_by_the_flags_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    build = tiny.tiny_pipeline

    def compiled(*arguments: Any) -> Any:
        made = build(*arguments)
        made.transformer.compile()
        return made

    monkeypatch.setattr(tiny, "tiny_pipeline", compiled)
    option = "--enable-breakable-cuda-graph"
    assert "compiled" in refused(capsys, option, option, *SMALL)


@pytest.mark.parametrize("pattern", ["nothing.*", "os:nope"])
def test_a_pattern_that_places_no_break_is_refused(
    pattern: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--enable-breakable-cuda-graph", "--bcg-breaks", pattern, *SMALL)
    assert pattern in refused(capsys, "--bcg-breaks: ", *flags)


def test_buckets_for_a_model_without_an_adapter_are_refused(bcg_device: torch.device) -> None:
    class Unknown:
        components: ClassVar[dict[str, Any]] = {"transformer": torch.nn.Linear(1, 1)}

        def __call__(self, **options: Any) -> None: ...

    asked = Request(bcg=True, text_buckets=(64,))
    with pytest.raises(picture.OptionError, match=r"--bcg-text-buckets: .*Linear"):
        make_picture(Unknown(), asked, bcg_device)


def test_a_weight_that_transformers_would_draw_at_random_is_refused(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "incomplete"
    shutil.copytree(checkpoint, folder)
    file = folder / "text_encoder" / "model.safetensors"
    weights = load_file(file)
    del weights["layers.0.mlp.gate_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    line = refused(capsys, "--model-path", "--model-path", str(folder), *SMALL)
    assert "lacks weights" in line
    assert "layers.0.mlp.gate_proj.weight" in line


def test_an_option_that_the_pipeline_lacks_is_refused(bcg_device: torch.device) -> None:
    class Plain:
        def __call__(self, prompt: str, generator: Any = None) -> None: ...

    with pytest.raises(picture.OptionError, match="--width: a Plain takes no width"):
        make_picture(Plain(), Request(), bcg_device)


# The command


def test_a_checkpoint_on_disk_paints_what_the_built_in_pipeline_does(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--enable-breakable-cuda-graph", *SMALL)
    assert cli.main(["generate", *flags, "--out", "a.png"]) == 0
    assert cli.main(["generate", *flags, "--out", "b.png", "--model-path", str(checkpoint)]) == 0
    with Image.open("a.png") as built_in, Image.open("b.png") as loaded:
        assert built_in.size == loaded.size == (64, 48)
        assert built_in.tobytes() == loaded.tobytes()
    assert sorted(os.listdir()) == ["a.png", "b.png"]
    lines = capsys.readouterr().out.splitlines()
    half = len(lines) // 2
    assert [line.split()[:3] for line in lines[:half]] == [
        ["[Diffusion", "BCG]", "captured"],
        ["[Diffusion", "BCG]", "replayed"],
        ["Pixel", "data", "generated"],
    ]
    assert lines[half - 1].endswith(" seconds: a.png")


def test_the_perf_dump_has_environment_stages_and_statistics() -> None:
    flags = ("--enable-breakable-cuda-graph", "--perf-dump-path", "perf.json")
    assert cli.main(["generate", *SMALL, *flags]) == 0
    dump = json.loads(Path("perf.json").read_text())
    assert dump["environment"]["torch"] == torch.__version__
    assert [step["name"] for step in dump["steps"]] == [
        "TextEncodingStage",
        "DenoisingStage",
        "DecodingStage",
    ]
    assert [len(step["per_step_ms"]) for step in dump["steps"]] == [0, 2, 0]
    assert all(step["duration_ms"] > 0 for step in dump["steps"])
    assert dump["steps"][1]["duration_ms"] == pytest.approx(sum(dump["steps"][1]["per_step_ms"]))
    assert dump["denoiser_calls"] == 2
    assert dump["notes"] == []
    bcg = dump["bcg"]
    assert bcg["enabled"]
    assert (bcg["calls"], bcg["captures"], bcg["replays"]) == (2, 1, 1)
    assert bcg["graphs"] == 1
    assert bcg["segments"] == bcg["capture_events"][0]["segments"] >= 1
    assert bcg["pool_bytes"] > 0


def test_a_name_that_the_terminal_cannot_show_is_a_picture_all_the_same() -> None:
    done = subprocess.run(
        [BCG, "generate", *SMALL, "--out", "é.png"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith(": \\xe9.png\n")
    assert os.listdir() == ["é.png"]


def test_without_the_flag_nothing_is_captured_and_idle_options_are_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["generate", *SMALL, "--bcg-text-buckets", "64"]) == 0
    out, err = capsys.readouterr()
    assert "BCG" not in out
    assert "do nothing without --enable-breakable-cuda-graph" in err


def test_bcg_disable_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BCG_DISABLE", "1")
    assert cli.main(["generate", *SMALL, "--enable-breakable-cuda-graph"]) == 0
    out = capsys.readouterr().out
    assert "[Diffusion BCG] turned off by BCG_DISABLE=1" in out
    assert "[Diffusion BCG] replayed 0 of 2 denoiser calls (eager 2)" in out


@pytest.mark.parametrize("show", [False, True])
def test_an_unexpected_failure_is_one_line_and_the_old_picture_stays(
    show: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks_in_the_middle(self: Any, file: Any, format: str) -> None:  # noqa: A002
        file.write(b"half")
        raise OSError("the disk is\nfull")

    Path("bcg.png").write_bytes(b"old")
    monkeypatch.setattr(Image.Image, "save", breaks_in_the_middle)
    monkeypatch.setenv("BCG_TRACEBACK", "1" if show else "0")
    assert cli.main(["generate", *SMALL]) == 1
    err = capsys.readouterr().err
    assert err.splitlines()[-1].startswith("bcg generate: failed: OSError: the disk is full")
    assert ("Traceback" in err) == show
    assert err.count("\n") == 1 or show
    assert os.listdir() == ["bcg.png"]
    assert Path("bcg.png").read_bytes() == b"old"


def test_an_interrupt_ends_quietly_and_leaves_no_file() -> None:
    steps = ("--num-inference-steps", "1000")
    process = subprocess.Popen(
        [BCG, "generate", *SMALL, *steps, "--enable-breakable-cuda-graph"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with contextlib.ExitStack() as stack:
        stack.callback(process.kill)
        assert process.stdout is not None
        assert process.stdout.readline().startswith("[Diffusion BCG] captured")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "")
    assert os.listdir() == []


# The application around it


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("bcg ")


@pytest.mark.parametrize("arguments", [["--no-such"], ["no-such-command"]])
def test_a_mistake_before_the_command_is_one_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert arguments[0] in err


def test_commands_come_from_entry_points_and_a_broken_one_breaks_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "extra_commands.py").write_text(
        "import typer\napp = typer.Typer()\n@app.command()\ndef hello() -> None:\n"
        "    '''Say hello.'''\n    print('hello')\n    raise typer.Exit(1)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    found = {
        name: EntryPoint(name, value, commands.GROUP)
        for name, value in (("hello", "extra_commands:app"), ("broken", "no_such_module:app"))
    }
    monkeypatch.setattr(commands, "added", lambda: found)
    assert cli.main(["hello"]) == 1
    assert capsys.readouterr().out == "hello\n"
    assert cli.main(["broken"]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "no_such_module:app" in err
    assert cli.main([]) == 0
    listed = capsys.readouterr().out
    assert all(word in listed for word in ("generate", "Say hello.", "cannot be loaded"))
    refused(capsys, "--width", "--width", "1")


@pytest.mark.parametrize("package", ["typer", "rich", "diffusers"])
def test_a_package_of_the_extra_that_is_missing_is_named(
    package: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(sys.modules):
        if name.startswith(("bcg_core.cli.", "rich.")) or name in ("rich", package):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    assert cli.main(["generate", *SMALL]) == 1
    err = capsys.readouterr().err
    assert err == f"bcg generate: {package} is not installed; pip install 'pytest-bcg[diffusers]'\n"
