"""Arenas: blocks at fixed addresses that live exactly as long as their tensors, then are poisoned.

A block is owned by the storage of the tensor that was allocated on it: views, tensors that
autograd holds and swapped ``.data`` are all followed, because the storage keeps the buffer object
alive and a weak reference to that object tells when the last of them is gone.
"""

from __future__ import annotations

import bisect
import ctypes
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from bcg_core import monitor
from bcg_core.location import Location, user_location

if TYPE_CHECKING:
    from collections.abc import Callable

_ALIGNMENT = 64  # the CPU allocator's own
_FIRST_CHUNK, _LAST_CHUNK = 256 << 10, 64 << 20


class Poison:
    """What the memory of dead tensors is overwritten with; another byte shows who reads it."""

    def __init__(self) -> None:
        self.byte = 0xFF  # NaN in every floating-point type, -1 in signed integers
        self.bool_byte = 0x01  # 0xFF is no valid bool

    def overwrite(self, address: int, size: int, is_bool: bool) -> None:
        """Overwrite ``size`` bytes."""
        ctypes.memset(address, self.bool_byte if is_bool else self.byte, size)


class Life:
    """One tensor's stay on a block: from its allocation to the end of its last reference."""

    __slots__ = ("died_at", "live", "made_at", "made_by")

    def __init__(self) -> None:
        self.live = True
        self.made_by: object = None
        self.made_at: Location | None = None
        self.died_at: Location | None = None


class Block:
    """A stretch of an arena, and the life that it holds or held last."""

    __slots__ = ("address", "chunk", "is_bool", "life", "offset", "ref", "size")

    def __init__(self, chunk: _Chunk, offset: int, size: int) -> None:
        self.chunk = chunk
        self.offset = offset
        self.address = chunk.address + offset
        self.size = size
        self.is_bool = False
        self.life = Life()
        self.ref: weakref.ref[memoryview] | None = None

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor with the layout of ``tensor`` over this block that does not keep it alive."""
        offset = self.offset // tensor.element_size() + tensor.storage_offset()
        return typed_view(self.chunk.views, tensor, offset)


def typed_view(
    views: dict[torch.dtype, torch.Tensor], tensor: torch.Tensor, offset: int | torch.SymInt
) -> torch.Tensor:
    """``tensor``'s layout over raw memory, ``offset`` elements in; ``views`` has a base a dtype."""
    base = views.get(tensor.dtype)
    if base is None:
        raw = views[torch.uint8]
        base = torch.empty(0, dtype=tensor.dtype)
        count = raw.numel() // base.element_size()
        base.set_(raw.untyped_storage(), 0, (count,), (1,))
        views[tensor.dtype] = base
    view = base.as_strided(tensor.size(), tensor.stride(), offset)
    if tensor.is_conj():
        view = torch.conj(view)
    if tensor.is_neg():
        view = torch._neg_view(view)
    return view


class _Chunk:
    """Memory from the system, handed out from the bottom up."""

    def __init__(self, size: int, byte: int) -> None:
        self.memory = torch.full((size,), byte, dtype=torch.uint8)
        self.address = self.memory.data_ptr()
        self.size = size
        # No block begins where the chunk does: a storage there is an alias over the chunk.
        self.used = _ALIGNMENT
        self.views = {torch.uint8: self.memory}
        buffer_type: Any = type("ChunkBuffer", (ctypes.c_char * size,), {})
        buffer = buffer_type.from_address(self.address)
        buffer.owner = self.memory  # whoever holds a slice holds the memory
        self.buffer = memoryview(buffer).cast("B")


class Arena:
    """Blocks by size, reused last in, first out, as a caching allocator does.

    ``on_free`` decides what happens to the bytes of a block whose last tensor died: by default
    they are poisoned at once, which is right for memory that eager code uses.
    """

    def __init__(self) -> None:
        self.on_free: Callable[[Block], None] | None = None
        self.poison = Poison()
        self._free: dict[int, list[Block]] = {}
        self._blocks: dict[int, Block] = {}
        self._chunks: list[_Chunk] = []

    def poison_block(self, block: Block) -> None:
        """Overwrite the bytes of a block now."""
        self.poison.overwrite(block.address, block.size, block.is_bool)

    def wipe(self) -> None:
        """Overwrite every block, those of living tensors too.

        A replay after it shows whether the graph reads anything that it does not write first.
        """
        for block in self._blocks.values():
            self.poison_block(block)

    def bytes(self) -> int:
        """Bytes taken from the system."""
        return sum(chunk.size for chunk in self._chunks)

    def allocate(
        self, size: torch.Size | tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """A tensor of this layout on a block of its own, holding whatever was there before."""
        reach = 1 + sum((n - 1) * s for n, s in zip(size, stride))
        if 0 in size or reach <= 0:
            return torch.empty_strided(size, stride, dtype=dtype)
        return self.allocate_bytes(reach * dtype.itemsize, dtype).as_strided(size, stride)

    def allocate_bytes(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A one-dimensional tensor of ``dtype`` over ``count`` bytes of one block."""
        size = -(-count // _ALIGNMENT) * _ALIGNMENT
        free = self._free.get(size)
        block = free.pop() if free else self._carve(size)
        block.life = Life()
        if monitor.current() is not None:
            block.life.made_at = user_location()
        block.is_bool = dtype is torch.bool
        view = block.chunk.buffer[block.offset : block.offset + count]
        block.ref = weakref.ref(view, partial(self._died, block))
        return torch.frombuffer(view, dtype=dtype)

    def block_of(self, tensor: torch.Tensor) -> Block | None:
        """The block on which the storage of ``tensor`` lies, ``None`` if it is not of here."""
        return self._blocks.get(tensor.untyped_storage().data_ptr())

    def block_at(self, address: int) -> Block | None:
        """The block that holds ``address``, live or not."""
        for chunk in self._chunks:
            if chunk.address <= address < chunk.address + chunk.used:
                starts = sorted(b.address for b in self._blocks.values() if b.chunk is chunk)
                return self._blocks[starts[bisect.bisect_right(starts, address) - 1]]
        return None

    def _carve(self, size: int) -> Block:
        chunk = self._chunks[-1] if self._chunks else None
        if chunk is None or chunk.used + size > chunk.size:
            growth = min(_FIRST_CHUNK << len(self._chunks), _LAST_CHUNK)
            chunk = _Chunk(max(growth, size + _ALIGNMENT), self.poison.byte)
            self._chunks.append(chunk)
        block = Block(chunk, chunk.used, size)
        chunk.used += size
        self._blocks[block.address] = block
        return block

    def _died(self, block: Block, _: object) -> None:
        block.life.live = False
        if monitor.current() is not None:
            block.life.died_at = user_location()
        block.ref = None
        (self.on_free or self.poison_block)(block)
        self._free.setdefault(block.size, []).append(block)
