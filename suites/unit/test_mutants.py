"""The faults that others shipped, put into our engine: each has to make a test fail.

A suite that lets one of these live proves nothing. The killing test is called in this process,
once as it is and once with the fault patched in.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

from bcg_core import BreakableCUDAGraphCapture, GraphRunner, bridge, graph, signature
from bcg_core.backends.pool_lock import PoolLock
from bcg_core.layout import Span, layout_of
from bcg_core.runner import CapturedCall
from bcg_core.simulation import host, memory, recorder, traits
from bcg_core.simulation.memory import Arena
from bcg_core.simulation.recorder import SimulatedRecorder
from suites.unit import test_bridge, test_invariants, test_simulation

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.bcg

CPU = torch.device("cpu")


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def net() -> test_invariants.Net:
    return test_invariants.Net().eval().requires_grad_(False)


def weak_bridge(patch: pytest.MonkeyPatch) -> None:
    real = BreakableCUDAGraphCapture.run_break

    def run_break(self: Any, function: Any, args: Any, kwargs: Any) -> Any:
        output = real(self, function, args, kwargs)
        alias = self._recorder.alias
        made = self.graph._steps[-1].bridge
        made._spans = [
            Span(alias(s.memory), [alias(v) for v in s.views], s.offsets) for s in made._spans
        ]
        return output

    patch.setattr(BreakableCUDAGraphCapture, "run_break", run_break)


def weak_inputs(patch: pytest.MonkeyPatch) -> None:
    def hold_inputs(self: Any, arguments: Any) -> Any:
        return graph.map_tensors(self._recorder.alias, arguments)

    patch.setattr(BreakableCUDAGraphCapture, "_hold_inputs", hold_inputs)
    patch.setattr(BreakableCUDAGraphCapture, "_hold", lambda self, tensor: None)


def no_tuple_recursion(patch: pytest.MonkeyPatch) -> None:
    real = bridge.flatten

    def flatten(value: Any, leaves: list[Any], depth: int = 0) -> Any:
        if isinstance(value, tuple):
            leaves.append(value)
            return None
        return real(value, leaves, depth)

    patch.setattr(bridge, "flatten", flatten)


def weak_walk_without_recursion(patch: pytest.MonkeyPatch) -> None:
    def shallow(function: Any, value: Any) -> Any:
        args, kwargs = value
        return tuple(function(a) if isinstance(a, torch.Tensor) else a for a in args), kwargs

    patch.setattr(graph, "map_tensors", shallow)


def holds_no_weights(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BreakableCUDAGraphCapture, "_hold", lambda self, tensor: None)


def poison_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        SimulatedRecorder, "_on_free", lambda self, block: self._arena.poison_block(block)
    )


def no_poison(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(memory.Poison, "overwrite", lambda *_: None)


def heap_without_poison(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Arena, "poison_block", lambda *_: None)


def in_place_work_runs_while_recording(patch: pytest.MonkeyPatch) -> None:
    real = SimulatedRecorder.record

    def record(self: Any, operation: Any, args: Any, kwargs: Any) -> Any:
        if traits.traits_of(operation).writes:
            operation(*args, **kwargs)
        return real(self, operation, args, kwargs)

    patch.setattr(SimulatedRecorder, "record", record)


def always_eager(patch: pytest.MonkeyPatch) -> None:
    def replay(self: GraphRunner, captured: Any, call: Any) -> Any:
        args, kwargs = call.arguments
        return self._body(*args, **kwargs)

    patch.setattr(GraphRunner, "_replay", replay)


def _without_dtype(tensor: torch.Tensor) -> Any:
    return layout_of(tensor)._replace(dtype=torch.float32)


def signature_without_dtype(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(signature, "layout_of", _without_dtype)


def signature_without_strides(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(signature, "layout_of", lambda t: layout_of(t)._replace(stride=()))


def bridge_without_dtype(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(bridge, "layout_of", _without_dtype)


def bridge_without_shape(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(bridge, "layout_of", lambda t: layout_of(t)._replace(shape=(), stride=()))


def only_item_and_host_data_refused(patch: pytest.MonkeyPatch) -> None:
    real = traits.traits_of

    def lenient(operation: Any) -> Any:
        known = real(operation)
        return known if known.name == "aten::_local_scalar_dense" else known._replace(refused=None)

    patch.setattr(recorder, "traits_of", lenient)
    patch.setattr(traits, "_has_mask", lambda indices: False)
    patch.delitem(host._REFUSED, torch.Tensor.tolist)


def no_lock(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PoolLock, "exclusive", lambda self: nullcontext())


def random_state_not_restored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recorder, "preserved", lambda *_: nullcontext())


def skipped_input_copy(patch: pytest.MonkeyPatch) -> None:
    def replay(self: Any, call: Any) -> Any:
        self.graph.replay_in_turn()
        return self.outputs.take(call.leaves)

    patch.setattr(CapturedCall, "replay", replay)


def outputs_not_copied(patch: pytest.MonkeyPatch) -> None:
    from bcg_core import captured

    patch.setattr(captured, "_clone", lambda tensor: tensor)


def break_sees_unreplayed_memory(patch: pytest.MonkeyPatch) -> None:
    def end_segment(self: Any) -> None:
        segment = self._recorder.end_segment()
        if segment is not None:
            self.graph._steps.append(segment)

    patch.setattr(BreakableCUDAGraphCapture, "_end_segment", end_segment)


def stale_pointers_unseen(patch: pytest.MonkeyPatch) -> None:
    from bcg_core.state import ModuleState

    patch.setattr(ModuleState, "difference", lambda self: None)


def seal_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GraphRunner, "seal", lambda self: None)


class Mutant(NamedTuple):
    fault: Callable[[pytest.MonkeyPatch], None]
    killer: Callable[[], None]


def seed(structure: str) -> Callable[[], None]:
    return lambda: test_bridge.check_replays("simulated", CPU, structure)


def changed(change: str) -> Callable[[], None]:
    return lambda: test_invariants.test_bridge_of_another_kind_is_an_error_that_names_the_break(
        "simulated", rand, change
    )


INVARIANTS = test_invariants
MUTANTS = [
    *[Mutant(weak_bridge, seed(s)) for s in ("tensor", "tuple", "nested", "model output")],
    *[Mutant(no_tuple_recursion, seed(s)) for s in ("tuple", "named tuple")],
    Mutant(
        weak_walk_without_recursion,
        lambda: test_bridge.test_break_gets_fresh_containers_at_every_replay("simulated", CPU),
    ),
    Mutant(
        weak_inputs,
        lambda: INVARIANTS.test_lifetime_foreign_break_input_is_held("simulated", CPU, rand),
    ),
    Mutant(
        holds_no_weights,
        lambda: INVARIANTS.test_lifetime_graph_holds_the_weights_it_reads("simulated", CPU, rand),
    ),
    Mutant(
        poison_at_once,
        lambda: INVARIANTS.test_lifetime_block_freed_while_the_next_segment_is_recorded(
            "simulated", rand
        ),
    ),
    Mutant(no_poison, test_simulation.test_freed_block_is_poisoned_in_the_order_of_the_replay),
    Mutant(
        heap_without_poison,
        test_simulation.test_break_allocations_are_poisoned_as_soon_as_they_are_freed,
    ),
    Mutant(
        in_place_work_runs_while_recording,
        test_simulation.test_nothing_runs_while_it_is_recorded_and_in_place_work_runs_once,
    ),
    Mutant(
        always_eager,
        lambda: INVARIANTS.test_eager_equivalence_over_changed_values("simulated", net(), rand),
    ),
    Mutant(
        signature_without_dtype,
        lambda: INVARIANTS.test_eager_equivalence_dtype_is_in_the_signature("simulated", rand),
    ),
    Mutant(
        signature_without_strides,
        lambda: INVARIANTS.test_eager_equivalence_signature_tells_calls_apart(
            "simulated", net(), rand, "expanded"
        ),
    ),
    Mutant(bridge_without_dtype, changed("dtype")),
    Mutant(bridge_without_shape, changed("broadcast")),
    *[
        Mutant(
            only_item_and_host_data_refused,
            lambda name=name: test_simulation.test_refused_with_the_operation_and_the_line(name),
        )
        for name in ("nonzero", "mask", "tolist")
    ],
    Mutant(
        no_lock,
        lambda: INVARIANTS.test_one_at_a_time_raw_replays_of_one_pool_from_threads(
            "simulated", rand
        ),
    ),
    Mutant(
        random_state_not_restored,
        lambda: INVARIANTS.test_no_trace_of_random_numbers_in_a_bare_capture(
            "simulated", CPU, rand
        ),
    ),
    Mutant(
        skipped_input_copy,
        lambda: INVARIANTS.test_eager_equivalence_over_changed_values("simulated", net(), rand),
    ),
    Mutant(
        outputs_not_copied,
        lambda: INVARIANTS.test_outputs_are_not_changed_by_later_replays("simulated", net(), rand),
    ),
    Mutant(
        break_sees_unreplayed_memory,
        lambda: INVARIANTS.test_real_data_reaches_a_break_during_capture("simulated", rand),
    ),
    Mutant(
        stale_pointers_unseen,
        lambda: INVARIANTS.test_stale_pointers_replaced_moved_or_added_state_invalidates(
            "simulated", net(), rand
        ),
    ),
    Mutant(
        seal_ignored,
        lambda: INVARIANTS.test_sealed_runner_captures_nothing_and_explains_each_miss(
            "simulated", net(), rand
        ),
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.fault.__name__)
def test_fault_makes_its_test_fail(mutant: Mutant, monkeypatch: pytest.MonkeyPatch):
    mutant.killer()
    with monkeypatch.context() as patch:
        mutant.fault(patch)
        with pytest.raises((Exception, pytest.fail.Exception)) as caught:
            mutant.killer()
    assert not isinstance(caught.value, (NameError, TypeError, AttributeError)), caught.value


def test_every_historical_fault_is_among_them():
    """The faults that public engines shipped, and those that a weak suite lets live."""
    names = {m.fault.__name__ for m in MUTANTS}
    assert names >= {
        "weak_bridge",
        "no_tuple_recursion",
        "holds_no_weights",
        "poison_at_once",
        "no_poison",
        "in_place_work_runs_while_recording",
        "always_eager",
        "signature_without_dtype",
        "bridge_without_dtype",
        "only_item_and_host_data_refused",
        "no_lock",
        "random_state_not_restored",
    }
