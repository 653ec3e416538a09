"""The main job, end to end: ``bcg generate`` as installed, in processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

pytestmark = [
    pytest.mark.bcg,
    pytest.mark.standalone,
    pytest.mark.est_time(60),
    pytest.mark.timeout(300),
]

STEPS = 8
PROMPT = "a red fox in fresh snow, early light"
WEIGHTS = os.environ.get("BCG_ZIMAGE_PATH", "")


@dataclass
class Run:
    lines: list[str]
    errors: str
    image: Image.Image
    dump: dict[str, Any]

    def line(self, start: str) -> str:
        found = [line for line in self.lines if line.startswith(start)]
        assert found, f"no line starts with {start!r} in {self.lines}"
        return found[-1]


def generate(folder: Path, model: str, *flags: str) -> Run:
    on_cuda = torch.cuda.is_available()
    out, dump = folder / "picture.png", folder / "perf.json"
    folder.mkdir()
    done = subprocess.run(
        [
            str(Path(sys.executable).with_name("bcg")),
            "generate",
            *("--model-path", model),
            *("--prompt", PROMPT),
            *("--width", "512", "--height", "512"),
            *("--num-inference-steps", str(STEPS)),
            *("--guidance-scale", "0"),
            *("--seed", "7"),
            *("--dit-layerwise-offload", "false", "--dit-cpu-offload", "false"),
            *("--enable-torch-compile", "false"),
            *("--device", "cuda" if on_cuda else "cpu"),
            *("--backend", "cuda" if on_cuda else "simulated"),
            *("--perf-dump-path", str(dump)),
            *("--out", str(out)),
            *flags,
        ],
        capture_output=True,
        text=True,
        timeout=300,
        env={k: v for k, v in os.environ.items() if not k.startswith("BCG_")},
        check=False,
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    with Image.open(out) as image:
        image.load()
    return Run(done.stdout.splitlines(), done.stderr, image, json.loads(dump.read_text()))


def check(tmp_path: Path, model: str) -> None:
    captured = generate(
        tmp_path / "captured",
        model,
        "--enable-breakable-cuda-graph",
        *("--bcg-text-buckets", "128"),
    )
    stats = captured.dump["bcg"]
    assert stats["enabled"]
    assert not any("capture failed" in line for line in captured.lines), captured.lines
    assert (stats["fallbacks"], stats["eager_calls"], stats["capture_failures"]) == (0, 0, [])
    assert "graphs=" in captured.line("[Diffusion BCG] captured transformer:")
    # One denoiser call a step, counted outside the engine; the first captures, the rest replay.
    assert captured.dump["denoiser_calls"] == stats["calls"] == STEPS
    assert stats["replays"] == STEPS - 1
    assert captured.line("[Diffusion BCG] replayed") == (
        f"[Diffusion BCG] replayed {STEPS - 1} of {STEPS} denoiser calls (captured 1)"
    )
    # The prompt's own caption length, and the bucket ahead of the prompt that will need it.
    assert stats["captures"] == len(stats["capture_events"]) == 2
    assert captured.line("Pixel data generated successfully").endswith("picture.png")
    stages = {step["name"]: step for step in captured.dump["steps"]}
    assert len(stages["DenoisingStage"]["per_step_ms"]) == STEPS
    assert all(stage["duration_ms"] > 0 for stage in stages.values())

    eager = generate(tmp_path / "eager", model)
    assert not any("BCG" in line for line in eager.lines), eager.lines
    assert not eager.dump["bcg"]["enabled"]
    assert eager.dump["denoiser_calls"] == STEPS
    assert captured.image.size == eager.image.size == (512, 512)
    assert captured.image.tobytes() == eager.image.tobytes()


def test_zimage_turbo_true_bcg_generate(tmp_path: Path) -> None:
    check(tmp_path, "builtin:tiny")


@pytest.mark.gpu(memory="30GiB")
@pytest.mark.skipif(not WEIGHTS, reason="BCG_ZIMAGE_PATH names no folder with Z-Image-Turbo")
def test_zimage_turbo_true_bcg_generate_with_real_weights(tmp_path: Path) -> None:
    check(tmp_path, WEIGHTS)
