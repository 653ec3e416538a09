"""What only a CUDA device shows: the allocator's pools, streams, generators, failed captures."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch

from bcg_core import BreakableCUDAGraph, BreakableCUDAGraphCapture, GraphRunner, eager_on_graph
from bcg_core.backends.cuda import CUDA, CUDAPool
from bcg_core.errors import CaptureRefusedError

pytestmark = [pytest.mark.bcg, pytest.mark.gpu]

MIB = 1 << 20


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda")


def capture(function: Any, **options: Any) -> tuple[BreakableCUDAGraph, Any]:
    graph = BreakableCUDAGraph()
    with torch.no_grad(), BreakableCUDAGraphCapture(graph, backend="cuda", **options):
        output = function()
    return graph, output


def memory() -> tuple[int, int]:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(), torch.cuda.memory_allocated()


def test_ownership_is_read_from_the_allocators_snapshot():
    """Both cases: an intermediate of the capture is the pool's, a tensor from outside is not."""
    outside = numbers(64)
    owned: dict[str, bool] = {}

    @eager_on_graph()
    def look(inside: torch.Tensor, foreign: torch.Tensor) -> torch.Tensor:
        return inside + foreign

    class Asks(BreakableCUDAGraphCapture):
        def _hold_inputs(self, arguments: Any) -> Any:
            inside, foreign = arguments[0]
            owned["inside"] = self._recorder.owns(inside)
            owned["foreign"] = self._recorder.owns(foreign)
            pool = self.graph._pool
            assert isinstance(pool, CUDAPool)
            by_hand = {
                name: any(
                    s["address"] <= t.data_ptr() < s["address"] + s["total_size"]
                    for s in torch.cuda.memory_snapshot()
                    if tuple(s["segment_pool_id"]) == pool.handle
                )
                for name, t in (("inside", inside), ("foreign", foreign))
            }
            assert by_hand == owned
            return super()._hold_inputs(arguments)

    graph = BreakableCUDAGraph()
    with Asks(graph, backend="cuda"):
        look(outside * 2, outside)
    assert owned == {"inside": True, "foreign": False}


def test_result_of_another_graph_of_the_pool_is_not_owned():
    first, one = capture(lambda: numbers(64) * 2)
    reader = BreakableCUDAGraph(first.pool())
    with BreakableCUDAGraphCapture(reader, backend="cuda"):
        output = one + 1
    expected = one + 1
    assert any(t.data_ptr() == one.data_ptr() for t in reader._held.values())
    del one
    reader.replay()
    assert torch.equal(output, expected)


def test_replay_is_exact_with_the_whole_pool_overwritten_before():
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))

        @eager_on_graph()
        def between(self, x: torch.Tensor) -> torch.Tensor:
            return x.softmax(-1) * 8

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = self.between(layer(x))
            return x

    net = Net().cuda().requires_grad_(False)
    runner = GraphRunner(net, backend="cuda")
    runner(numbers(16, 64))
    for byte in (0xFF, 0x00, 0x7F):
        x = numbers(16, 64)
        assert isinstance(runner._pool, CUDAPool)
        assert runner._pool.fill(byte) == runner.stats.pool_bytes
        assert torch.equal(runner(x), net(x))
    assert runner.stats.replays == 3


def test_capture_and_reset_cycles_give_everything_back():
    x = numbers(MIB)
    before = None
    for _ in range(20):
        graph, output = capture(lambda: (x * 2 + 1).sin())
        graph.replay()
        del output
        graph.reset()
        now = memory()
        assert before is None or now == before
        before = now


def test_failed_captures_leave_memory_and_generator_as_they_were():
    x = numbers(MIB)

    def body() -> Any:
        noise = torch.rand(MIB, device="cuda")
        return (x + noise).sum().item()

    state = torch.cuda.get_rng_state()
    before = None
    for _ in range(5):
        with pytest.raises(CaptureRefusedError, match=r"item at .*test_cuda.py:\d+"):
            capture(body)
        assert torch.equal(torch.cuda.get_rng_state(), state)
        torch.randn(4, device="cuda")
        torch.cuda.set_rng_state(state)
        now = memory()
        assert before is None or now == before
        before = now


