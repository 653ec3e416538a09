"""The CUDA backend: one ``torch.cuda.CUDAGraph`` a segment, all in one private pool."""

from __future__ import annotations

import inspect
import threading
import warnings
import weakref
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from bcg_core.backends.pool_lock import PoolLock
from bcg_core.errors import BCGError, CaptureRefusedError, UnsupportedError
from bcg_core.layout import view_at
from bcg_core.location import Location, user_location
from bcg_core.rng import preserved

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from bcg_core.backends import Pool

Handle = tuple[int, int]
_SNAPSHOT_BY_POOL = "mempool_id" in inspect.signature(torch.cuda.memory_snapshot).parameters


class CUDAPool(PoolLock):
    """A private pool of the caching allocator, known by its handle."""

    def __init__(self, handle: Handle) -> None:
        super().__init__()
        self._handle = handle
        self._last_stream: torch.cuda.Stream | None = None

    @property
    def handle(self) -> Handle:
        return self._handle

    def bytes(self) -> int:
        return sum(segment["total_size"] for segment in self.segments())

    def segments(self) -> list[dict[str, Any]]:
        """The pool's part of the allocator's own snapshot."""
        if _SNAPSHOT_BY_POOL:
            found = torch.cuda.memory_snapshot(self._handle)
        else:
            found = torch.cuda.memory_snapshot()
        # A handle that the allocator does not know (yet) answers with all of its segments.
        return [s for s in found if tuple(s.get("segment_pool_id", ())) == self._handle]

    def fill(self, byte: int) -> int:
        """Overwrite all memory that the pool has reserved; returns the number of bytes.

        A replay after it shows whether the graph reads anything that it does not write first.
        """
        filled = 0
        for segment in self.segments():
            memory = _Memory(segment["address"], segment["total_size"])
            torch.as_tensor(memory, device=f"cuda:{segment['device']}").fill_(byte)
            filled += segment["total_size"]
        return filled

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """As :class:`PoolLock`, and in order on the device: the lock alone orders only the CPU."""
        with super().exclusive():
            stream = torch.cuda.current_stream()
            if self._last_stream is not None and self._last_stream != stream:
                stream.wait_stream(self._last_stream)
            self._last_stream = stream
            yield


