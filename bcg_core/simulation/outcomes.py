"""What an operation would return: asked of its real kernel, run on zeros, once for each signature.

A meta kernel can be wrong about strides (convolution says contiguous where the CPU kernel gives
channels-last) and is ten times slower than the kernel itself on small tensors; the kernel run on
zeros of the same layout is right by construction. Where zeros are no valid input the meta kernel
answers.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from bcg_core.rng import preserved

if TYPE_CHECKING:
    from collections.abc import Sequence

_MAX_KNOWN = 20_000


class Fresh(NamedTuple):
    """An output with memory of its own."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Same(NamedTuple):
    """An output that is the tensor argument of this index."""

    argument: int


class Outcome(NamedTuple):
    """The outputs of an operation: ``Fresh``, ``Same``, or plain values."""

    outputs: tuple[Any, ...]
    sequence: type | None
    is_view: bool
    resized: dict[int, Fresh]


_known: dict[Any, Outcome] = {}


def forget() -> None:
    """Empty the cache, so that the next capture is a cold one."""
    _known.clear()


def outcome_of(
    operation: Any,
    key: Any,
    tensors: Sequence[torch.Tensor],
    template: tuple[Any, Any],
    is_random: bool,
) -> Outcome:
    """The outcome of ``operation`` on arguments of these layouts.

    ``template`` is ``(args, kwargs)`` with an :class:`Index` in place of each tensor; ``key``
    holds all that the outcome depends on, or is ``None`` where that cannot be hashed.
    """
    known = None if key is None else _known.get(key)
    if known is None:
        with ExitStack() as stack:
            if is_random:
                generators = (a for a in template[1].values() if isinstance(a, torch.Generator))
                stack.enter_context(preserved(tuple(generators)))
            known = _ask(operation, tensors, template)
        if key is not None:
            if len(_known) >= _MAX_KNOWN:
                _known.clear()
            _known[key] = known
    return known


class Index(int):
    """The place of a tensor among an operation's tensors."""


def fill(template: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """``template`` with each :class:`Index` replaced by that tensor."""
    if isinstance(template, Index):
        return tensors[template]
    if isinstance(template, (list, tuple)):
        return type(template)([fill(part, tensors) for part in template])
    if isinstance(template, dict):
        return {name: fill(part, tensors) for name, part in template.items()}
    return template


def _ask(operation: Any, tensors: Sequence[torch.Tensor], template: tuple[Any, Any]) -> Outcome:
    zeros = [torch.empty_strided(t.size(), t.stride(), dtype=t.dtype).zero_() for t in tensors]
    args, kwargs = fill(template, zeros)
    try:
        result = operation(*args, **kwargs)
    except (RuntimeError, IndexError, ValueError) as error:
        zeros = [t.to("meta") for t in zeros]
        args, kwargs = fill(template, zeros)
        try:
            if "device" in kwargs:
                kwargs["device"] = "meta"
            result = operation(*args, **kwargs)
        except Exception:
            raise error from None
    return _classify(result, tensors, zeros)


def _classify(
    result: Any, tensors: Sequence[torch.Tensor], zeros: Sequence[torch.Tensor]
) -> Outcome:
    sequence = type(result) if isinstance(result, (list, tuple)) else None
    parts = result if sequence else (result,)
    storages = {z.untyped_storage()._cdata: i for i, z in enumerate(zeros) if z.numel()}
    outputs: list[Any] = []
    is_view = False
    for part in parts:
        if not isinstance(part, torch.Tensor):
            outputs.append(part)
            continue
        argument = next((i for i, z in enumerate(zeros) if z is part), None)
        if argument is not None:
            outputs.append(Same(argument))
        elif part.numel() and part.untyped_storage()._cdata in storages:
            is_view = True
        else:
            outputs.append(Fresh(tuple(part.size()), part.stride(), part.dtype))
    resized = {
        i: Fresh(tuple(z.size()), z.stride(), z.dtype)
        for i, (t, z) in enumerate(zip(tensors, zeros))
        if t.size() != z.size()
    }
    return Outcome(tuple(outputs), sequence, is_view, resized)
