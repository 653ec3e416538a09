"""The global state that a result depends on besides its arguments: read, compared, restored.

Kernels are chosen by flags (TF32, deterministic algorithms, attention back ends) and by modes
(autocast, grad, inference). A call under other flags is another call; a break that ran under
``torch.autocast(enabled=False)`` at capture must run under it at replay, where the ``with`` block
around it is no longer executed.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

AUTOCAST_DEVICES = ("cpu", "cuda")
_PRECISIONS = (
    ("generic", "all"),
    ("cuda", "matmul"),
    ("cuda", "conv"),
    ("cuda", "rnn"),
    ("mkldnn", "matmul"),
    ("mkldnn", "conv"),
)
_SDPA_SETTERS: dict[str, Callable[[bool], None]] = {
    "flash": torch.backends.cuda.enable_flash_sdp,
    "mem_efficient": torch.backends.cuda.enable_mem_efficient_sdp,
    "math": torch.backends.cuda.enable_math_sdp,
    "cudnn": torch.backends.cuda.enable_cudnn_sdp,
}


class Autocast(NamedTuple):
    """The autocast state of one device type."""

    device: str
    enabled: bool
    dtype: torch.dtype


class Modes(NamedTuple):
    """What a forward pass itself may switch around a break, by ``with`` blocks."""

    grad: bool
    inference: bool
    autocast: tuple[Autocast, ...]
    autocast_cache: bool
    sdpa: tuple[bool, ...]


class Ambient(NamedTuple):
    """Modes and the flags by which kernels are chosen; hashable, comparable field by field."""

    modes: Modes
    flags: tuple[tuple[str, Any], ...]

    def difference(self, other: Ambient) -> str | None:
        """One line: the first thing in which ``other`` differs from this; ``None`` if equal."""
        for name, mine, theirs in zip(Modes._fields, self.modes, other.modes):
            if mine != theirs:
                return f"{name.replace('_', ' ')} is {_short(theirs)}, captured was {_short(mine)}"
        for (name, mine), (_, theirs) in zip(self.flags, other.flags):
            if mine != theirs:
                return f"{name} is {theirs}, captured was {mine}"
        return None


def _short(value: Any) -> str:
    if isinstance(value, tuple) and value and isinstance(value[0], Autocast):
        on = [f"{a.device}/{str(a.dtype).removeprefix('torch.')}" for a in value if a.enabled]
        return ", ".join(on) or "off"
    if isinstance(value, tuple):
        on = [n for n, enabled in zip(_SDPA_SETTERS, value) if enabled]
        return "+".join(on) or "none"
    return {True: "on", False: "off"}.get(value, str(value))


def current_modes() -> Modes:
    """The modes of this thread now."""
    return Modes(
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        tuple(
            [
                Autocast(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d))
                for d in AUTOCAST_DEVICES
            ]
        ),
        torch.is_autocast_cache_enabled(),
        (
            torch._C._get_flash_sdp_enabled(),
            torch._C._get_mem_efficient_sdp_enabled(),
            torch._C._get_math_sdp_enabled(),
            torch._C._get_cudnn_sdp_enabled(),
        ),
    )


def current_ambient() -> Ambient:
    """Modes and flags of this thread now."""
    flags: list[tuple[str, Any]] = [
        ("default dtype", torch.get_default_dtype()),
        ("deterministic algorithms", torch.are_deterministic_algorithms_enabled()),
        ("cuDNN", torch._C._get_cudnn_enabled()),
        ("cuDNN benchmark", torch._C._get_cudnn_benchmark()),
        ("cuDNN deterministic", torch._C._get_cudnn_deterministic()),
        ("oneDNN", torch._C._get_mkldnn_enabled()),
        ("fp16 reduction", torch._C._get_cublas_allow_fp16_reduced_precision_reduction()),
        ("bf16 reduction", torch._C._get_cublas_allow_bf16_reduced_precision_reduction()),
        ("CPU threads", torch.get_num_threads()),
    ]
    for backend, operation in _PRECISIONS:
        precision = torch._C._get_fp32_precision_getter(backend, operation)
        flags.append((f"fp32 precision of {backend} {operation}", precision))
    return Ambient(current_modes(), tuple(flags))


@contextmanager
def modes_applied(modes: Modes) -> Iterator[None]:
    """Run the body under ``modes``; what already holds is left alone."""
    now = current_modes()
    if now == modes:
        yield
        return
    with ExitStack() as stack:
        if now.inference != modes.inference:
            stack.enter_context(torch.inference_mode(modes.inference))
        if torch.is_grad_enabled() != modes.grad:
            stack.enter_context(torch.set_grad_enabled(modes.grad))
        for mine, wanted in zip(now.autocast, modes.autocast):
            if mine != wanted or now.autocast_cache != modes.autocast_cache:
                stack.enter_context(
                    torch.autocast(
                        wanted.device,
                        dtype=wanted.dtype,
                        enabled=wanted.enabled,
                        cache_enabled=modes.autocast_cache,
                    )
                )
        if now.sdpa != modes.sdpa:
            for setter, before, wanted_flag in zip(_SDPA_SETTERS.values(), now.sdpa, modes.sdpa):
                stack.callback(setter, before)
                setter(wanted_flag)
        yield
