"""The simulated backend: what it refuses, what it records, how it treats memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import inspect
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
)

from bcg_core import BreakableCUDAGraph, BreakableCUDAGraphCapture, break_graph, eager_on_graph
from bcg_core.errors import CaptureError, CaptureRefusedError, UseAfterFreeError
from bcg_core.simulation import outcomes
from bcg_core.simulation.memory import Arena

pytestmark = pytest.mark.bcg


def capture(function: Any, *args: Any, pool: Any = None) -> tuple[BreakableCUDAGraph, Any]:
    graph = BreakableCUDAGraph(pool)
    with torch.no_grad(), BreakableCUDAGraphCapture(graph, backend="simulated"):
        output = function(*args)
    return graph, output


UNKNOWN = torch.Generator()


REFUSED = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x.sum()),
    "bool": lambda x: 1 if x.sum() > 0 else 2,
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "cpu": lambda x: x.cpu(),
    "repr": lambda x: repr(x),
    "format": lambda x: f"{x.sum()}",
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "mask": lambda x: x[x > 0],
    "masked select": lambda x: x.masked_select(x > 0),
    "masked assignment": lambda x: x.index_put((x > 0,), x.flatten()[:3]),
    "unique": lambda x: x.unique(),
    "bincount": lambda x: x.int().abs().flatten().bincount(),
    "repeat_interleave": lambda x: torch.repeat_interleave(x[0], x[0].int().abs(), dim=0),
    "equal": lambda x: torch.equal(x, x + 1),
    "allclose": lambda x: torch.allclose(x, x),
    "tensor": lambda x: torch.tensor([1.0, 2.0], device=x.device),
    "as_tensor": lambda x: torch.as_tensor([1, 2]),
    "as_tensor of a number": lambda x: torch.as_tensor(3, device=x.device),
    "new_tensor": lambda x: x.new_tensor([1.0]),
    "list index": lambda x: x[[0, 2]],
    "list index in a tuple": lambda x: x[:, [0, 1]],
    "inverse": lambda x: torch.linalg.inv(x[:, :4]),
    "unknown generator": lambda x: torch.rand(4, generator=UNKNOWN),
    "linspace of a tensor": lambda x: torch.linspace(0, x.sum(), 4),
}
ALLOWED = {
    "masked fill": lambda x: x.index_put((x > 0,), torch.zeros(())),
    "assigned number": lambda x: x.clone().index_fill_(0, torch.arange(2), 3.0),
    "ellipsis assignment": lambda x: _assign(x.clone()),
    "where of three": lambda x: torch.where(x > 0, x, 0.0),
    "sized repeat_interleave": lambda x: torch.repeat_interleave(
        x[0], torch.ones(8, dtype=torch.long), dim=0, output_size=8
    ),
    "empty list": lambda x: x[:0].sum() + torch.tensor([]).sum(),
    "as_tensor of a tensor": lambda x: torch.as_tensor(x) + 1,
    "slice": lambda x: x[1:3, ::2].contiguous(),
    "out": lambda x: torch.add(x, 1, out=torch.empty(0)),
    "to the same device": lambda x: x.to(x.device).to("cpu").double(),
    "several outputs": lambda x: sum(x.topk(2, dim=1)[0].unbind(1)) + torch.std_mean(x)[0],
    "complex": lambda x: torch.view_as_real(torch.view_as_complex(x.view(4, 4, 2)).conj() * 1j),
    "convolution": lambda x: torch.nn.functional.conv2d(
        x.view(1, 4, 2, 4).to(memory_format=torch.channels_last), torch.ones(3, 4, 1, 1)
    ),
    "attention": lambda x: torch.nn.functional.scaled_dot_product_attention(
        x.view(1, 2, 4, 4), x.view(1, 2, 4, 4), x.view(1, 2, 4, 4)
    ).transpose(1, 2),
    "normalised": lambda x: torch.nn.functional.layer_norm(x, (8,)),
    "no elements": lambda x: torch.cat([x[:0], x * 2]),
    "split and concatenated": lambda x: torch.cat([p * 2 for p in x.chunk(2, dim=1)], dim=1),
}


def _assign(x: torch.Tensor) -> torch.Tensor:
    x[..., 1] = 3.0
    return x * 2


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_operation_and_the_line(name: str):
    function = REFUSED[name]
    x = torch.randn(4, 8)
    with pytest.raises(CaptureRefusedError) as caught:
        capture(function, x + 1)
    message = str(caught.value)
    lines, first = inspect.getsourcelines(function)
    assert any(f"{__file__}:{first + n} " in message for n in range(len(lines))), message
    assert "cannot be captured" in message
    assert "eager_on_graph()" in message
    capture(lambda: x + 1)


def test_random_state_that_the_body_sets_is_refused():
    def seeded(x: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            return torch.rand_like(x)

    state = torch.get_rng_state()
    for body in (seeded, lambda x: torch.manual_seed(5) and None):
        with pytest.raises(CaptureRefusedError, match="random state"):
            capture(body, torch.zeros(4))
    assert torch.equal(torch.get_rng_state(), state)


def test_refused_where_the_source_does_not_exist():
    scope: dict[str, Any] = {}
    exec(compile("def read(x):\n    return x.item()\n", "<made up>", "exec"), scope)
    with pytest.raises(CaptureRefusedError, match=r"<made up>:2 in read"):
        capture(scope["read"], torch.ones(()))


def test_refusal_that_the_body_swallows_still_fails_the_capture():
    def body(x: torch.Tensor) -> torch.Tensor:
        with contextlib.suppress(CaptureRefusedError):
            x.sum().item()
        return x + 1

    with pytest.raises(CaptureRefusedError, match="swallows"):
        capture(body, torch.randn(4))


@pytest.mark.parametrize("name", ALLOWED)
def test_allowed_and_replayed_exactly_with_eager_strides(name: str):
    function = ALLOWED[name]
    x = torch.randn(4, 8)
    graph, output = capture(lambda: function(x) + 0)
    for seed in range(3):
        x.copy_(torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)))
        with torch.no_grad():
            expected = function(x) + 0
        output.fill_(7)
        graph.replay()
        assert torch.equal(output, expected)
        assert output.stride() == expected.stride()


def test_nothing_runs_while_it_is_recorded_and_in_place_work_runs_once():
    x = torch.zeros(4)
    bytes_inside = []

    def body() -> None:
        x.add_(1)
        bytes_inside.append(ctypes.string_at(x.data_ptr(), 16))

    graph, _ = capture(body)
    assert bytes_inside == [bytes(16)]
    assert x.tolist() == [1.0] * 4
    graph.replay()
    assert x.tolist() == [2.0] * 4


def test_freed_block_is_poisoned_in_the_order_of_the_replay():
    x = torch.ones(64)
    addresses = []

    def body() -> torch.Tensor:
        early = x * 3
        addresses.append(early.data_ptr())
        del early
        return x[:4] + 1

    graph, _ = capture(body)
    ctypes.memset(addresses[0], 0, 256)
    graph.replay()
    assert ctypes.string_at(addresses[0], 256) == b"\xff" * 256


def test_memory_that_nothing_wrote_reads_as_poison():
    _, output = capture(lambda: torch.empty(4) + 1)
    assert output.isnan().all()


def test_boolean_memory_is_poisoned_with_a_valid_boolean():
    arena = Arena()
    flags = arena.allocate((8,), (1,), torch.bool)
    flags.fill_(False)
    address = flags.data_ptr()
    del flags
    assert ctypes.string_at(address, 8) == b"\x01" * 8


def test_arena_follows_the_true_life_of_a_storage_and_recycles_it():
    arena = Arena()
    tensor = arena.allocate((4, 4), (4, 1), torch.float32)
    block = arena.block_of(tensor)
    assert block is not None
    view = tensor.t()[1:]
    address = tensor.data_ptr()
    del tensor
    first = block.life
    assert first.live
    del view
    assert not first.live
    again = arena.allocate((16,), (1,), torch.float32)
    assert again.data_ptr() == address
    assert again.isnan().all()
    assert block.life.live
    assert block.life is not first


def test_alias_of_a_freed_block_is_found_when_its_reader_is_recorded():
    def body(x: torch.Tensor) -> torch.Tensor:
        from bcg_core.breaks import active_capture

        made = x + 1
        alias = active_capture()._recorder.alias(made)
        del made
        x * 2
        return alias + 1

    with pytest.raises(UseAfterFreeError, match=rf"aten::add at {__file__}:\d+ .* was freed"):
        capture(body, torch.randn(8))


def test_break_allocations_are_poisoned_as_soon_as_they_are_freed():
    leaked = []

    @eager_on_graph()
    def dangling(t: torch.Tensor) -> torch.Tensor:
        temporary = t * 2
        leaked.append((temporary.data_ptr(), temporary.numel() * 4))
        return t * 3

    graph, _ = capture(lambda x: dangling(x) + 1, torch.ones(8))
    for _ in range(2):
        address, size = leaked[-1]
        assert ctypes.string_at(address, size) == b"\xff" * size
        graph.replay()


def test_a_graph_of_another_pool_may_die_inside_a_capture():
    x = torch.ones(8)
    old = [capture(lambda: x * 2)]

    def body() -> torch.Tensor:
        y = x + 1
        old.clear()
        return y * 2

    graph, output = capture(body)
    output.fill_(7)
    graph.replay()
    assert output.tolist() == [4.0] * 8


def test_graphs_of_one_pool_replay_in_any_order():
    x = torch.ones(8)
    first, one = capture(lambda: (x * 2 + 1) * 3)
    kept = one.clone()
    del one
    second, two = capture(lambda: (x * 5 + 1) * 7, pool=first.pool())
    for graph in (second, first, first, second):
        graph.replay()
    assert torch.equal(two, (x * 5 + 1) * 7)
    assert kept.tolist() == [9.0] * 8
    assert first.pool() is second.pool()


def test_result_of_another_graph_of_the_pool_is_held_by_its_reader():
    x = torch.ones(8)
    first, one = capture(lambda: x * 2)
    results = [one]
    del one
    reader, output = capture(lambda: results[0] + 1, pool=first.pool())
    results.clear()
    gc.collect()
    capture(lambda: [x * n for n in range(8)], pool=first.pool())
    first.replay()
    reader.replay()
    assert output.tolist() == [3.0] * 8


class PassThrough(TorchDispatchMode):
    def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return f(*args, **(kwargs or {}))


def test_a_mode_left_behind_is_reported_and_taken_down():
    def body(x: torch.Tensor) -> torch.Tensor:
        PassThrough().__enter__()
        return x + 1

    with pytest.raises(CaptureError, match="left: DeviceMode, PassThrough"):
        capture(body, torch.ones(4))
    assert torch._C._len_torch_dispatch_stack() == 0


def test_a_mode_taken_away_by_the_body_is_reported_and_put_back():
    def body(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        _pop_mode()
        return y

    with PassThrough() as mode:
        with pytest.raises(CaptureError, match="left: PassThrough"):
            capture(body, torch.ones(4))
        assert _get_current_dispatch_mode_stack() == [mode]


def test_breaks_follow_each_other_and_empty_segments_are_dropped():
    x = torch.ones(4)

    def body() -> torch.Tensor:
        break_graph()
        break_graph()
        y = x + 1
        break_graph()
        return y

    graph, output = capture(body)
    assert (graph.segments, graph.breaks) == (1, 3)
    x.fill_(4)
    graph.replay()
    assert output.tolist() == [5.0] * 4


def test_autocast_casts_of_a_capture_do_not_leak_into_eager():
    linear = torch.nn.Linear(8, 8).requires_grad_(False)
    x = torch.randn(4, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = linear(x)
        graph, output = capture(lambda: linear(x))
        del output
        graph.reset()
        assert torch.equal(linear(x), expected)


def test_outcomes_are_asked_once_for_a_signature(monkeypatch: pytest.MonkeyPatch):
    asked = []
    real = outcomes._ask
    monkeypatch.setattr(outcomes, "_ask", lambda *a: asked.append(a[0]) or real(*a))
    outcomes.forget()
    x = torch.randn(4, 8)
    capture(lambda: (x + 1) * (x + 1))
    assert len(asked) == 2
    capture(lambda: (x + 1) * (x + 1))
    assert len(asked) == 2


def test_generator_given_as_an_argument_keeps_its_state():
    generator = torch.Generator().manual_seed(5)
    graph = BreakableCUDAGraph()
    graph.register_generator_state(generator)
    before = generator.get_state()
    with BreakableCUDAGraphCapture(graph, backend="simulated"):
        output = torch.randn(4, generator=generator) + 1
    assert torch.equal(generator.get_state(), before)
    output.fill_(7)
    graph.replay()
    expected = torch.randn(4, generator=torch.Generator().manual_seed(5)) + 1
    assert torch.equal(output, expected)
