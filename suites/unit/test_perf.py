"""Stages are timed by wrapping what a pipeline has, and what it lacks is named."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bcg_core.perf import environment, timed_stages

CPU = torch.device("cpu")
NAP = 0.01


class Sleeping(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(NAP)
        return x


class Scheduler:
    def step(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Vae:
    def decode(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(3 * NAP)
        return x


class Pipe:
    def __init__(self) -> None:
        self.denoiser, self.scheduler, self.vae = Sleeping(), Scheduler(), Vae()

    def encode_prompt(self, prompt: str) -> torch.Tensor:
        """Of the class."""
        time.sleep(2 * NAP)
        return torch.zeros(1)

    def __call__(self, steps: int) -> torch.Tensor:
        x = self.encode_prompt("fox")
        for _ in range(steps):
            x = self.scheduler.step(self.denoiser(x))
        return self.vae.decode(x)


def test_every_stage_is_timed_and_the_steps_add_up() -> None:
    pipe, steps = Pipe(), []
    denoisers: dict[str, torch.nn.Module] = {"denoiser": pipe.denoiser}
    with timed_stages(pipe, denoisers, CPU, lambda: steps.append(1)) as timeline:
        pipe(3)
    text, denoising, decoding = timeline.stages
    assert [text.name, denoising.name, decoding.name] == [
        "TextEncodingStage",
        "DenoisingStage",
        "DecodingStage",
    ]
    assert text.duration_ms is not None
    assert text.duration_ms >= 2000 * NAP
    assert decoding.duration_ms is not None
    assert decoding.duration_ms >= 3000 * NAP
    assert all(step >= 1000 * NAP for step in denoising.per_step_ms)
    assert denoising.duration_ms == pytest.approx(sum(denoising.per_step_ms))
    assert (text.per_step_ms, decoding.per_step_ms) == ([], [])
    assert timeline.denoiser_calls == len(denoising.per_step_ms) == len(steps) == 3
    assert timeline.notes == []


def test_the_pipeline_is_as_before_even_when_it_raises() -> None:
    pipe = Pipe()
    pipe.vae.decode = own = lambda x: x  # type: ignore[method-assign]

    def run() -> None:
        with timed_stages(pipe, {"denoiser": pipe.denoiser}, CPU):
            assert pipe.encode_prompt.__doc__ == "Of the class."
            pipe.denoiser(torch.zeros(1))
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run()
    assert "encode_prompt" not in pipe.__dict__
    assert "step" not in pipe.scheduler.__dict__
    assert pipe.vae.decode is own
    assert not pipe.denoiser._forward_pre_hooks


def test_what_a_pipeline_lacks_is_named_and_the_rest_is_timed() -> None:
    pipe: Any = SimpleNamespace(vae=Vae())
    with timed_stages(pipe, {}, CPU) as timeline:
        pipe.vae.decode(torch.zeros(1))
    assert [stage.duration_ms is None for stage in timeline.stages] == [True, True, False]
    assert timeline.notes == [
        "SimpleNamespace has no encode_prompt: TextEncodingStage is not timed",
        "SimpleNamespace has no scheduler.step: DenoisingStage is not timed",
        "SimpleNamespace has no known denoiser: DenoisingStage is not timed",
    ]


def test_the_environment_names_the_versions_and_the_device(
    bcg_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BCG_DISABLE", "0")
    record = environment(bcg_device)
    assert record["torch"] == torch.__version__
    assert record["device"] == str(bcg_device)
    assert record["switches"]["BCG_DISABLE"] == "0"
    assert ("gpu" in record) == (bcg_device.type == "cuda")
