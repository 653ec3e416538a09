"""Each invariant of the engine, as a test with its name, on every backend there is."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch

from bcg_core import (
    BreakableCUDAGraph,
    BreakableCUDAGraphCapture,
    GraphRunner,
    break_graph,
    eager_on_graph,
)
from bcg_core.breaks import active_capture, capture_in_progress
from bcg_core.errors import (
    BridgeError,
    CaptureError,
    NestedCaptureError,
    NestedReplayError,
    ReplayError,
)

pytestmark = pytest.mark.bcg


def capture(backend: str, function: Any, *args: Any) -> tuple[BreakableCUDAGraph, Any]:
    graph = BreakableCUDAGraph()
    with torch.no_grad(), BreakableCUDAGraphCapture(graph, backend=backend):
        output = function(*args)
    return graph, output


def churn(device: torch.device) -> None:
    """Allocate and overwrite memory of every size that a small test may have freed."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
    for size in (1, 4, 8, 16, 32, 64, 128, 1024):
        for _ in range(64):
            torch.full((size, 8), 1e9, device=device)
    kept = [torch.full((n, 8), -1e9, device=device) for n in (1, 4, 8, 64) for _ in range(64)]
    del kept


@pytest.fixture
def rand(bcg_device: torch.device) -> Any:
    """Numbers of a seed, the same on every device."""

    def make(*shape: int, seed: int = 0) -> torch.Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(bcg_device)

    return make