class CUDASegment:
    """A captured graph; an executable of the driver."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph = graph

    def replay(self) -> None:
        self._graph.replay()

    def release(self) -> None:
        self._graph.reset()


class _Memory:
    """Raw device memory in the form in which torch imports it without owning it."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class Reads(TorchFunctionMode):
    """Tells ``hold`` of each tensor that recorded work reads and that it did not make itself.

    A function mode, because it changes nothing below Python: under a dispatch mode compiled
    functions would run uncompiled and some composite operations take another path.
    """

    def __init__(self, hold: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._hold = hold
        self._known: set[int] = set()
        self.active = False
        self.last: Location | None = None
        self.last_name = ""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.active:
            return function(*args, **kwargs)
        for value in (*args, *kwargs.values()):
            self._look(value, self._read)
        self.last, self.last_name = user_location(), getattr(function, "__name__", str(function))
        result = function(*args, **kwargs)
        self._look(result, self._made)
        return result

    def _look(self, value: Any, found: Callable[[torch.Tensor], None]) -> None:
        if isinstance(value, torch.Tensor):
            if value.is_cuda and value.layout is torch.strided:
                found(value)
        elif isinstance(value, (list, tuple)):
            for part in value:
                self._look(part, found)

    def _read(self, tensor: torch.Tensor) -> None:
        address = tensor.untyped_storage().data_ptr()
        if address not in self._known:
            self._known.add(address)
            with torch._C.DisableTorchFunction():
                self._hold(tensor)

    def _made(self, tensor: torch.Tensor) -> None:
        self._known.add(tensor.untyped_storage().data_ptr())


_side_streams: dict[int, torch.cuda.Stream] = {}
_side_streams_lock = threading.Lock()


def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which captures (and the warm-ups before them) of this device run.

    One for all: library workspaces are made for a stream on first use, and a workspace that was
    made in a warm-up outside the pool serves every later capture.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    with _side_streams_lock:
        if index not in _side_streams:
            _side_streams[index] = torch.cuda.Stream(index)
        return _side_streams[index]


@contextmanager
def on_side_stream(
    device: torch.device, stream: torch.cuda.Stream | None = None
) -> Iterator[torch.cuda.Stream]:
    """Run the body on the capture stream, ordered after and before the current stream's work."""
    side = stream if stream is not None else side_stream(device)
    current = torch.cuda.current_stream(device)
    side.wait_stream(current)
    try:
        with torch.cuda.stream(side):
            yield side
    finally:
        current.wait_stream(side)


class CUDARecorder:
    """One capture on a CUDA device."""

    def __init__(
        self,
        pool: CUDAPool,
        hold: Callable[[torch.Tensor], None],
        stream: torch.cuda.Stream | None,
        generators: tuple[torch.Generator, ...],
    ) -> None:
        self._pool = pool
        self._stream = stream
        self._generators = tuple(g for g in generators if g.device.type == "cuda")
        self._all_generators = generators
        self._reads = Reads(hold)
        self._graph: torch.cuda.CUDAGraph | None = None
        # The pool lives as long as one of its graphs does; the empty ones count for this capture.
        self._kept: list[torch.cuda.CUDAGraph] = []
        self._ranges: list[tuple[int, int]] = []
        self._live_before: set[int] = set()
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._stack = ExitStack()

    def __enter__(self) -> CUDARecorder:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        self._live_before = {
            address
            for segment in self._pool.segments()
            for address, block in _blocks(segment)
            if block["state"] == "active_allocated"
        }
        with ExitStack() as stack:
            stack.enter_context(preserved(self._all_generators, self._device))
            stack.enter_context(on_side_stream(self._device, self._stream))
            stack.enter_context(self._reads)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._reads.active = False
        try:
            if exception[0] is not None:
                self._heal_generators()
        finally:
            self._stack.close()
            self._kept.clear()

    def begin_segment(self) -> None:
        graph = self._new_graph()
        # Thread-local: another thread's CUDA calls (a data loader's) must not break the capture.
        handle: Any = self._pool.handle
        graph.capture_begin(pool=handle, capture_error_mode="thread_local")
        self._graph = graph
        self._reads.active = True

    def _new_graph(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        for generator in self._generators:
            graph.register_generator_state(generator)
        return graph

    def end_segment(self) -> CUDASegment | None:
        self._reads.active = False
        graph, self._graph = self._graph, None
        if graph is None:
            return None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                graph.capture_end()
            except RuntimeError as error:
                self._release_allocator()
                raise self._refusal("the capture was invalidated at or before", error) from error
        if any("graph is empty" in str(w.message).lower() for w in caught):
            self._kept.append(graph)
            return None
        return CUDASegment(graph)

    def explain(self, error: Exception) -> CaptureRefusedError | None:
        if isinstance(error, BCGError) or "captur" not in str(error).lower():
            return None
        return self._refusal("CUDA refused", error)

    def _refusal(self, what: str, error: Exception) -> CaptureRefusedError:
        return CaptureRefusedError(
            f"{what} {self._reads.last_name or 'the first operation'} at {self._reads.last}: "
            f"{_first_line(error)}. Move it out of the forward pass, or put it into a function "
            "marked with eager_on_graph()",
            self._reads.last_name,
            self._reads.last,
            str(error),
        )

    def abandon_segment(self) -> None:
        self._reads.active = False
        graph, self._graph = self._graph, None
        if graph is None:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                graph.capture_end()
                graph.reset()
            except RuntimeError:
                self._release_allocator()

    def _release_allocator(self) -> None:
        """After a capture that ended in an error the allocator keeps routing to the pool."""
        index = self._device.index or 0
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(index, self._pool.handle)
            torch._C._cuda_releasePool(index, self._pool.handle)
        torch.cuda.synchronize(self._device)

    def _heal_generators(self) -> None:
        """Bring generators out of capture mode, in which a broken capture can leave them.

        There the next eager random number raises, and of all that was tried (torch 2.11) only
        the end of a capture that succeeds helps. Whether it is needed is seen by drawing; their
        former states are put back by the caller.
        """
        for _ in range(2):
            try:
                for generator in (None, *self._generators):
                    torch.rand(1, device=self._device, generator=generator)
                return
            except RuntimeError:
                graph = self._new_graph()
                graph.capture_begin(capture_error_mode="thread_local")
                torch.empty(1, device=self._device).zero_()
                graph.capture_end()
                graph.reset()

    def owns(self, tensor: torch.Tensor) -> bool:
        if not tensor.is_cuda or tensor.layout is not torch.strided:
            return False
        if type(tensor) is not torch.Tensor:
            return False
        address = tensor.untyped_storage().data_ptr()
        if address == 0 or address in self._live_before:
            return False
        if not self._in_pool(address):
            self._ranges = [
                (s["address"], s["address"] + s["total_size"]) for s in self._pool.segments()
            ]
        return self._in_pool(address)

    def _in_pool(self, address: int) -> bool:
        return any(low <= address < high for low, high in self._ranges)

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        memory = torch.as_tensor(
            _Memory(storage.data_ptr(), storage.nbytes()), device=tensor.device
        )
        return view_at(memory, tensor.storage_offset() * tensor.element_size(), tensor)


def _blocks(segment: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    address = segment["address"]
    for block in segment["blocks"]:
        yield block.get("address", address), block
        address += block["size"]


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


class CUDABackend:
    """Captures with CUDA graphs."""

    name = "cuda"

    def __init__(self) -> None:
        # Two graphs given the same handle have to take turns under the same lock.
        self._pools: weakref.WeakValueDictionary[Handle, CUDAPool] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()

    def new_pool(self, handle: Any = None) -> CUDAPool:
        if handle is None:
            handle = torch.cuda.graph_pool_handle()
        if not (isinstance(handle, tuple) and len(handle) == 2):
            raise UnsupportedError(
                f"a pool of type {type(handle).__name__} is not a CUDA pool handle; pass what "
                "another graph's pool() or torch.cuda.graph_pool_handle() returned"
            )
        handle = (int(handle[0]), int(handle[1]))
        with self._lock:
            pool = self._pools.get(handle)
            if pool is None:
                pool = self._pools[handle] = CUDAPool(handle)
            return pool

    def recorder(
        self,
        pool: Pool,
        hold: Callable[[torch.Tensor], None],
        stream: Any = None,
        generators: tuple[torch.Generator, ...] = (),
    ) -> CUDARecorder:
        assert isinstance(pool, CUDAPool)
        return CUDARecorder(pool, hold, stream, generators)

    def eager(self, pool: Pool) -> AbstractContextManager[None]:
        return nullcontext()

    def warm_up(self) -> AbstractContextManager[Any]:
        return on_side_stream(torch.device("cuda", torch.cuda.current_device()))

    def is_capturing(self) -> bool:
        return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


CUDA = CUDABackend()
