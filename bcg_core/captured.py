"""One captured call: static inputs, the graph, and how its outputs reach the caller."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from bcg_core.ambient import modes_applied
from bcg_core.errors import CaptureError
from bcg_core.graph import BreakableCUDAGraph, BreakableCUDAGraphCapture
from bcg_core.layout import Span, byte_range, dense, overlapping, view_at
from bcg_core.rng import draws_noticed, preserved
from bcg_core.state import ModuleState, attributes_kept, generators_of, state_preserved
from bcg_core.tree import (
    describe_path,
    flatten,
    refuse_hidden_tensors,
    tree_tensors,
    unflatten,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from bcg_core.backends import Backend, Pool
    from bcg_core.plan import Plan
    from bcg_core.signature import Call

_HOW = "a replay leaves the caller's as they were: return the new value instead"


class WarmUpError(Exception):
    """Around an error of the module itself, which is the caller's and no failed capture."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class FromInput(NamedTuple):
    """An output in the memory of an input: the caller's own tensor, or a view of it."""

    leaf: int
    offset: int
    like: torch.Tensor
    is_same: bool


class StaticInputs:
    """Copies of a call's tensors at addresses that never change, outside the graph's pool."""

    def __init__(self, call: Call) -> None:
        self.groups = call.groups
        self.spans = [Span.copy_of([call.leaves[i] for i in group]) for group in call.groups]
        self.leaves = list(call.leaves)
        for group, span in zip(self.groups, self.spans):
            for index, view in zip(group, span.views):
                self.leaves[index] = view
        # One tensor object given twice is one object to the model, too.
        first: dict[int, int] = {}
        for index in call.device_leaves:
            same = first.setdefault(id(call.leaves[index]), index)
            self.leaves[index] = self.leaves[same]
        self._call = call
        self._given: list[Any] = []
        self._places = {index: self._place(index) for index in call.device_leaves}
        self.mutated: list[int] = []

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call's arguments over the static memory, in containers of their own."""
        call = self._call
        # A long list of plain values is one leaf, and no less the caller's own.
        self._given = [list(leaf) if type(leaf) is list else leaf for leaf in self.leaves]
        args, kwargs = unflatten(call.structure, iter(self._given), call.arguments)
        return args, kwargs

    def forget_call(self) -> None:
        """Let go of the caller's tensors; those that are burnt in stay with the graph."""
        del self._call, self._given

    def refill(self, leaves: list[Any]) -> None:
        """Copy a call's tensors in."""
        with torch.no_grad():
            for group, span in zip(self.groups, self.spans):
                span.refill([leaves[i] for i in group])

    def note_mutations(self, run: Callable[[], None]) -> None:
        """Find out which spans ``run`` writes to, then put their values back."""
        versions = [[view._version for view in span.views] for span in self.spans]
        before = [span.memory.clone() for span in self.spans]
        run()
        for number, (span, seen, copy) in enumerate(zip(self.spans, versions, before)):
            written = [view._version for view in span.views] != seen
            if written or not torch.equal(span.memory, copy):
                self.mutated.append(number)
                span.memory.copy_(copy)

    def require_unchanged(self, arguments: Any) -> None:
        """Refuse a body that did to its arguments what no replay does to the caller's."""
        leaves: list[Any] = []
        if flatten(arguments, leaves) != self._call.structure:
            raise CaptureError(f"forward adds to its arguments, or takes from them; {_HOW}")
        for index, (now, given) in enumerate(zip(leaves, self._given)):
            if now is not given or (type(now) is list and now != self._call.leaves[index]):
                raise CaptureError(f"forward changes argument {self._call.path(index)}; {_HOW}")
        for index in self._call.device_leaves:
            if self._place(index) != self._places[index]:
                raise CaptureError(
                    f"forward gives argument {self._call.path(index)} other memory, another "
                    f"layout or gradients; {_HOW}"
                )

    def _place(self, index: int) -> Any:
        leaf = self.leaves[index]
        # Not layout_of(), which takes strides that hold one element for the same.
        return leaf.data_ptr(), leaf.size(), leaf.stride(), leaf.dtype, leaf.requires_grad

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lies in this memory."""
        storage = tensor.untyped_storage().data_ptr()
        return any(span.memory.untyped_storage().data_ptr() == storage for span in self.spans)

    def write_back(self, leaves: list[Any]) -> None:
        """Give the caller what the model wrote to its arguments."""
        with torch.no_grad():
            for number in self.mutated:
                group = self.groups[number]
                self.spans[number].write_back([leaves[i] for i in group])


class Outputs:
    """The graph's outputs, and how to make the caller's own from them after a replay."""

    def __init__(
        self, output: Any, static: StaticInputs, capture: BreakableCUDAGraphCapture
    ) -> None:
        self._leaves: list[Any] = []
        self._original = capture.weak_where_owned(output)
        leaves: list[Any] = []
        self._node = flatten(output, leaves)
        flatten(self._original, self._leaves)
        self._from_input: dict[int, FromInput] = {}
        cloned: list[int] = []
        addresses = {
            span.memory.untyped_storage().data_ptr(): number
            for number, span in enumerate(static.spans)
        }
        call_leaves = [index for group in static.groups for index in group]
        for index, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                refuse_hidden_tensors(leaf, f"{describe_path(self._node, index)} of the module")
                continue
            same = [i for i in call_leaves if static.leaves[i] is leaf]
            number = addresses.get(leaf.untyped_storage().data_ptr()) if leaf.numel() else None
            if same:
                self._from_input[index] = FromInput(same[0], 0, leaf, True)
            elif number is not None:
                self._from_input[index] = _from_input(leaf, static, number)
            elif capture.rewritten(leaf):
                cloned.append(index)
        tensors = [leaves[i] for i in cloned]
        self._groups = [[cloned[i] for i in group] for group in overlapping(tensors)]

    def take(self, leaves: list[Any]) -> Any:
        """The output of the replay that has just run, in memory of its own.

        ``leaves`` are those of the call: what the model returned of its inputs is returned of
        the caller's.
        """
        results = list(self._leaves)
        for index, place in self._from_input.items():
            given = leaves[place.leaf]
            results[index] = given if place.is_same else view_at(given, place.offset, place.like)
        for group in self._groups:
            if len(group) == 1:
                results[group[0]] = _clone(results[group[0]])
            else:
                span = Span.copy_of([results[i] for i in group])
                same: dict[int, torch.Tensor] = {}
                for index, view in zip(group, span.views):
                    results[index] = same.setdefault(id(self._leaves[index]), view)
        return unflatten(self._node, iter(results), self._original)

    def poison(self) -> None:
        """Overwrite the graph's outputs, so that a replay that writes nothing is found out."""
        with torch.no_grad():
            for group in self._groups:
                for index in group:
                    leaf = self._leaves[index]
                    leaf.fill_(float("nan") if leaf.is_floating_point() else 1)


