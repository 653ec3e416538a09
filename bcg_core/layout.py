"""Where tensors lie in memory: their byte ranges, and copies that keep overlap, strides and
alignment.

Tensors whose bytes overlap are one *span*. A copy of a span keeps the relations between its
tensors, so that a write through one is seen through the other, as in eager.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from bcg_core.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence

# A copy starts at the same address modulo this as the original: kernels, and so the bits of a
# result, are chosen by alignment too.
ALIGNMENT = 256
PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class Layout(NamedTuple):
    """What two tensors must share for one to be copied into the other byte by byte."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    conj: bool
    neg: bool


def layout_of(tensor: torch.Tensor) -> Layout:
    """The layout of ``tensor``; strides of dimensions that hold at most one element are 0."""
    shape = tuple(tensor.shape)
    stride = tensor.stride()
    if 0 in shape:
        stride = (0,) * len(shape)
    elif 1 in shape:
        stride = tuple(0 if n == 1 else s for n, s in zip(shape, stride))
    return Layout(shape, stride, tensor.dtype, tensor.device, tensor.is_conj(), tensor.is_neg())


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is strided memory, rather than sparse, nested, transformed or without any.

    A tensor that ``torch.func`` transforms is a wrapper, and of the plain type nevertheless.
    """
    return (
        tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_nested or tensor.is_meta)
        and not tensor._is_zerotensor()
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def _kind(tensor: torch.Tensor) -> str:
    if tensor.layout is not torch.strided:
        return str(tensor.layout)
    kinds = {"quantized": tensor.is_quantized, "nested": tensor.is_nested, "meta": tensor.is_meta}
    return next((kind for kind, holds in kinds.items() if holds), "torch.func-transformed or zero")


def require_plain(tensor: torch.Tensor, role: str) -> None:
    """Refuse, by ``role``, tensors that are not plain strided memory."""
    if not is_plain(tensor):
        raise UnsupportedError(
            f"{role} is a {_kind(tensor)} tensor of {tensor.dtype}; a graph can hold only dense "
            "strided tensors in memory: convert it before the call, or break around its use"
        )
    if type(tensor) not in PLAIN:
        raise UnsupportedError(
            f"{role} is a {type(tensor).__name__}, a tensor subclass; a graph can hold only plain "
            "tensors: unwrap it before the call, or break around its use"
        )


def byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """First and one-past-last address of the bytes that ``tensor`` can touch."""
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return start, start
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride()))
    return start, start + (reach + 1) * tensor.element_size()


def overlapping(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Indices of ``tensors``, grouped: two are in one group where their bytes overlap."""
    ranges = [byte_range(t) for t in tensors]
    groups: list[list[int]] = []
    end = -1
    for index in sorted(range(len(tensors)), key=ranges.__getitem__):
        low, high = ranges[index]
        if groups and low < end:
            groups[-1].append(index)
        else:
            groups.append([index])
        end = max(end, high) if groups[-1][0] != index else high
    return groups


def storage_bytes(tensor: torch.Tensor, start: int, count: int) -> torch.Tensor:
    """A one-dimensional ``uint8`` view of ``count`` bytes of memory from address ``start`` on."""
    storage = tensor.untyped_storage()
    view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return view.set_(storage, start - storage.data_ptr(), (count,), (1,))


def view_at(memory: torch.Tensor, offset: int | torch.SymInt, like: torch.Tensor) -> torch.Tensor:
    """A view of ``memory``'s storage, ``offset`` bytes in, with the layout of ``like``."""
    base = torch.empty(0, dtype=like.dtype, device=memory.device)
    start = memory.storage_offset() * memory.element_size() + offset
    view = base.set_(
        memory.untyped_storage(), start // like.element_size(), like.size(), like.stride()
    )
    if like.is_conj():
        view = torch.conj(view)
    if like.is_neg():
        view = torch._neg_view(view)
    return view


@dataclass
class Span:
    """A copy of the memory of tensors that overlap, and views of it in place of each.

    The memory is a normal tensor, never an inference tensor, so that it can be written to in any
    mode.
    """

    memory: torch.Tensor
    views: list[torch.Tensor]
    offsets: tuple[int, ...]

    @classmethod
    def copy_of(cls, tensors: Sequence[torch.Tensor]) -> Span:
        """Copy the bytes under ``tensors`` (all on one device) into memory of their own."""
        first = tensors[0]
        ranges = [byte_range(t) for t in tensors]
        low = min(low for low, _ in ranges)
        high = max(high for _, high in ranges)
        lead = low % ALIGNMENT
        with torch.inference_mode(False), torch.no_grad():
            # Over-allocate and start at the same residue, whatever the allocator's own alignment.
            raw = torch.empty(high - low + 2 * ALIGNMENT, dtype=torch.uint8, device=first.device)
            start = (lead - raw.data_ptr()) % ALIGNMENT
            memory = raw[start : start + high - low]
            offsets = tuple(low_ - low for low_, _ in ranges)
            views = [view_at(memory, o, t) for o, t in zip(offsets, tensors)]
            span = cls(memory, views, offsets)
            span.refill(tensors)
        return span

    def refill(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the bytes of ``tensors``, which must have the layouts and offsets of the views."""
        if len(tensors) == 1 and dense(self.views[0]):
            self.views[0].copy_(tensors[0])
        elif self.memory.numel():
            low = min(byte_range(t)[0] for t in tensors)
            self.memory.copy_(storage_bytes(tensors[0], low, self.memory.numel()))

    def write_back(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the bytes of the span into ``tensors``: what a model wrote to its arguments."""
        for view, tensor in zip(self.views, tensors):
            if dense(view):
                tensor.copy_(view)
            else:
                low, high = byte_range(tensor)
                offset = byte_range(view)[0] - self.memory.data_ptr()
                storage_bytes(tensor, low, high - low).copy_(
                    self.memory[offset : offset + high - low]
                )


def dense(tensor: torch.Tensor) -> bool:
    """Whether each byte under the tensor belongs to exactly one element."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))
