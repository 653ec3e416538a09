"""A breakable graph: the steps that a replay runs, and the capture that fills them."""

from __future__ import annotations

import gc
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from bcg_core import backends, monitor
from bcg_core.ambient import current_modes, modes_applied
from bcg_core.breaks import capture_in_progress, capturing, in_progress
from bcg_core.bridge import Bridge
from bcg_core.errors import (
    BCGError,
    CaptureError,
    NestedCaptureError,
    ReplayError,
    UnsupportedError,
)
from bcg_core.location import Location, location_of, name_of, user_location
from bcg_core.tree import flatten, map_tensors, tree_leaves, tree_tensors, unflatten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bcg_core.ambient import Modes
    from bcg_core.backends import Backend, Pool, Recorder, Segment


class Break:
    """One eager step between two segments: a function, its arguments and its bridge."""

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Any,
        modes: Modes,
        called_from: Location,
        bridge: Bridge,
    ) -> None:
        self.function = function
        self.name = break_name(function)
        self.called_from = called_from
        self._arguments = arguments
        self._leaves: list[Any] = []
        self._node = flatten(arguments, self._leaves)
        self._modes = modes
        self.bridge = bridge

    def run(self) -> None:
        """Run the function eagerly, on what the segments before have written, refill the bridge."""
        # The containers are built anew, so that a function that changes its arguments in place
        # meets the captured ones at every replay.
        args, kwargs = unflatten(self._node, iter(self._leaves), self._arguments)
        with modes_applied(self._modes):
            try:
                output = self.function(*args, **kwargs)
            except BCGError:
                raise
            except Exception as error:
                raise ReplayError(
                    f"break {self.name}, called from {self.called_from}, raised "
                    f"{type(error).__name__} at replay: {error}"
                ) from error
        self.bridge.refill(output)


def break_name(function: Callable[..., Any]) -> str:
    """The name of a break and the place where its function is defined."""
    place = location_of(function)
    return f"{name_of(function)} ({place.file}:{place.line})"


class BreakableCUDAGraph:
    """Captured segments of a computation, with eager breaks between them.

    Filled by :class:`BreakableCUDAGraphCapture`; afterwards :meth:`replay` runs it again on the
    same addresses. ``pool`` is what another graph's :meth:`pool` returned, to share its memory:
    graphs of one pool must not be replayed at the same time, and the results of one are
    overwritten by the replay of another.
    """

    def __init__(self, pool: Any = None) -> None:
        self._pool_handle = pool
        self._pool: Pool | None = None
        self._backend: Backend | None = None
        self._steps: list[Segment | Break] = []
        self._held: dict[int, torch.Tensor] = {}
        self._generators: tuple[torch.Generator, ...] = ()

    @property
    def segments(self) -> int:
        """Number of captured segments; empty ones are not kept."""
        return len(self._steps) - self.breaks

    @property
    def breaks(self) -> int:
        """Number of eager breaks."""
        return sum(isinstance(step, Break) for step in self._steps)

    def break_names(self) -> list[str]:
        """Name, file and line of each break, in the order of the replay."""
        return [step.name for step in self._steps if isinstance(step, Break)]

    def pool(self) -> Any:
        """The handle of this graph's memory pool, for another graph to share."""
        if self._pool is None:
            if self._pool_handle is None:
                raise ReplayError("this graph has no pool yet: capture it first")
            return self._pool_handle
        return self._pool.handle

    def pool_bytes(self) -> int:
        """Bytes of device memory reserved by the pool, 0 before a capture."""
        return 0 if self._pool is None else self._pool.bytes()

    def register_generator_state(self, generator: torch.Generator) -> None:
        """Say that the body draws from ``generator``, besides the default ones.

        To be called before the capture, as with ``torch.cuda.CUDAGraph``. The capture restores
        the generator's state; each replay draws from it as an eager run does.
        """
        self._generators = (*self._generators, generator)

    def replay(self) -> None:
        """Run every step again, in order.

        Raises :class:`ReplayError` when nothing is captured, :class:`NestedCaptureError` inside
        a capture, :class:`BridgeError` when a break returns something else than it did.
        """
        if not self._steps or self._pool is None:
            raise ReplayError("this graph holds nothing to replay: capture it first")
        self._refuse_inside_capture()
        with self._pool.exclusive():
            self.replay_in_turn()

    def _refuse_inside_capture(self) -> None:
        if capture_in_progress() or (self._backend and self._backend.is_capturing()):
            raise NestedCaptureError(
                "nested capture: replay() was called while this thread is capturing; call the "
                "function itself there, or replay after the capture has ended"
            )

    def replay_in_turn(self) -> None:
        """:meth:`replay` for a caller outside any capture that holds the pool already."""
        backend, pool = self._backend, self._pool
        assert backend is not None
        assert pool is not None
        watching = monitor.current()
        if watching is not None:
            watching.replaying(self)
        for step in self._steps:
            if isinstance(step, Break):
                with backend.eager(pool):
                    step.run()
                if watching is not None:
                    watching.ran(step)
            else:
                step.replay()

    def reset(self) -> None:
        """Forget the steps and give their memory back to the pool; safe to call twice."""
        steps, self._steps = self._steps, []
        for step in steps:
            if not isinstance(step, Break):
                step.release()
        self._held.clear()
        self._pool = None
        self._backend = None


