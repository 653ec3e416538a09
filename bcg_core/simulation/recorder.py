"""Recording: operations of a capture are written down instead of being executed."""

from __future__ import annotations

import ctypes
import weakref
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _python_dispatch as dispatch_modes
from torch.utils._python_dispatch import TorchDispatchMode

from bcg_core.errors import CaptureError, CaptureRefusedError, UseAfterFreeError
from bcg_core.layout import PLAIN, require_plain
from bcg_core.location import user_location
from bcg_core.rng import preserved
from bcg_core.simulation.host import HostAccess
from bcg_core.simulation.memory import typed_view
from bcg_core.simulation.outcomes import Fresh, Index, Same, fill, outcome_of
from bcg_core.simulation.replay import Read, SimulatedSegment, Step, copy_all
from bcg_core.simulation.traits import Traits, refused_call, traits_of, written_by

if TYPE_CHECKING:
    from collections.abc import Callable

    from bcg_core.simulation.memory import Arena, Block, Life


class DeviceMode(TorchDispatchMode):
    """Sends each operation to ``recorder`` while it records, and to the tracked heap otherwise."""

    def __init__(self, heap: Arena, recorder: SimulatedRecorder | None = None) -> None:
        super().__init__()
        self._heap = heap
        self._recorder = recorder

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._recorder is not None and self._recorder.recording:
            return self._recorder.record(operation, args, kwargs)
        return run_on_heap(self._heap, operation, args, kwargs)