def test_out_of_memory_in_a_capture_leaves_the_next_eager_call_working():
    class Huge(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if torch.cuda.is_current_stream_capturing():
                torch.empty(1 << 42, dtype=torch.uint8, device="cuda")
            return x + 1

    runner = GraphRunner(Huge(), backend="cuda")
    x = numbers(8)
    assert torch.equal(runner(x), x + 1)
    assert torch.equal(runner(x), x + 1)
    assert runner.stats.fallbacks == 1
    assert "out of memory" in runner.explain(x)
    graph, output = capture(lambda: x * 2)
    graph.replay()
    assert torch.equal(output, x * 2)


def test_another_threads_cuda_calls_do_not_break_a_capture():
    x = numbers(64)
    stop = threading.Event()
    errors: list[BaseException] = []

    def loader() -> None:
        try:
            while not stop.is_set():
                torch.randn(1024).cuda().sum().item()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=loader)
    thread.start()
    try:
        for _ in range(20):
            graph, output = capture(lambda: x * 2 + 1)
            graph.replay()
            assert torch.equal(output, x * 2 + 1)
    finally:
        stop.set()
        thread.join()
    assert errors == []


def test_replays_from_threads_on_different_streams_do_not_interleave():
    class Slow(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(20):
                x = x @ x / 64
            return x

    module = Slow()
    runner = GraphRunner(module, backend="cuda")
    inputs = [numbers(512, 512) for _ in range(4)]
    expected = [module(x) for x in inputs]
    runner(inputs[0])
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work(n: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream), torch.no_grad():
            for _ in range(20):
                result = runner(inputs[n])
                stream.synchronize()
                if not torch.equal(result, expected[n]):
                    wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_capture_on_a_stream_of_the_callers():
    x = numbers(64)
    stream = torch.cuda.Stream()
    on: list[torch.cuda.Stream] = []

    @eager_on_graph()
    def note(t: torch.Tensor) -> torch.Tensor:
        on.append(torch.cuda.current_stream())
        return t * 2

    graph, output = capture(lambda: note(x + 1) + 1, stream=stream)
    assert on == [stream]
    x.copy_(numbers(64))
    graph.replay()
    assert torch.equal(output, (x + 1) * 2 + 1)
    assert on[1] == torch.cuda.current_stream()


def test_pool_handle_of_torch_is_taken_and_given():
    handle = torch.cuda.graph_pool_handle()
    x = numbers(64)
    graph, _ = capture(lambda: x + 1, pool=handle)
    assert graph.pool() == handle
    plain = torch.cuda.CUDAGraph()
    with torch.cuda.graph(plain, pool=graph.pool()):
        output = x * 3
    plain.replay()
    assert torch.equal(output, x * 3)
    assert CUDA.new_pool(handle) is CUDA.new_pool(graph.pool())


def test_generator_given_as_an_argument_replays_as_eager():
    generator = torch.Generator("cuda").manual_seed(5)

    class Noise(torch.nn.Module):
        def forward(self, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
            return x + torch.randn(x.shape, generator=generator, device=x.device)

    module = Noise()
    runner = GraphRunner(module, backend="cuda")
    x = numbers(64)
    results = [runner(x, generator) for _ in range(3)]
    other = torch.Generator("cuda").manual_seed(5)
    assert all(torch.equal(r, module(x, other)) for r in results)
    assert torch.equal(generator.get_state(), other.get_state())
    assert runner.stats.replays == 2


def test_cpu_tensor_argument_is_part_of_the_signature():
    class Scale(torch.nn.Module):
        def forward(self, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
            return x * sigma

    module = Scale()
    runner = GraphRunner(module)
    x = numbers(8)
    for value in (1.5, 2.5, 1.5):
        sigma = torch.tensor(value)
        assert torch.equal(runner(x, sigma), module(x, sigma))
    assert runner.stats.graphs == 2
    assert runner.stats.replays == 1