class BreakableCUDAGraphCapture:
    """Capture the operations of a ``with`` block into ``graph``.

    Each segment is replayed as soon as it has been recorded, so that the breaks, and the code
    after the block, see real values. The block runs without recording gradients, outside
    inference mode. Random state is as before when it ends, however it ends; whatever else the
    block does in Python, it has done once.

    ``stream`` (CUDA) is the stream to capture on, a side stream of ours by default; ``pool`` is
    the handle of a pool to share; ``backend`` is ``"auto"``, ``"cuda"`` or ``"simulated"``.

    Raises :class:`NestedCaptureError` inside another capture, :class:`UnsupportedError` for a
    backend that is not there, and :class:`CaptureError` for work that no graph can hold or an
    error that the block caught. After an error the graph is empty, and can be captured again.
    """

    def __init__(
        self,
        graph: BreakableCUDAGraph,
        stream: Any = None,
        pool: Any = None,
        backend: str = "auto",
    ) -> None:
        self.graph = graph
        self._backend = backends.resolve(backend)
        self._stream = stream
        self._pool_handle = pool if pool is not None else graph._pool_handle
        self._bridged: set[int] = set()
        self._stack = ExitStack()
        self._recorder: Recorder
        self._failure: BaseException | None = None

    def __enter__(self) -> BreakableCUDAGraphCapture:
        if capture_in_progress() or self._backend.is_capturing():
            raise NestedCaptureError(
                "nested capture: this thread is already capturing a graph; end that capture "
                "first, or call the inner function without a capture of its own"
            )
        if self.graph._steps:
            raise CaptureError("this graph is already captured; call reset() on it first")
        pool = self._backend.new_pool(self._pool_handle)
        with ExitStack() as stack:
            stack.enter_context(pool.exclusive())
            stack.enter_context(in_progress())
            stack.enter_context(_no_garbage_collection())
            stack.enter_context(_own_autocast_cache())
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
            self._recorder = self._backend.recorder(
                pool, self._hold, self._stream, self.graph._generators
            )
            stack.enter_context(self._recorder)
            self.graph._pool = pool
            self.graph._backend = self._backend
            stack.callback(self._forget_if_failed)
            stack.enter_context(capturing(self))
            self._failure = None
            self._recorder.begin_segment()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        with self._stack:
            self._failure = self._failure or error
            try:
                if self._failure is None:
                    self._end_segment()
                else:
                    self._recorder.abandon_segment()
            except BaseException as failure:
                self._failure = failure
                raise
            refusal = self._recorder.explain(error) if isinstance(error, Exception) else None
            if refusal is not None:
                raise refusal from error
            if error is None and self._failure is not None:
                raise CaptureError(
                    f"the capture failed, and the code inside caught the error: {self._failure}; "
                    "mend its cause, or catch it inside the break"
                ) from self._failure

    def _forget_if_failed(self) -> None:
        watching = monitor.current()
        if self._failure is None:
            if watching is not None:
                watching.captured(self.graph)
        else:
            if watching is not None:
                watching.failed(self._failure)
            self.graph.reset()
            # A stored exception pins the frames of the capture, and with them its memory.
            self._failure = None

    def run_break(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """End the segment, run ``function`` eagerly, record it, begin the next segment."""
        if self._failure is not None:
            return function(*args, **kwargs)
        called_from = user_location()
        modes = current_modes()
        with capturing(None):
            try:
                self._end_segment()
                inputs = tree_tensors((args, kwargs))
                # Before the call, which may change its containers in place.
                arguments = self._hold_inputs((args, kwargs))
                given = tree_leaves((args, kwargs))
                output = function(*args, **kwargs)
                self._refuse_new_tensors(function, given, (args, kwargs))
                bridge = Bridge(break_name(function), output, inputs)
                self._bridged.update(t.untyped_storage().data_ptr() for t in bridge.tensors())
                step = Break(function, arguments, modes, called_from, bridge)
                self.graph._steps.append(step)
                return bridge.take()
            except BaseException as error:
                self._failure = self._failure or error
                raise
            finally:
                if self._failure is None:
                    self._recorder.begin_segment()

    def _refuse_new_tensors(self, function: Any, given: list[Any], arguments: Any) -> None:
        """A tensor that a break puts into its arguments is not bridged, and would go stale."""
        known = {id(leaf) for leaf in given}
        if any(id(tensor) not in known for tensor in tree_tensors(arguments)):
            raise UnsupportedError(
                f"break {break_name(function)} puts a new tensor into its arguments, which no "
                "replay would refresh; return it instead"
            )

    def _end_segment(self) -> None:
        segment = self._recorder.end_segment()
        if segment is not None:
            self.graph._steps.append(segment)
            segment.replay()

    def _hold_inputs(self, arguments: Any) -> Any:
        """The arguments as a replay gets them: weak where the pool owns them, else strong."""
        return self.weak_where_owned(arguments)

    def weak_where_owned(self, value: Any) -> Any:
        """``value`` with the tensors that the pool owns replaced by aliases that hold nothing.

        What the pool owns is rewritten by an earlier step of each replay before it is read;
        holding it would only keep its memory from being reused. A weak reference to anything
        else dangles as soon as its owner drops it.
        """
        recorder = self._recorder
        return map_tensors(lambda t: recorder.alias(t) if recorder.owns(t) else t, value)

    def rewritten(self, tensor: torch.Tensor) -> bool:
        """Whether each replay writes to the memory of ``tensor``: the pool's, or a bridge."""
        address = tensor.untyped_storage().data_ptr()
        return self._recorder.owns(tensor) or (address != 0 and address in self._bridged)

    def _hold(self, tensor: torch.Tensor) -> None:
        """Keep alive what a recorded operation reads and the pool does not own."""
        address = tensor.untyped_storage().data_ptr()
        # A bridge is held by its break: the one owner whose loss would be a fault.
        if address not in self._bridged:
            self.graph._held.setdefault(address, tensor.detach())


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """No collection inside: one that destroys an old graph mid-capture breaks the capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _own_autocast_cache() -> Iterator[None]:
    """Weights cast inside lie in the graph's pool: later eager calls must not find them."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()
