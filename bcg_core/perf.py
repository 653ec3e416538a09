"""How long the stages of a pipeline take, on a synchronised device, and where that was measured."""

from __future__ import annotations

import functools
import os
import platform
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

TEXT_ENCODING = "TextEncodingStage"
DENOISING = "DenoisingStage"
DECODING = "DecodingStage"
_PACKAGES = ("pytest-bcg", "diffusers", "transformers", "accelerate", "safetensors", "numpy")


@dataclass
class Stage:
    """One stage of a run. ``duration_ms`` is ``None`` where the stage did not run."""

    name: str
    duration_ms: float | None = None
    per_step_ms: list[float] = field(default_factory=list)

    def add(self, milliseconds: float) -> None:
        self.duration_ms = (self.duration_ms or 0.0) + milliseconds


class Timeline:
    """The three stages of a run, filled while :func:`timed_stages` is open."""

    def __init__(self, device: torch.device, on_step: Callable[[], None]) -> None:
        self.text_encoding = Stage(TEXT_ENCODING)
        self.denoising = Stage(DENOISING)
        self.decoding = Stage(DECODING)
        self.denoiser_calls = 0
        self.notes: list[str] = []
        """Why a stage could not be timed, or not step by step."""
        self._device = device
        self._on_step = on_step
        self._boundary: float | None = None

    @property
    def stages(self) -> list[Stage]:
        return [self.text_encoding, self.denoising, self.decoding]

    def now(self) -> float:
        """The time in milliseconds at which everything asked of the device so far is done."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() * 1000

    def denoiser_called(self) -> None:
        self.denoiser_calls += 1
        if self._boundary is None:
            self._boundary = self.now()

    def step_done(self) -> None:
        """A step lasts from the end of the one before it; the first, from its denoiser call."""
        if self._boundary is None:
            return
        ended = self.now()
        self.denoising.per_step_ms.append(ended - self._boundary)
        self.denoising.add(ended - self._boundary)
        self._boundary = ended
        self._on_step()

    def timed(self, stage: Stage) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """A decorator: the time of each call is added to ``stage``."""

        def around(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def call(*args: Any, **kwargs: Any) -> Any:
                began = self.now()
                try:
                    return function(*args, **kwargs)
                finally:
                    stage.add(self.now() - began)

            return call

        return around

    def ending_step(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A decorator: each call that returns is the end of a denoising step."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            self.step_done()
            return result

        return call


@contextmanager
def timed_stages(
    pipe: Any,
    denoisers: Mapping[str, torch.nn.Module],
    device: torch.device,
    on_step: Callable[[], None] = lambda: None,
) -> Iterator[Timeline]:
    """Time the runs of ``pipe`` in the body; the pipeline is as it was afterwards.

    Text encoding is ``pipe.encode_prompt``, decoding ``pipe.vae.decode``; a denoising step ends
    when ``pipe.scheduler.step`` returns. What a pipeline does not have is named in ``notes``.
    """
    timeline = Timeline(device, on_step)
    owner = type(pipe).__name__
    with ExitStack() as restore:
        for part, name, around, stage in (
            (None, "encode_prompt", timeline.timed(timeline.text_encoding), TEXT_ENCODING),
            ("vae", "decode", timeline.timed(timeline.decoding), DECODING),
            ("scheduler", "step", timeline.ending_step, DENOISING),
        ):
            target = pipe if part is None else getattr(pipe, part, None)
            if callable(getattr(target, name, None)):
                restore.enter_context(_replaced(target, name, around))
            else:
                where = name if part is None else f"{part}.{name}"
                timeline.notes.append(f"{owner} has no {where}: {stage} is not timed")
        for module in denoisers.values():
            handle = module.register_forward_pre_hook(lambda *_: timeline.denoiser_called())
            restore.callback(handle.remove)
        if not denoisers:
            timeline.notes.append(f"{owner} has no known denoiser: {DENOISING} is not timed")
        yield timeline


@contextmanager
def _replaced(
    owner: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """``owner.name`` wrapped on this instance alone."""
    own = owner.__dict__.get(name)
    setattr(owner, name, around(getattr(owner, name)))
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def environment(device: torch.device) -> dict[str, Any]:
    """What a reader needs to compare two runs: machine, versions, device, our own switches."""
    record: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "device": str(device),
        "cpu_threads": torch.get_num_threads(),
        "switches": {k: v for k, v in sorted(os.environ.items()) if k.startswith("BCG_")},
    }
    for package in _PACKAGES:
        record[package] = _version(package)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        record["gpu"] = properties.name
        record["gpu_memory_bytes"] = properties.total_memory
        record["compute_capability"] = f"{properties.major}.{properties.minor}"
    return record


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
