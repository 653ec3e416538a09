"""One picture through a pipeline, timed by stage, with the denoiser captured or not."""

from __future__ import annotations

import inspect
import os
import time
import warnings
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from bcg_core.cli.option_error import OptionError
from bcg_core.errors import EnableError, UnsupportedError
from bcg_core.models import adapter_for
from bcg_core.perf import Timeline, environment, timed_stages
from bcg_core.pipeline import denoisers, enable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from PIL.Image import Image

    from bcg_core.cli.request import Request
    from bcg_core.pipeline import Session
    from bcg_core.runner import CaptureEvent
    from bcg_core.stats import Stats

_PREFIX = "[Diffusion BCG]"
_MIN_GRAPHS = 8


@dataclass
class Picture:
    """The image and how it came about; ``stats`` is ``None`` where nothing was captured."""

    image: Image
    timeline: Timeline
    seconds: float
    stats: Stats | None = None
    captured: list[CaptureEvent] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def make_picture(
    pipe: Any,
    request: Request,
    device: torch.device,
    say: Callable[[str], None] = print,
    on_step: Callable[[], None] = lambda: None,
) -> Picture:
    """Run ``pipe`` once. ``say`` gets each line about capture and replay as it comes about.

    All random numbers come from one generator made from the seed: the global ones stay as they
    are, with capture and without. The pipeline is left as it was.
    """
    arguments = _arguments(pipe, request)
    if request.bcg and os.environ.get("BCG_DISABLE") == "1":
        say(f"{_PREFIX} turned off by BCG_DISABLE=1")
    captured: list[CaptureEvent] = []
    failures: list[str] = []

    def on_capture(event: CaptureEvent) -> None:
        captured.append(event)
        say(
            f"{_PREFIX} captured {event.module}: graphs={event.graphs} segments={event.segments} "
            f"breaks={event.breaks} seconds={event.seconds:.3f} pool_bytes={event.pool_bytes}"
        )

    def on_fallback(reason: str) -> None:
        failures.append(" ".join(reason.split()))
        say(f"{_PREFIX} capture failed: {failures[-1]}")

    with ExitStack() as stack:
        session = None
        if request.bcg:
            session = stack.enter_context(_session(pipe, request, on_capture, on_fallback))
        timeline = stack.enter_context(timed_stages(pipe, _denoisers(pipe), device, on_step))
        began = time.perf_counter()
        with _numbers_alone():
            image = pipe(**arguments).images[0]
        seconds = time.perf_counter() - began
        # Leaving the session gives the graphs back, and with them what they count.
        stats = session.stats if session is not None else None
    if stats is not None:
        say(_summary(stats))
        if stats.eager_calls:
            for reason, count in stats.misses.items():
                say(f"{_PREFIX} not replayed {count} times: {' '.join(reason.split())}")
    return Picture(image, timeline, seconds, stats, captured, failures)


@contextmanager
def _numbers_alone() -> Iterator[None]:
    """Fail where pixels are no numbers: diffusers casts NaN to black with a warning alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "invalid value encountered in cast", RuntimeWarning)
        try:
            yield
        except RuntimeWarning as warning:
            raise ValueError(
                "the model gave pixels that are no numbers; use --dtype float32, or a "
                "--guidance-scale nearer to 1"
            ) from warning


def perf_dump(picture: Picture, request: Request, device: torch.device) -> dict[str, Any]:
    """The machine-readable record of a run, ready for JSON."""
    bcg: dict[str, Any] = {"enabled": picture.stats is not None}
    if picture.stats is not None:
        bcg |= asdict(picture.stats)
        bcg["capture_events"] = [asdict(event) for event in picture.captured]
        bcg["capture_failures"] = picture.failures
    return {
        "environment": environment(device),
        "request": asdict(request),
        "seconds": picture.seconds,
        "steps": [asdict(stage) for stage in picture.timeline.stages],
        "denoiser_calls": picture.timeline.denoiser_calls,
        "notes": picture.timeline.notes,
        "bcg": bcg,
    }


def _session(
    pipe: Any,
    request: Request,
    on_capture: Callable[[CaptureEvent], None],
    on_fallback: Callable[[str], None],
) -> Session:
    """The engine in front of the denoisers; what it refuses is refused by the option's name."""
    _check_buckets(pipe, request)
    try:
        return enable(
            pipe,
            breaks=_breaks(request),
            max_graphs=max(_MIN_GRAPHS, len(request.text_buckets) + 1),
            backend=request.backend,
            text_buckets=request.text_buckets,
            on_capture=on_capture,
            on_fallback=on_fallback,
        )
    except EnableError as error:
        raise OptionError("--enable-breakable-cuda-graph", str(error)) from error
    except UnsupportedError as error:
        raise OptionError("--bcg-breaks", str(error)) from error


def _breaks(request: Request) -> str | list[str]:
    return request.breaks if isinstance(request.breaks, str) else list(request.breaks)


def _denoisers(pipe: Any) -> dict[str, torch.nn.Module]:
    try:
        return denoisers(pipe)
    except EnableError:
        return {}


def _check_buckets(pipe: Any, request: Request) -> None:
    for name, module in _denoisers(pipe).items():
        if request.text_buckets and adapter_for(module).at_text_length is None:
            raise OptionError(
                "--bcg-text-buckets",
                f"it is not known where {name} ({type(module).__name__}) takes its caption; leave "
                "the option out, and each length is captured when it first comes",
            )


def _summary(stats: Stats) -> str:
    captured = stats.calls - stats.replays - stats.eager_calls
    rest = [
        f"{verb} {count}"
        for verb, count in (("captured", captured), ("eager", stats.eager_calls))
        if count
    ]
    line = f"{_PREFIX} replayed {stats.replays} of {stats.calls} denoiser calls"
    return f"{line} ({', '.join(rest)})" if rest else line


def _arguments(pipe: Any, request: Request) -> dict[str, Any]:
    """The call's keywords; an option that this pipeline does not have is refused by name."""
    takes = inspect.signature(pipe.__call__).parameters
    takes_any = any(one.kind is one.VAR_KEYWORD for one in takes.values())
    arguments: dict[str, Any] = {}
    for option, name, value in (
        ("--prompt", "prompt", request.prompt),
        ("--negative-prompt", "negative_prompt", request.negative_prompt),
        ("--width", "width", request.width),
        ("--height", "height", request.height),
        ("--num-inference-steps", "num_inference_steps", request.steps),
        ("--guidance-scale", "guidance_scale", request.guidance_scale),
        ("--seed", "generator", torch.Generator("cpu").manual_seed(request.seed)),
    ):
        if value is None:
            continue
        if name not in takes and not takes_any:
            raise OptionError(
                option,
                f"a {type(pipe).__name__} takes no {name}; leave the option out, or use "
                "another pipeline",
            )
        arguments[name] = value
    return arguments