class Net(torch.nn.Module):
    """Two layers with a break between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 8)
        self.second = torch.nn.Linear(8, 8)
        self.entered = 0

    @eager_on_graph()
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, dim=-1)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        self.entered += 1
        return self.second(self.between(self.first(x))) * scale


@pytest.fixture
def net(bcg_device: torch.device) -> Net:
    torch.manual_seed(0)
    return Net().to(bcg_device).eval().requires_grad_(False)


# 1. Lifetime


def test_lifetime_graph_holds_the_weights_it_reads(bcg_backend: str, bcg_device: Any, rand: Any):
    weights = [rand(8, 8, seed=1)]
    x = rand(4, 8)
    expected = x @ weights[0]

    graph, output = capture(bcg_backend, lambda: x @ weights[0])
    gone = weakref.ref(weights[0])
    weights.clear()
    churn(bcg_device)
    assert gone() is None, "the test itself must not keep the weight"
    output.fill_(7)
    graph.replay()
    assert torch.equal(output, expected)


def test_lifetime_pool_owned_break_input_is_weak_and_right(bcg_backend: str, rand: Any):
    x = rand(4, 8)
    seen: list[weakref.ref[Any]] = []

    @eager_on_graph()
    def double(t: torch.Tensor) -> torch.Tensor:
        if active_capture() is None and capture_in_progress():
            seen.append(weakref.ref(t.untyped_storage()))
        return t * 2

    graph, output = capture(bcg_backend, lambda: double(x + 1) - 1)
    gc.collect()
    assert seen[0]() is None, "a break input that the pool owns must not be held"
    x.copy_(rand(4, 8, seed=5))
    output.fill_(7)
    graph.replay()
    assert torch.equal(output, (x + 1) * 2 - 1)


def test_lifetime_foreign_break_input_is_held(bcg_backend: str, bcg_device: Any, rand: Any):
    x = rand(4, 8)
    others = [rand(4, 8, seed=3)]
    expected = (x + 1) * others[0]

    @eager_on_graph()
    def multiply(t: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        return t * u

    graph, output = capture(bcg_backend, lambda: multiply(x + 1, others[0]) + 0)
    storage = weakref.ref(others[0].untyped_storage())
    others.clear()
    churn(bcg_device)
    assert storage() is not None
    output.fill_(7)
    graph.replay()
    assert torch.equal(output, expected)


def test_lifetime_block_freed_while_the_next_segment_is_recorded(bcg_backend: str, rand: Any):
    """A tensor of segment 1 that dies after its recorded reader in segment 2 was still whole."""
    x = rand(4, 8)

    def body() -> torch.Tensor:
        early = x * 3
        break_graph()
        late = early + 1
        del early
        more = [late * n for n in range(4)]  # recycles the block of ``early``
        return sum(more[1:], more[0]) + late

    graph, output = capture(bcg_backend, body)
    assert torch.equal(output, body())
    for seed in range(3):
        x.copy_(rand(4, 8, seed=seed))
        expected = body()
        output.fill_(7)
        graph.replay()
        assert torch.equal(output, expected)


# 2. Bridge

CHANGES = {
    "shape": (lambda t: t, lambda t: t[:1], "shape"),
    "broadcast": (lambda t: t, lambda t: t[:1, :1].clone(), "shape"),
    "dtype": (lambda t: t * 1, lambda t: t.double(), "dtype"),
    "stride": (lambda t: t * 1, lambda t: (t.t() * 1).contiguous().t(), "stride"),
    "structure": (lambda t: (t * 1,), lambda t: [t * 1], "structure"),
    "length": (lambda t: (t * 1,), lambda t: (t * 1, t * 2), "structure"),
    "tensor to value": (lambda t: (t * 1, t * 2), lambda t: (t * 1, 5), "captured was a tensor"),
    "value": (lambda t: (t * 1, 3), lambda t: (t * 1, 4), "captured was 3"),
    "type of value": (lambda t: (t * 1, 1), lambda t: (t * 1, True), "captured was 1"),
    "key": (lambda t: {"a": t * 1}, lambda t: {"b": t * 1}, "structure"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_bridge_of_another_kind_is_an_error_that_names_the_break(
    bcg_backend: str, rand: Any, change: str
):
    before, after, what = CHANGES[change]
    x = rand(4, 8)
    now = [before]

    @eager_on_graph()
    def changing_break(t: torch.Tensor) -> Any:
        return now[0](t)

    def body() -> Any:
        out = changing_break(x + 1)
        leaf = next(iter(out.values())) if isinstance(out, dict) else out
        leaf = leaf[0] if isinstance(leaf, (tuple, list)) else leaf
        return leaf + 1

    graph, _ = capture(bcg_backend, body)
    graph.replay()
    now[0] = after
    with pytest.raises(BridgeError) as caught:
        graph.replay()
    message = str(caught.value)
    assert "changing_break" in message
    assert f"{__file__}:" in message
    assert what in message
    now[0] = before
    graph.replay()


def test_bridge_keeps_outputs_that_share_memory_together(bcg_backend: str, rand: Any):
    x = rand(4, 8)

    @eager_on_graph()
    def views(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        whole = t * 2
        return whole, whole[1:3], whole.t()

    def body() -> torch.Tensor:
        whole, part, turned = views(x)
        part.add_(100)
        return whole + turned.t()

    graph, output = capture(bcg_backend, body)
    x.copy_(rand(4, 8, seed=2))
    expected = body()
    output.fill_(7)
    graph.replay()
    assert torch.equal(output, expected)


def test_bridge_of_an_expanded_output(bcg_backend: str, rand: Any):
    x = rand(1, 8)

    @eager_on_graph()
    def expanded(t: torch.Tensor) -> torch.Tensor:
        return (t * 2).expand(4, 8)

    graph, output = capture(bcg_backend, lambda: expanded(x) + 1)
    x.copy_(rand(1, 8, seed=4))
    output.fill_(7)
    graph.replay()
    assert torch.equal(output, (x * 2).expand(4, 8) + 1)


def test_bridge_of_a_break_that_works_in_place(bcg_backend: str, rand: Any):
    x = rand(4, 8)

    @eager_on_graph()
    def in_place(t: torch.Tensor) -> torch.Tensor:
        return t.add_(1)

    def body() -> torch.Tensor:
        h = x * 2
        out = in_place(h)
        out.mul_(3)
        return h + out

    graph, output = capture(bcg_backend, body)
    x.copy_(rand(4, 8, seed=2))
    expected = body()
    output.fill_(7)
    graph.replay()
    assert torch.equal(output, expected)


def test_bridge_of_a_break_that_returns_a_weight_leaves_the_weight_alone(
    bcg_backend: str, rand: Any
):
    weight = rand(4, 8, seed=9)
    kept = weight.clone()
    other = rand(4, 8, seed=10)
    choose = [weight]

    @eager_on_graph()
    def pick() -> torch.Tensor:
        return choose[0]

    graph, output = capture(bcg_backend, lambda: pick() + 1)
    choose[0] = other
    graph.replay()
    assert torch.equal(output, other + 1)
    assert torch.equal(weight, kept)


# 3. Real data


def test_real_data_reaches_a_break_during_capture(bcg_backend: str, rand: Any):
    x = rand(4, 8)
    seen: list[list[float]] = []

    @eager_on_graph()
    def look(t: torch.Tensor) -> torch.Tensor:
        seen.append(t.flatten().tolist())
        return t * 2

    _, output = capture(bcg_backend, lambda: look(x + 1) + 1)
    assert seen == [(x + 1).flatten().tolist()]
    assert torch.equal(output, (x + 1) * 2 + 1)


# 4. No trace


def random_states(device: torch.device) -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state())
    return states


def same_states(before: list[torch.Tensor], after: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_no_trace_of_random_numbers_in_a_bare_capture(bcg_backend: str, bcg_device: Any, rand: Any):
    x = rand(4, 8)

    @eager_on_graph()
    def noisy(t: torch.Tensor) -> torch.Tensor:
        return t + torch.randn(4, 8, device=bcg_device)

    def body() -> torch.Tensor:
        return noisy(torch.rand(4, 8, device=bcg_device) + x) + torch.rand(4, 8, device=bcg_device)

    torch.manual_seed(3)
    before = random_states(bcg_device)
    graph, output = capture(bcg_backend, body)
    assert same_states(before, random_states(bcg_device))
    expected = body()
    after = random_states(bcg_device)
    torch.manual_seed(3)
    output.fill_(7)
    graph.replay()
    assert torch.equal(output, expected)
    assert same_states(after, random_states(bcg_device))


@pytest.mark.parametrize("where", ["segment", "break"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, "host read"])
def test_no_trace_of_a_failed_capture(
    bcg_backend: str, bcg_device: Any, rand: Any, where: str, error: Any
):
    x = rand(4, 8)

    def fail() -> None:
        torch.rand(2, device=bcg_device)
        if error == "host read":
            if where == "break":
                raise RuntimeError
            (x + 1).sum().item()
        raise error

    @eager_on_graph()
    def breaking(t: torch.Tensor) -> torch.Tensor:
        if where == "break":
            fail()
        return t * 2

    def body() -> torch.Tensor:
        y = breaking(x + 1)
        if where == "segment":
            fail()
        return y

    before = random_states(bcg_device)
    enabled = gc.isenabled()
    with pytest.raises((RuntimeError, KeyboardInterrupt)):
        capture(bcg_backend, body)
    assert not capture_in_progress()
    assert active_capture() is None
    assert gc.isenabled() == enabled
    assert torch.is_grad_enabled()
    assert not torch.overrides._get_current_function_mode_stack()
    assert same_states(before, random_states(bcg_device))
    if bcg_device.type == "cuda":
        assert not torch.cuda.is_current_stream_capturing()
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
    torch.randn(2, device=bcg_device)  # raised on CUDA while the generator was in capture mode
    graph, output = capture(bcg_backend, lambda: torch.rand_like(x) + x)
    torch.manual_seed(1)
    graph.replay()
    torch.manual_seed(1)
    assert torch.equal(output, torch.rand_like(x) + x)


def test_no_trace_of_an_error_that_the_body_swallowed(bcg_backend: str, rand: Any):
    x = rand(4, 8)

    @eager_on_graph()
    def breaking(t: torch.Tensor) -> torch.Tensor:
        raise ValueError("broken on purpose")

    def body() -> torch.Tensor:
        try:
            return breaking(x + 1)
        except ValueError:
            return x

    with pytest.raises(CaptureError, match="broken on purpose"):
        capture(bcg_backend, body)


def test_no_trace_of_warm_up_and_capture_in_buffers(bcg_backend: str, bcg_device: Any, rand: Any):
    torch.manual_seed(0)
    norm = torch.nn.BatchNorm1d(8).to(bcg_device).requires_grad_(False)
    eager = torch.nn.BatchNorm1d(8).to(bcg_device).requires_grad_(False)
    runner = GraphRunner(norm, backend=bcg_backend)
    x = rand(4, 8)
    assert runner.capture(x)
    assert torch.equal(norm.running_mean, eager.running_mean)
    assert norm.num_batches_tracked.item() == 0
    for seed in range(3):
        x = rand(4, 8, seed=seed)
        assert torch.equal(runner(x), eager(x))
        assert torch.equal(norm.running_mean, eager.running_mean)
        assert torch.equal(norm.running_var, eager.running_var)
        assert norm.num_batches_tracked.item() == seed + 1
    assert runner.stats.replays == 3


def test_no_trace_a_capturing_call_draws_what_one_eager_call_draws(
    bcg_backend: str, bcg_device: Any, rand: Any
):
    module = torch.nn.Dropout(0.5)
    x = rand(64, 8)
    torch.manual_seed(4)
    expected = [module(x) for _ in range(3)]
    after = random_states(bcg_device)
    runner = GraphRunner(module, backend=bcg_backend)
    torch.manual_seed(4)
    for one in expected:
        assert torch.equal(runner(x), one)
    assert same_states(after, random_states(bcg_device))
    assert runner.stats.replays == 2


def test_no_trace_failed_capture_falls_back_once_with_one_warning(
    bcg_backend: str, rand: Any, caplog: pytest.LogCaptureFixture
):
    class Reads(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * x.sum().item()

    told: list[str] = []
    runner = GraphRunner(Reads(), backend=bcg_backend, on_fallback=told.append)
    for seed in range(3):
        x = rand(4, 8, seed=seed)
        assert torch.equal(runner(x), x * x.sum().item())
    assert runner.stats.fallbacks == 1
    assert runner.stats.eager_calls == runner.stats.calls == 3
    assert len(told) == 1
    warnings = [r for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == 1
    assert __file__ in warnings[0].getMessage()
    assert runner.explain(x).startswith("runs eagerly: capture failed")


# 5. Eager equivalence


def test_eager_equivalence_over_changed_values(bcg_backend: str, net: Net, rand: Any):
    runner = GraphRunner(net, backend=bcg_backend)
    runner.capture(rand(4, 8))
    entered = net.entered
    for seed in range(5):
        x = rand(4, 8, seed=seed)
        for captured in runner._graphs.values():
            captured.outputs.poison()
        result = runner(x)
        assert net.entered == entered, "a replay must not run forward"
        assert torch.equal(result, net(x))
        entered = net.entered
    assert runner.stats.replays == 5
    assert runner.stats.breaks == 1
    assert runner.stats.segments == 2


VARIANTS = {
    "rows": (lambda x: (x[:2].clone(),), {}),
    "stride": (lambda x: (x.t().contiguous().t(),), {}),
    "expanded": (lambda x: (x[:1].expand(4, 8),), {}),
    "offset": (lambda x: (x.flatten()[3:27].view(3, 8),), {}),
    "scalar": (lambda x: (x,), {"scale": 2.5}),
    "integer for float": (lambda x: (x,), {"scale": 1}),
    "keyword": (lambda x: (), {"x": "x"}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_eager_equivalence_signature_tells_calls_apart(
    bcg_backend: str, net: Net, rand: Any, variant: str
):
    runner = GraphRunner(net, backend=bcg_backend)
    base = rand(4, 8)
    runner(base)
    make, kwargs = VARIANTS[variant]
    for seed in (1, 2):
        x = rand(4, 8, seed=seed)
        named = {k: (x if v == "x" else v) for k, v in kwargs.items()}
        args = make(x)
        assert torch.equal(runner(*args, **named), net(*args, **named))
    assert runner.stats.graphs == 2
    assert runner.stats.replays == 1
    assert torch.equal(runner(base), net(base))
    assert runner.stats.replays == 2


def test_eager_equivalence_dtype_is_in_the_signature(bcg_backend: str, rand: Any):
    class Half(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x / 3

    module = Half()
    runner = GraphRunner(module, backend=bcg_backend)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float32):
        x = rand(4, 8).to(dtype)
        result = runner(x)
        assert result.dtype == dtype
        assert torch.equal(result, module(x))
    assert runner.stats.graphs == 3


def test_eager_equivalence_modes_are_in_the_signature(bcg_backend: str, net: Net, rand: Any):
    runner = GraphRunner(net, backend=bcg_backend)
    x = rand(4, 8)
    plain = runner(x)
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        cast = runner(x)
        assert torch.equal(cast, net(x))
    assert cast.dtype == torch.bfloat16
    assert torch.equal(runner(x), plain)
    with torch.inference_mode():
        inside = runner(x)
        assert inside.is_inference()
        assert torch.equal(inside, net(x))
    assert torch.equal(runner(x), net(x))


def test_eager_equivalence_gradients_run_eagerly(bcg_backend: str, bcg_device: Any, rand: Any):
    module = torch.nn.Linear(8, 8).to(bcg_device)
    runner = GraphRunner(module, backend=bcg_backend)
    runner(rand(4, 8)).sum().backward()
    assert module.weight.grad is not None
    assert runner.stats.eager_calls == 1
    assert runner.stats.misses == {"the call needs gradients": 1}
    with torch.no_grad():
        runner(rand(4, 8))
        assert torch.equal(runner(rand(4, 8, seed=1)), module(rand(4, 8, seed=1)))
    assert runner.stats.replays == 1


def test_eager_equivalence_aliased_and_mutated_inputs(bcg_backend: str, rand: Any):
    class Writes(torch.nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            a.add_(1)
            return a * b

    module = Writes()
    runner = GraphRunner(module, backend=bcg_backend)
    for seed in range(3):
        whole = rand(4, 8, seed=seed)
        mine = whole.clone()
        assert torch.equal(runner(whole[:3], whole[1:]), module(mine[:3], mine[1:]))
        assert torch.equal(whole, mine), "what the model writes, the caller's tensor must show"
        apart, apart_too = rand(3, 8, seed=seed), rand(3, 8, seed=seed + 1)
        copy = apart.clone()
        assert torch.equal(runner(apart, apart_too), module(copy, apart_too))
        assert torch.equal(apart, copy)
        same = rand(3, 8, seed=seed)
        twin = same.clone()
        assert torch.equal(runner(same, same), module(twin, twin))
        assert torch.equal(same, twin)
    assert runner.stats.graphs == 3
    assert runner.stats.replays == 6


def test_eager_equivalence_argument_that_is_a_tensor_of_the_module(
    bcg_backend: str, bcg_device: Any, rand: Any
):
    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("state", torch.zeros(4, 8, device=bcg_device))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.add_(1)
            return x + self.state

    module, eager = Own(), Own()
    runner = GraphRunner(module, backend=bcg_backend)
    for _ in range(2):
        assert torch.equal(runner(module.state), eager(eager.state))
        assert torch.equal(module.state, eager.state)
        assert torch.equal(runner(rand(4, 8)), eager(rand(4, 8)))
    assert runner.stats.replays == 2


def test_eager_equivalence_outputs_that_are_inputs_or_weights(
    bcg_backend: str, net: Net, rand: Any
):
    class Returns(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            y = x * 2
            return {"x": x, "part": x[1:], "weight": net.first.weight, "y": y, "again": y, "n": 3}

    module = Returns()
    runner = GraphRunner(module, backend=bcg_backend)
    runner(rand(4, 8))
    x = rand(4, 8, seed=1)
    result, eager = runner(x), module(x)
    assert runner.stats.replays == 1
    assert result["x"] is x
    assert result["weight"] is net.first.weight
    assert result["y"] is result["again"]
    assert result["part"].data_ptr() == eager["part"].data_ptr()
    assert all(torch.equal(result[k], eager[k]) for k in ("x", "part", "y"))
    assert result["n"] == 3


def test_eager_equivalence_none_scalars_and_nested_lists(bcg_backend: str, rand: Any):
    class Nested(torch.nn.Module):
        def forward(self, xs: Any, scale: Any = None, extra: Any = None) -> Any:
            total = sum(part.sum() for row in xs for part in row)
            return total if scale is None else (total * scale, extra)

    module = Nested()
    runner = GraphRunner(module, backend=bcg_backend)
    for seed in range(2):
        xs = [[rand(2, seed=seed), rand(3, seed=seed)], [rand(4, seed=seed)]]
        assert torch.equal(runner(xs), module(xs))
        result, eager = runner(xs, scale=0.5, extra=None), module(xs, scale=0.5, extra=None)
        assert torch.equal(result[0], eager[0])
        assert result[1] is None
        longer = [*xs, [rand(2)]]
        assert torch.equal(runner(longer), module(longer))
    assert runner.stats.graphs == 3
    assert runner.stats.replays == 3


# 6. Nothing is captured after seal()


def test_sealed_runner_captures_nothing_and_explains_each_miss(
    bcg_backend: str, net: Net, rand: Any
):
    runner = GraphRunner(net, backend=bcg_backend)
    runner(rand(4, 8))
    runner.seal()
    x = rand(6, 8)
    assert torch.equal(runner(x), net(x))
    assert not runner.capture(x)
    stats = runner.stats
    assert (stats.captures, stats.eager_calls, stats.graphs) == (1, 1, 1)
    line = "x has shape (6, 8), captured was (4, 8)"
    assert stats.misses[line] == 1
    assert runner.explain(x) == f"misses: {line}"
    runner(rand(4, 8))
    assert runner.stats.replays == 1


# 7. Outputs are the caller's


def test_outputs_are_not_changed_by_later_replays(bcg_backend: str, net: Net, rand: Any):
    runner = GraphRunner(net, backend=bcg_backend)
    runner(rand(4, 8))
    first = runner(rand(4, 8, seed=1))
    copy = first.clone()
    first_of_capture = runner(rand(2, 8))
    also = first_of_capture.clone()
    for seed in range(2, 5):
        runner(rand(4, 8, seed=seed))
        runner(rand(2, 8, seed=seed))
    assert torch.equal(first, copy)
    assert torch.equal(first_of_capture, also)


# 8. Stale pointers are found


def test_stale_pointers_replaced_moved_or_added_state_invalidates(
    bcg_backend: str, net: Net, rand: Any
):
    runner = GraphRunner(net, backend=bcg_backend)
    x = rand(4, 8)
    runner(x)
    with torch.no_grad():
        net.first.weight.add_(1)
    assert torch.equal(runner(x), net(x))
    assert runner.stats.replays == 1, "an update in place is seen, not a reason to capture again"

    net.first.weight.data = net.first.weight.data.clone() * 2
    assert torch.equal(runner(x), net(x))
    net.second.weight = torch.nn.Parameter(net.second.weight * 3, requires_grad=False)
    assert torch.equal(runner(x), net(x))
    net.first = torch.nn.Sequential(net.first, torch.nn.ReLU())
    assert torch.equal(runner(x), net(x))
    misses = runner.stats.misses
    assert misses["parameter first.weight was moved"] == 1
    assert misses["parameter second.weight was replaced"] == 1
    assert misses["module first was replaced"] == 1
    assert runner.stats.captures == 4


def test_stale_pointers_tensor_attribute_replaced(bcg_backend: str, rand: Any):
    class Table(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = rand(8, seed=7)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.table

    module = Table()
    runner = GraphRunner(module, backend=bcg_backend)
    x = rand(4, 8)
    runner(x)
    module.table = rand(8, seed=8)
    assert torch.equal(runner(x), module(x))
    assert runner.stats.misses["attribute table was replaced"] == 1


def test_stale_pointers_layout_and_hooks_exchanged_one_for_one(
    bcg_backend: str, net: Net, rand: Any
):
    runner = GraphRunner(net, backend=bcg_backend)
    x = rand(4, 8)
    runner(x)
    net.first.weight.data = net.first.weight.data.t()
    assert torch.equal(runner(x), net(x))
    hook = net.first.register_forward_hook(lambda module, args, output: output * 2)
    runner(x)
    hook.remove()
    net.first.register_forward_hook(lambda module, args, output: output * 3)
    assert torch.equal(runner(x), net(x))
    hook = torch.nn.modules.module.register_module_forward_hook(lambda m, args, output: output + 1)
    try:
        assert torch.equal(runner(x), net(x))
    finally:
        hook.remove()
    assert torch.equal(runner(x), net(x))


def test_stale_pointers_python_attributes_changed_from_outside(bcg_backend: str, rand: Any):
    class Options:
        gain = 1.0

        def __init__(self) -> None:
            self.gain = 2.0

    class Configured(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = 2.0
            self.act = torch.sin
            self.options = Options()
            self.entered = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.entered += 1
            return self.act(x) * self.scale * self.options.gain

    module = Configured()
    runner = GraphRunner(module, backend=bcg_backend)
    x = rand(4, 8)
    runner(x)
    for change in (
        lambda: setattr(module, "scale", 3.0),
        lambda: setattr(module, "act", torch.cos),
        lambda: setattr(module.options, "gain", 4.0),
        lambda: delattr(module.options, "gain"),
    ):
        change()
        assert torch.equal(runner(x), module(x))
        replays = runner.stats.replays
        runner(x)
        assert runner.stats.replays == replays + 1, "what forward counts itself is no change"
    assert runner.stats.misses["attribute options.gain was changed"] == 2


# 9. One replay at a time


def test_one_at_a_time_capture_inside_a_capture_is_refused(bcg_backend: str, rand: Any):
    x = rand(4, 8)

    def body() -> None:
        x.add(1)
        capture(bcg_backend, lambda: x + 1)

    with pytest.raises(NestedCaptureError, match=r"^nested capture"):
        capture(bcg_backend, body)

    @eager_on_graph()
    def inner() -> None:
        capture(bcg_backend, lambda: x + 1)

    with pytest.raises(NestedCaptureError, match=r"^nested capture"):
        capture(bcg_backend, inner)


def test_one_at_a_time_replay_inside_a_capture_is_refused(bcg_backend: str, rand: Any):
    x = rand(4, 8)
    graph, _ = capture(bcg_backend, lambda: x + 1)
    with pytest.raises(NestedCaptureError, match=r"^nested capture"):
        capture(bcg_backend, lambda: (x.add(1), graph.replay()))


def test_one_at_a_time_runner_inside_a_capture_runs_inline(bcg_backend: str, net: Net, rand: Any):
    runner = GraphRunner(net, backend=bcg_backend)
    x = rand(4, 8)
    runner(x)
    graph, output = capture(bcg_backend, lambda: runner(x) + 1)
    assert graph.breaks == 1
    x.copy_(rand(4, 8, seed=3))
    output.fill_(7)
    graph.replay()
    assert torch.equal(output, net(x) + 1)


def test_one_at_a_time_replay_inside_a_replay_of_the_same_pool(bcg_backend: str, rand: Any):
    x = rand(4, 8)
    first = BreakableCUDAGraph()
    armed = []

    @eager_on_graph()
    def reenter(t: torch.Tensor) -> torch.Tensor:
        if armed:
            first.replay()
        return t * 2

    with BreakableCUDAGraphCapture(first, backend=bcg_backend):
        reenter(x + 1) + 1
    armed.append(True)
    with pytest.raises(NestedReplayError):
        first.replay()
    armed.clear()
    first.replay()


def test_one_at_a_time_threads_take_turns(bcg_backend: str, net: Net, rand: Any):
    runner = GraphRunner(net, backend=bcg_backend)
    inputs = [rand(4, 8, seed=s) for s in range(8)]
    with torch.no_grad():
        expected = [net(x) for x in inputs]
        runner(inputs[0])
    wrong: list[int] = []

    def work(number: int) -> None:
        with torch.no_grad():
            for _ in range(25):
                if not torch.equal(runner(inputs[number]), expected[number]):
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert runner.stats.calls == 201


def test_one_at_a_time_raw_replays_of_one_pool_from_threads(bcg_backend: str, rand: Any):
    """A second thread's replay must wait until the first one's breaks have ended."""
    x = rand(4, 8)
    inside: list[int] = []
    overlaps: list[int] = []

    @eager_on_graph()
    def slow(t: torch.Tensor) -> torch.Tensor:
        inside.append(1)
        overlaps.append(len(inside))
        threading.Event().wait(0.005)
        inside.pop()
        return t * 2

    graph, _ = capture(bcg_backend, lambda: slow(x + 1) + 1)
    threads = [threading.Thread(target=graph.replay) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert overlaps == [1] * 5


def test_empty_and_reset_graphs_say_so(bcg_backend: str, rand: Any):
    graph = BreakableCUDAGraph()
    with pytest.raises(ReplayError, match="capture it first"):
        graph.replay()
    x = rand(4, 8)
    with BreakableCUDAGraphCapture(graph, backend=bcg_backend):
        x + 1
    with (
        pytest.raises(CaptureError, match="already captured"),
        BreakableCUDAGraphCapture(graph, backend=bcg_backend),
    ):
        x + 1
    graph.reset()
    graph.reset()
    with pytest.raises(ReplayError, match="capture it first"):
        graph.replay()
    with BreakableCUDAGraphCapture(graph, backend=bcg_backend):
        y = x + 1
    x.add_(1)
    graph.replay()
    assert torch.equal(y, x + 1)