def run_on_heap(heap: Arena, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an eager operation and move what it allocated onto ``heap``.

    There the memory is poisoned as soon as its last tensor dies: on the system's own heap a
    dangling reference often reads the right value by luck.
    """
    tensors = _tensors(args) + _tensors(kwargs.values())
    for tensor in tensors:
        owner = getattr(tensor, "_bcg_owner", None)
        if owner is not None and owner() is None:
            location = user_location()
            raise UseAfterFreeError(
                f"{operation} at {location} reads an input of its break that has been "
                "freed since the capture; hold what the pool does not own",
                "break input",
                str(operation),
                location,
                getattr(tensor, "_bcg_life", None),
            )
    result = operation(*args, **kwargs)
    if not isinstance(operation, torch._ops.OpOverload):
        return result
    traits = traits_of(operation)
    if traits.immediate:
        return result
    given = {t.untyped_storage()._cdata for t in tensors}
    moved: dict[int, torch.Tensor] = {}

    def move(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return value
        storage = value.untyped_storage()
        if storage._cdata in given or not storage.nbytes() or value.device.type != "cpu":
            return value
        memory = moved.get(storage._cdata)
        if memory is None:
            memory = heap.allocate_bytes(storage.nbytes(), torch.uint8)
            memory.untyped_storage().copy_(storage, False)
            moved[storage._cdata] = memory
        place = torch.empty(0, dtype=value.dtype)
        return place.set_(
            memory.untyped_storage(), value.storage_offset(), value.size(), value.stride()
        )

    if isinstance(result, (list, tuple)):
        return type(result)([move(value) for value in result])
    return move(result)


def _tensors(values: Any) -> list[torch.Tensor]:
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(_tensors(value))
    return found


class SimulatedRecorder:
    """One capture on the CPU."""

    def __init__(
        self,
        arena: Arena,
        heap: Arena,
        hold: Callable[[torch.Tensor], None],
        generators: tuple[torch.Generator, ...],
    ) -> None:
        self.recording = False
        self._arena = arena
        self._heap = heap
        self._hold = hold
        self._generators = generators
        self._steps: list[Step] = []
        self._failure: CaptureError | None = None
        self._foreign: dict[int, dict[torch.dtype, torch.Tensor]] = {}
        self._reads: dict[int, Read] = {}
        self._random_state = torch.empty(0)
        self._stack = ExitStack()

    def __enter__(self) -> SimulatedRecorder:
        with ExitStack() as stack:
            stack.enter_context(preserved(self._generators))
            stack.callback(setattr, self._arena, "on_free", self._arena.on_free)
            self._arena.on_free = self._on_free
            stack.enter_context(HostAccess(lambda: self.recording, self._refuse))
            stack.enter_context(DeviceMode(self._heap, self))
            stack.callback(_restore_modes, dispatch_modes._get_current_dispatch_mode_stack())
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self.recording = False
        self._stack.close()
        self._foreign.clear()

    def begin_segment(self) -> None:
        self.recording = True
        self._random_state = torch.default_generator.get_state()

    def end_segment(self) -> SimulatedSegment | None:
        self.recording = False
        if self._failure is not None:
            # CUDA, too, refuses to end a capture in which anything was refused, whether or not
            # the program caught the error.
            raise self._failure
        if not torch.equal(torch.default_generator.get_state(), self._random_state):
            self._refuse("setting random state", "a replay does not set it")
        steps, self._steps = self._steps, []
        reads, self._reads = self._reads, {}
        if all(step.name == "free" for step in steps):
            for step in steps:
                step.run(*step.args)
            return None
        return SimulatedSegment(steps, list(reads.values()))

    def abandon_segment(self) -> None:
        self.recording = False
        self._steps = []
        self._reads = {}

    def explain(self, error: Exception) -> CaptureError | None:
        return None  # what is refused here says so itself

    def owns(self, tensor: torch.Tensor) -> bool:
        if tensor.layout is not torch.strided or type(tensor) not in PLAIN:
            return False
        block = self._arena.block_of(tensor)
        return block is not None and block.life.made_by is self

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        block = self._arena.block_of(tensor)
        if block is not None:
            alias = block.alias(tensor)
            alias._bcg_life = block.life  # type: ignore[attr-defined]
        else:
            alias = self._outside_alias(tensor)
            alias._bcg_owner = self._owner(tensor)  # type: ignore[attr-defined]
            alias._bcg_life = self._heap_life(tensor)  # type: ignore[attr-defined]
        return alias

    def _owner(self, tensor: torch.Tensor) -> weakref.ref[Any]:
        """A reference that dies with the memory of ``tensor``, which is not the arena's."""
        block = self._heap.block_of(tensor)
        if block is not None and block.ref is not None:
            return block.ref
        return weakref.ref(tensor.untyped_storage())

    def _heap_life(self, tensor: torch.Tensor) -> Life | None:
        """The life of a tensor that a break made; ``None`` for any other."""
        block = self._heap.block_of(tensor)
        return None if block is None else block.life

    def _on_free(self, block: Block) -> None:
        # A free is an event in the order of the recording: poisoned at once, the block would be
        # wiped before an operation that was recorded to read it has run.
        memory = (block.address, block.size, block.is_bool)
        self._steps.append(Step(self._arena.poison.overwrite, memory, {}, None, "free", None))

    def _refuse(self, name: str, reason: str) -> None:
        location = user_location()
        self._failure = CaptureRefusedError(
            f"{name} at {location} cannot be captured: {reason}. Move it out of the forward "
            "pass, or put it into a function marked with eager_on_graph()",
            name,
            location,
            reason,
        )
        raise self._failure

    def _check_random(self, name: str, generator: Any) -> None:
        """Refuse what would draw other numbers at replay: no host code runs there."""
        state = torch.default_generator.get_state()
        if not torch.equal(state, self._random_state):
            self._refuse(name, "random state was set in the segment, which no replay does")
        # By address: what the dispatcher hands over is another Python object.
        drawn_from: list[Any] = [*self._generators, torch.default_generator]
        known = {known._cdata for known in drawn_from}
        if generator is not None and generator._cdata not in known:
            self._refuse(
                name,
                "it draws from a generator that the graph does not know; pass it as an argument of "
                "the call, or to graph.register_generator_state()",
            )

    def record(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Write one operation down; returns tensors at the addresses it will write to."""
        if not isinstance(operation, torch._ops.OpOverload):
            self._refuse(str(operation), "the simulation cannot record higher-order operations")
        traits = traits_of(operation)
        reason = refused_call(traits, args, kwargs)
        if reason is not None:
            self._refuse(traits.name, reason)
        if traits.immediate:
            return operation(*args, **kwargs)
        if traits.random:
            self._check_random(traits.name, kwargs.get("generator"))
        tensors: list[torch.Tensor] = []
        key: list[Any] = [operation, torch.get_default_dtype()]
        template = (
            self._scan(args, tensors, key),
            {name: self._scan(value, tensors, key, name) for name, value in kwargs.items()},
        )
        hashable: Any = tuple(key)
        try:
            hash(hashable)
        except TypeError:
            hashable = None
        outcome = outcome_of(operation, hashable, tensors, template, traits.random)
        if outcome.is_view:
            return operation(*args, **kwargs)
        for index, fresh in outcome.resized.items():
            memory = self._allocate(fresh)
            tensors[index].set_(memory)  # type: ignore[call-overload]
        results: list[Any] = []
        outs: list[torch.Tensor | None] = []
        for output in outcome.outputs:
            if type(output) is Fresh:
                result = self._allocate(output)
                results.append(result)
                outs.append(self._address(result, traits) if result.numel() else None)
            else:
                results.append(tensors[output.argument] if type(output) is Same else output)
                outs.append(None)
        if not traits.empty:
            self._append(operation, traits, template, tensors, outs)
        if outcome.sequence is None:
            return results[0] if results else None
        return outcome.sequence(results)

    def _append(
        self,
        operation: Any,
        traits: Traits,
        template: tuple[Any, Any],
        tensors: list[torch.Tensor],
        outs: list[torch.Tensor | None],
    ) -> None:
        if not traits.writes and all(out is None for out in outs):
            return
        args, kwargs = fill(template, [self._address(t, traits) for t in tensors])
        run: Callable[..., Any] = operation._op
        out = outs[0] if len(outs) == 1 else None
        if len(outs) > 1 and any(o is not None for o in outs):
            run = partial(_run_many, run, tuple(outs))
        written = (*(o for o in outs if o is not None), *written_by(traits, args, kwargs))
        self._steps.append(Step(run, args, kwargs, out, traits.name, user_location(), written))

    def _scan(
        self, value: Any, tensors: list[torch.Tensor], key: list[Any], name: str | None = None
    ) -> Any:
        """``value`` with an :class:`Index` a tensor; what decides the outcome goes into ``key``."""
        if isinstance(value, torch.Tensor):
            key.append((name, value.shape, value.stride(), value.dtype))
            tensors.append(value)
            return Index(len(tensors) - 1)
        if isinstance(value, (list, tuple)):
            key.append((name, type(value), len(value)))
            return type(value)([self._scan(part, tensors, key) for part in value])
        if isinstance(value, torch.Generator):
            key.append((name, torch.Generator))
        else:
            key.append((name, type(value), value))
        return value

    def _allocate(self, fresh: Fresh) -> torch.Tensor:
        tensor = self._arena.allocate(fresh.size, fresh.stride, fresh.dtype)
        block = self._arena.block_of(tensor)
        if block is not None:
            block.life.made_by = self
        return tensor

    def _address(self, tensor: torch.Tensor, traits: Traits) -> torch.Tensor:
        """``tensor`` as a recorded operation knows it: an address and a layout, nothing held."""
        block = self._arena.block_of(tensor)
        if block is not None:
            if block.life.made_by is not self:
                self._hold(tensor)
            return block.alias(tensor)
        require_plain(tensor, f"an argument of {traits.name} at {user_location()}")
        self._check_alias(tensor, traits)
        if not tensor.numel():
            return tensor
        self._hold(tensor)
        address = tensor.untyped_storage().data_ptr()
        if address not in self._reads:
            life = self._heap_life(tensor)
            self._reads[address] = Read(self._owner(tensor), traits.name, user_location(), life)
        return self._outside_alias(tensor)

    def _outside_alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor over memory that is not the arena's, holding nothing."""
        block = self._heap.block_of(tensor)
        if block is not None:
            return block.alias(tensor)
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        views = self._foreign.get(address)
        if views is None or views[torch.uint8].numel() != size:
            buffer = (ctypes.c_char * size).from_address(address)
            views = {torch.uint8: torch.frombuffer(buffer, dtype=torch.uint8)}
            self._foreign[address] = views
        return typed_view(views, tensor, tensor.storage_offset())

    def _check_alias(self, tensor: torch.Tensor, traits: Traits) -> None:
        """An alias may be read only while the block that it was made for is still alive."""
        for arena in (self._arena, self._heap):
            block = arena.block_at(tensor.data_ptr())
            if block is None:
                continue
            life = getattr(tensor, "_bcg_life", block.life)
            if not block.life.live or life is not block.life:
                location = user_location()
                self._failure = UseAfterFreeError(
                    f"{traits.name} at {location} reads memory of the pool that was freed"
                    f"{' and given to another tensor' if block.life.live else ''} since; keep the "
                    "tensor that owns it alive until here",
                    "pool" if arena is self._arena else "bridge",
                    traits.name,
                    location,
                    life,
                )
                raise self._failure


def _run_many(
    run: Callable[..., Any], outs: tuple[torch.Tensor | None, ...], *args: Any, **kwargs: Any
) -> None:
    copy_all(run(*args, **kwargs), outs)


def _restore_modes(modes: list[TorchDispatchMode]) -> None:
    """Make ``modes`` the stack of dispatch modes again, or our own could not leave it."""
    found = dispatch_modes._get_current_dispatch_mode_stack()
    if found == modes:
        return
    for _ in found:
        dispatch_modes._pop_mode()
    for mode in modes:
        dispatch_modes._push_mode(mode)
    names = ", ".join(type(mode).__name__ for mode in found) or "none"
    raise CaptureError(
        f"the code inside the capture changed the stack of dispatch modes (it left: {names}); "
        "leave each mode in the block that entered it"
    )