def _from_input(leaf: torch.Tensor, static: StaticInputs, number: int) -> FromInput:
    span = static.spans[number]
    index = static.groups[number][0]
    offset = byte_range(leaf)[0] - byte_range(span.views[0])[0]
    return FromInput(index, offset, leaf, False)


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, made in the caller's own modes."""
    if not dense(tensor):  # of an expanded tensor, elements share bytes
        return Span.copy_of([tensor]).views[0]
    copy = torch.empty_strided(
        tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    copy.copy_(tensor)
    return copy


class CapturedCall:
    """A graph with its inputs and outputs; valid while the module's state is as it was."""

    def __init__(
        self,
        body: Callable[..., Any],
        module: torch.nn.Module | None,
        call: Call,
        backend: Backend,
        pool: Pool,
        plan: Plan,
    ) -> None:
        self.signature = call.signature
        # What is compared by identity must not give its address to another object.
        self._kept = [leaf for leaf in call.leaves if not isinstance(leaf, torch.Tensor)]
        self.graph = BreakableCUDAGraph(pool.handle)
        given = (g for g in call.leaves if isinstance(g, torch.Generator))
        generators = (*given, *generators_of(module))
        for generator in generators:
            self.graph.register_generator_state(generator)
        self.static = StaticInputs(call)
        before = ModuleState(module)
        with ExitStack() as stack:
            stack.enter_context(preserved(generators, call.device))
            kept = stack.enter_context(state_preserved(module))
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())

            def warm_up() -> None:
                args, kwargs = self.static.arguments()
                output = None

                def run() -> None:
                    nonlocal output
                    with modes_applied(call.signature.ambient.modes):
                        output = body(*args, **kwargs)

                with backend.warm_up(), draws_noticed():
                    try:
                        self.static.note_mutations(run)
                    except Exception as error:
                        raise WarmUpError(error) from error
                self.static.require_unchanged((args, kwargs))
                kept.warmed()
                if any(t.requires_grad for t in tree_tensors(output)):
                    raise CaptureError("its result needs gradients, which no replay computes")

            with plan(warm_up), attributes_kept(module):
                capture = BreakableCUDAGraphCapture(self.graph, backend=backend.name)
                args, kwargs = self.static.arguments()
                with capture, torch.set_grad_enabled(call.signature.ambient.modes.grad):
                    output = body(*args, **kwargs)
                self.outputs = Outputs(output, self.static, capture)
                del output
            self.state = ModuleState(module)
            self.state.ignore_changes_since(before)
            self.state.require_own(lambda t: capture.rewritten(t) or self.static.holds(t))
        self.static.forget_call()
        writes = self.static.mutated or kept.wrote
        self._apart = self.state.memory() if writes else set()

    def overlap(self, call: Call) -> str | None:
        """Which argument is the module's own tensor, where one of both is written to.

        In eager a write to one is seen in the other; a replay reads a copy of the argument.
        """
        for index in call.device_leaves if self._apart else ():
            if call.leaves[index].untyped_storage().data_ptr() in self._apart:
                return f"argument {call.path(index)} is a tensor of the module, and written to"
        return None

    def replay(self, call: Call) -> Any:
        """Answer a call of this signature; the caller holds the pool."""
        self.static.refill(call.leaves)
        self.graph.replay_in_turn()
        self.static.write_back(call.leaves)
        return self.outputs.take(call.leaves)
