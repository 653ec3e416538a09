"""GraphRunner: what it keeps, gives up, explains and refuses."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import threading
import time
from collections import deque
from typing import Any

import pytest
import torch

from bcg_core import GraphRunner, eager_on_graph
from bcg_core.errors import UnsupportedError

pytestmark = pytest.mark.bcg


class Scale(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entered = 0

    def forward(self, x: torch.Tensor, junk: Any = None, factor: float = 2.0) -> torch.Tensor:
        self.entered += 1
        return x * factor + 1


def rows(n: int, device: torch.device) -> torch.Tensor:
    return torch.arange(n * 4.0, device=device).view(n, 4)


def test_least_recently_used_graph_is_evicted(bcg_backend: str, bcg_device: torch.device):
    runner = GraphRunner(Scale(), max_graphs=2, backend=bcg_backend)
    for n in (1, 2, 1, 3):
        assert torch.equal(runner(rows(n, bcg_device)), rows(n, bcg_device) * 2 + 1)
    assert runner.stats.evictions == 1
    assert runner.stats.graphs == 2
    assert runner.explain(rows(1, bcg_device)) == "replays"
    assert runner.explain(rows(2, bcg_device)).startswith("misses: x has shape (2, 4)")
    runner(rows(2, bcg_device))
    assert runner.stats.captures == 4
    assert runner.stats.calls == 5


def test_stats_count_every_call_once(bcg_backend: str, bcg_device: torch.device):
    runner = GraphRunner(Scale(), backend=bcg_backend)
    runner.capture(rows(2, bcg_device))
    runner(rows(2, bcg_device))
    runner(rows(3, bcg_device))
    runner(rows(3, bcg_device))
    runner.seal()
    runner(rows(4, bcg_device))
    stats = runner.stats
    assert (stats.calls, stats.captures, stats.replays, stats.eager_calls) == (4, 2, 2, 1)
    assert sum(stats.misses.values()) == 2
    with pytest.raises(AttributeError):
        stats.calls = 3  # type: ignore[misc]


EXPLAINED = {
    "shape": ((lambda d: rows(5, d),), {}, "x has shape (5, 4), captured was (2, 4)"),
    "dtype": ((lambda d: rows(2, d).double(),), {}, "x has dtype torch.float64"),
    "stride": (
        (lambda d: rows(4, d).t()[:2],),
        {},
        "x has stride (1, 4), captured was (4, 1)",
    ),
    "scalar": ((lambda d: rows(2, d),), {"factor": 3.0}, "factor is given, captured was without"),
    "junk": ((lambda d: rows(2, d), lambda d: "a"), {}, "2 positional arguments, captured were 1"),
}


@pytest.mark.parametrize("case", EXPLAINED)
def test_explain_names_the_argument_that_differs(
    bcg_backend: str, bcg_device: torch.device, case: str
):
    args, kwargs, line = EXPLAINED[case]
    runner = GraphRunner(Scale(), backend=bcg_backend)
    assert runner.explain(rows(2, bcg_device)) == "misses: nothing is captured yet"
    runner(rows(2, bcg_device))
    assert line in runner.explain(*[make(bcg_device) for make in args], **kwargs)
    with torch.autocast(bcg_device.type, dtype=torch.bfloat16):
        assert "autocast is" in runner.explain(rows(2, bcg_device))


class NoEquality:
    def __init__(self) -> None:
        self.name = "kept"

    def __eq__(self, other: object) -> bool:
        raise TypeError("cannot be compared")

    def __hash__(self) -> int:
        raise TypeError("cannot be hashed")


JUNK = {
    "72,000 times None": lambda: [None] * 72_000,
    "an object without equality": NoEquality,
    "a bare object": object,
    "a set": lambda: {1, "two", 3.0},
    "a function": lambda: len,
    "nested": lambda: {"a": [None, (1, {"b": NoEquality()})]},
    "a slice": lambda: slice(1, 2),
    "bytes": lambda: b"abc",
    "nan": lambda: float("nan"),
}


@pytest.mark.parametrize("name", JUNK)
def test_junk_in_the_arguments_neither_breaks_nor_misses(
    bcg_backend: str, bcg_device: torch.device, name: str
):
    module = Scale()
    runner = GraphRunner(module, backend=bcg_backend)
    runner(rows(2, bcg_device), JUNK[name]())
    entered = module.entered
    for n in range(3):
        x = rows(2, bcg_device) + n
        assert torch.equal(runner(x, JUNK[name]()), x * 2 + 1)
    assert module.entered == entered
    assert runner.stats.replays == 3


def test_junk_of_72000_elements_costs_less_than_a_small_model(bcg_device: torch.device):
    """Walking it element by element took longer than the forward of a small transformer."""
    runner = GraphRunner(Scale())
    x, junk = rows(2, bcg_device), [None] * 72_000
    runner(x, junk)
    times = []
    for _ in range(9):
        started = time.perf_counter()
        runner(x, junk)
        times.append(time.perf_counter() - started)
    walk = time.perf_counter()
    for part in junk:
        isinstance(part, torch.Tensor)
    walk = time.perf_counter() - walk
    assert min(times) < 3 * walk


def test_values_that_compare_equal_but_differ_are_told_apart(
    bcg_backend: str, bcg_device: torch.device
):
    class Sign(torch.nn.Module):
        def forward(self, x: torch.Tensor, junk: Any) -> torch.Tensor:
            value = junk[0] if isinstance(junk, list) else junk
            return x / value if type(value) is float else x + (5 if value is True else 7)

    module = Sign()
    runner = GraphRunner(module, backend=bcg_backend)
    x = rows(2, bcg_device) + 1
    for value in (0.0, -0.0, 1, True, 1.0, [True] * 40, [1] * 40, [1.0] * 40):
        assert torch.equal(runner(x, value), module(x, value)), value
        assert torch.equal(runner(x, value), module(x, value)), value


def test_tensor_in_an_unknown_container_runs_eagerly_with_the_reason(
    bcg_backend: str, bcg_device: torch.device
):
    class Box:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

    class Unboxes(torch.nn.Module):
        def forward(self, x: torch.Tensor, box: Box) -> torch.Tensor:
            return x + box.tensor

    runner = GraphRunner(Unboxes(), backend=bcg_backend)
    x = rows(2, bcg_device)
    for n in range(2):
        assert torch.equal(runner(x, Box(x * n)), x + x * n)
    assert runner.stats.eager_calls == 2
    assert "holds a tensor inside an object" in runner.explain(x, Box(x))


def test_host_inputs_join_the_signature_by_content(bcg_backend: str, bcg_device: torch.device):
    class Steps(torch.nn.Module):
        def forward(self, x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
            return x * step.to(x.device) if x.device == step.device else x * step

    module = Steps()
    runner = GraphRunner(module, host_inputs=["step"], backend=bcg_backend)
    x = rows(2, bcg_device)
    for value in (1.0, 2.0, 1.0):
        step = torch.tensor(value)
        assert torch.equal(runner(x, step), module(x, step))
    assert runner.stats.graphs == 2
    assert runner.stats.replays == 1
    assert "step is a host tensor with other content" in runner.explain(x, torch.tensor(9.0))


def test_max_pool_bytes_evicts_and_says_so(bcg_backend: str, bcg_device: torch.device):
    small = GraphRunner(Scale(), backend=bcg_backend)
    small(rows(2, bcg_device))
    limit = small.stats.pool_bytes
    assert limit > 0
    told: list[str] = []
    runner = GraphRunner(
        Scale(), backend=bcg_backend, max_pool_bytes=limit, on_fallback=told.append
    )
    runner(rows(2, bcg_device))
    assert runner.stats.graphs == 1
    big = torch.ones(1 << 21, 4, device=bcg_device)
    assert torch.equal(runner(big), big * 2 + 1)
    assert runner.stats.evictions == 1
    assert runner.stats.graphs == 0
    assert "max_pool_bytes" in told[0]
    runner(rows(2, bcg_device))
    assert runner.stats.graphs == 1
    assert runner.stats.pool_bytes <= limit


def test_reset_gives_the_memory_back(bcg_backend: str, bcg_device: torch.device):
    runner = GraphRunner(Scale(), backend=bcg_backend)
    before = None
    for _ in range(5):
        runner(rows(64, bcg_device))
        runner.reset()
        assert runner.stats.graphs == runner.stats.pool_bytes == 0
        if bcg_device.type == "cuda":
            gc.collect()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            now = torch.cuda.memory_reserved()
            assert before is None or now == before
            before = now
    assert runner.stats.captures == 5


def test_module_whose_tensors_keep_changing_is_given_up(bcg_backend: str, bcg_device: torch.device):
    module = torch.nn.Linear(4, 4).to(bcg_device).requires_grad_(False)
    runner = GraphRunner(module, backend=bcg_backend)
    x = rows(2, bcg_device)
    for _ in range(20):
        module.weight.data = module.weight.data.clone()
        assert torch.equal(runner(x), module(x))
    assert runner.stats.captures < 12
    assert runner.stats.eager_calls > 0
    assert runner.stats.calls == 20


def test_environment_variable_turns_everything_into_eager(
    bcg_backend: str, bcg_device: torch.device, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("BCG_DISABLE", "1")
    module = Scale()
    runner = GraphRunner(module, backend=bcg_backend)
    runner(rows(2, bcg_device))
    assert not runner.capture(rows(2, bcg_device))
    assert runner.stats.eager_calls == module.entered == 1


def test_plain_function_and_module_without_parameters(bcg_backend: str, bcg_device: torch.device):
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    runner = GraphRunner(function, backend=bcg_backend)
    x = rows(2, bcg_device)
    assert torch.equal(runner(x), function(x))
    assert torch.equal(runner(x + 1), function(x + 1))
    assert runner.stats.replays == 1


def test_call_without_tensors_draws_what_eager_draws(bcg_backend: str, bcg_device: torch.device):
    class Noise(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(4, device=bcg_device), False)

        def forward(self, rows: int) -> torch.Tensor:
            return torch.randn(rows, 4, device=bcg_device) * self.scale

    module = Noise()
    torch.manual_seed(2)
    expected = [module(3) for _ in range(3)]
    runner = GraphRunner(module, backend=bcg_backend)
    torch.manual_seed(2)
    assert all(torch.equal(runner(3), one) for one in expected)
    assert runner.stats.replays == 2


def test_error_of_the_module_itself_is_the_callers(bcg_backend: str, bcg_device: torch.device):
    class Wrong(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("wrong on purpose")

    runner = GraphRunner(Wrong(), backend=bcg_backend)
    with pytest.raises(ValueError, match="wrong on purpose"):
        runner(rows(2, bcg_device))


class Box:
    def __init__(self, inside: torch.Tensor) -> None:
        self.inside = inside


KEPT = {
    "expanded": lambda x: x.sum(0, keepdim=True).expand(4, 4),
    "parameter": lambda x: torch.nn.Parameter(x * 2, requires_grad=False),
    "in an object": lambda x: Box(x * 2),
    "in a deque": lambda x: deque([x * 2]),
}


@pytest.mark.parametrize("name", KEPT)
def test_outputs_of_every_kind_are_the_callers(
    bcg_backend: str, bcg_device: torch.device, name: str
):
    def inside(output: Any) -> torch.Tensor:
        output = output[0] if isinstance(output, deque) else output
        return output.inside if isinstance(output, Box) else output

    function = KEPT[name]
    runner = GraphRunner(function, backend=bcg_backend)
    x = rows(4, bcg_device)
    kept = [runner(x + n) for n in range(3)]
    for n, output in enumerate(kept):
        assert torch.equal(inside(output), inside(function(x + n)))


def test_argument_without_elements_is_returned_itself(bcg_backend: str, bcg_device: torch.device):
    runner = GraphRunner(lambda x, y: (x, y + 1), backend=bcg_backend)
    for _ in range(2):
        empty = rows(0, bcg_device)
        assert runner(empty, rows(1, bcg_device))[0] is empty


def _enabled(x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        return torch.autograd.grad((x.requires_grad_() ** 2).sum(), x)[0]


ARGUMENTS_CHANGED = {
    "entry added": (lambda x, d: d.update(new=x * 2) or x + 1, {}, "adds to its arguments"),
    "entry replaced": (lambda x, d: d.update(old=x * 2) or x + 1, {"old": 1}, "changes argument"),
    "long list": (lambda x, d: d.append(1) or x * len(d), [1] * 40, "changes argument"),
    "shape": (lambda x, d: x.unsqueeze_(0) * 2, None, "another layout"),
    "memory": (lambda x, d: setattr(x, "data", x * 2) or x + 1, None, "other memory"),
    "gradient": (lambda x, d: _enabled(x), None, "gradients"),
}


@pytest.mark.parametrize("name", ARGUMENTS_CHANGED)
def test_forward_that_changes_its_arguments_runs_eagerly(
    bcg_backend: str, bcg_device: torch.device, name: str
):
    function, extra, reason = ARGUMENTS_CHANGED[name]
    runner = GraphRunner(function, backend=bcg_backend)
    for n in range(2):
        given = [(rows(4, bcg_device) + n, copy.copy(extra)) for _ in range(2)]
        with torch.no_grad():
            output, expected = runner(*given[0]), function(*given[1])
        assert torch.equal(output, expected)
        assert repr(given[0]) == repr(given[1])
    assert any(reason in miss for miss in runner.stats.misses)


def test_result_with_gradients_is_found_where_no_argument_has_them(
    bcg_backend: str, bcg_device: torch.device
):
    weight = torch.ones(4, device=bcg_device, requires_grad=True)
    runner = GraphRunner(lambda x: x * weight, backend=bcg_backend)
    for _ in range(2):
        assert runner(rows(2, bcg_device)).requires_grad
    with torch.no_grad():
        runner(rows(2, bcg_device))
    assert runner.stats.captures == 1


def test_forward_sees_the_mode_of_the_call(bcg_backend: str, bcg_device: torch.device):
    def function(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if torch.is_grad_enabled() else x * 3

    runner = GraphRunner(function, backend=bcg_backend)
    x = rows(2, bcg_device)
    assert torch.equal(runner(x), x * 2)
    with torch.no_grad():
        assert torch.equal(runner(x), x * 3)


def test_buffer_of_inference_mode_updated_in_place(bcg_backend: str, bcg_device: torch.device):
    with torch.inference_mode():
        norm = torch.nn.BatchNorm1d(4).to(bcg_device)
        norm.register_buffer("seen", torch.zeros((), device=bcg_device))
        norm.register_forward_pre_hook(lambda module, args: module.seen.add_(1) and None)
        runner = GraphRunner(norm, backend=bcg_backend)
        for _ in range(3):
            runner(rows(2, bcg_device))
        assert norm.seen == 3


@pytest.mark.parametrize("generator", ["Python", "NumPy"])
def test_draws_of_other_generators_run_eagerly(
    bcg_backend: str, bcg_device: torch.device, generator: str
):
    numpy = pytest.importorskip("numpy")
    seed, draw = {
        "Python": (random.seed, random.random),
        "NumPy": (numpy.random.seed, numpy.random.random),
    }[generator]

    runner = GraphRunner(lambda x: x * draw(), backend=bcg_backend)
    x = rows(2, bcg_device)
    seed(0)
    outputs = [runner(x) for _ in range(3)]
    seed(0)
    assert all(torch.equal(output, x * draw()) for output in outputs)
    assert any(f"generator of {generator}" in miss for miss in runner.stats.misses)


class Keeping(torch.nn.Module):
    """Keeps something from call to call, in the way that ``step`` says."""

    def __init__(self, step: Any, kept: Any) -> None:
        super().__init__()
        self.step = step
        self.ready = False
        if step is _fill_once:
            self.register_buffer("kept", kept)
        else:
            self.kept = kept

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.step(self, x)


def _difference_from_the_last(self: Any, x: torch.Tensor, copied: bool) -> torch.Tensor:
    last, self.kept = self.kept, x.clone() if copied else x
    return x * 1 if last is None else x - last


def _fill_once(self: Any, x: torch.Tensor) -> torch.Tensor:
    if not self.ready:
        self.kept.copy_(x[0])
        self.ready = True
    return x + self.kept


IN_PLACE = {
    "attribute": (lambda self, x: self.kept.add_(x[0]) + x, lambda zeros: zeros),
    "in a list": (lambda self, x: self.kept[0].add_(x[0]) + x, lambda zeros: [zeros]),
    "nested": (lambda self, x: self.kept["a"][0].add_(x[0]) + x, lambda zeros: {"a": [zeros]}),
    "buffer filled once": (_fill_once, lambda zeros: zeros),
}
REBOUND = {
    "attribute": (lambda self, x: setattr(self, "kept", self.kept + 1) or x, lambda zeros: zeros),
    "equal for equal inputs": (lambda s, x: _difference_from_the_last(s, x, True), lambda _: None),
    "an argument": (lambda s, x: _difference_from_the_last(s, x, False), lambda _: None),
    "in a list": (lambda s, x: s.kept.append(x * 2) or x * len(s.kept), lambda _: []),
    "in a dict": (lambda s, x: s.kept.update(a=s.kept["a"] + x) or s.kept["a"], lambda z: {"a": z}),
}


def check_keeping(backend: str, device: torch.device, step: Any, kept: Any) -> GraphRunner:
    module, eager = (Keeping(step, kept(torch.zeros(4, device=device))) for _ in range(2))
    runner = GraphRunner(module, backend=backend)
    for n in range(4):
        x = rows(4, device) * (n + 1)
        assert torch.equal(runner(x), eager(x))
    assert repr(module.kept) == repr(eager.kept)
    return runner


@pytest.mark.parametrize("name", IN_PLACE)
def test_tensors_of_the_module_are_updated_once_a_call(
    bcg_backend: str, bcg_device: torch.device, name: str
):
    assert check_keeping(bcg_backend, bcg_device, *IN_PLACE[name]).stats.replays == 3


@pytest.mark.parametrize("name", REBOUND)
def test_module_that_keeps_new_tensors_runs_eagerly(
    bcg_backend: str, bcg_device: torch.device, name: str
):
    assert check_keeping(bcg_backend, bcg_device, *REBOUND[name]).stats.fallbacks == 1


def test_generator_of_the_module_is_drawn_from_as_in_eager(
    bcg_backend: str, bcg_device: torch.device
):
    class Noise(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator(bcg_device).manual_seed(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.rand(4, generator=self.generator, device=x.device)

    runner, eager = GraphRunner(Noise(), backend=bcg_backend), Noise()
    x = rows(2, bcg_device)
    for _ in range(3):
        assert torch.equal(runner(x), eager(x))
    assert runner.stats.replays == 2


NOT_PLAIN = {
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "meta": lambda: torch.empty(3, device="meta"),
    "zero": lambda: torch._efficientzerotensor(3),
    "within an element": lambda: torch.frombuffer(bytearray(41), dtype=torch.float32, offset=1)[
        ::2
    ],
}


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_tensor_without_plain_memory_runs_eagerly_with_the_reason(name: str):
    runner = GraphRunner(lambda x, other: (x + 1, other * 2), backend="simulated")
    x, other = torch.ones(4), NOT_PLAIN[name]()
    assert repr(runner(x, other)) == repr((x + 1, other * 2))
    assert runner.stats.eager_calls == 1
    assert "argument [1]" in next(iter(runner.stats.misses))


def test_transforms_of_torch_func_go_through_a_runner(bcg_backend: str, bcg_device: torch.device):
    runner = GraphRunner(lambda x: x * x, backend=bcg_backend)
    x = rows(2, bcg_device)
    assert torch.equal(torch.vmap(runner)(x), x * x)
    assert torch.equal(torch.func.jvp(runner, (x,), (x,))[1], 2 * x * x)


def test_break_that_calls_the_runner_again_runs_inline(bcg_backend: str, bcg_device: torch.device):
    runners: list[GraphRunner] = []

    class Recursive(torch.nn.Module):
        @eager_on_graph()
        def inner(self, x: torch.Tensor) -> torch.Tensor:
            return runners[0](x, depth=0)

        def forward(self, x: torch.Tensor, depth: int = 1) -> torch.Tensor:
            return x + 1 if depth == 0 else self.inner(x * 2) * 3

    module = Recursive()
    runners.append(GraphRunner(module, backend=bcg_backend))
    for n in range(3):
        x = rows(2, bcg_device) + n
        assert torch.equal(runners[0](x), (x * 2 + 1) * 3)


def test_threads_that_capture_at_the_same_time(bcg_backend: str, bcg_device: torch.device):
    runner = GraphRunner(Scale(), backend=bcg_backend)
    wrong: list[int] = []

    def work(n: int) -> None:
        for k in range(5):
            x = rows(n, bcg_device) + k
            if not torch.equal(runner(x), x * 2 + 1):
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert runner.stats.captures == 6


def test_copying_and_pickling_a_runner_is_refused_with_the_way_out():
    runner = GraphRunner(Scale())
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="make a new runner"):
            attempt(runner)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "fast"}, "mode 'fast'"),
        ({"backend": "tpu"}, "the backends are auto, cuda, simulated"),
        ({"max_graphs": 0}, "max_graphs is 0"),
        ({"breaks": "sometimes"}, "'sometimes'"),
    ],
)
def test_unknown_options_are_refused_by_name(arguments: dict[str, Any], message: str):
    with pytest.raises((UnsupportedError, ValueError), match=message):
        GraphRunner(Scale(), **arguments)


def test_cuda_backend_without_a_gpu_says_what_to_do(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="use backend='simulated'"):
        GraphRunner(Scale(), backend="cuda")
