"""The fixtures for tests of captured graphs: they pass what is right and fail what is not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from bcg_core import BreakableCUDAGraph, GraphRunner, break_graph

if TYPE_CHECKING:
    from pytest_bcg.fixtures import AssertReplayEqualsEager, Capture

pytestmark = pytest.mark.bcg


class Layer(torch.nn.Module):
    def forward(self, x: torch.Tensor, scale: float = 2.0) -> dict[str, Any]:
        return {"doubled": x * scale, "parts": (x.sum(), x > 0)}


class Drifting(torch.nn.Module):
    """Reads a Python number that changes: a graph bakes in the one that it met."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.entered += 1
        return x + self.entered


def _calls(device: torch.device, count: int = 3) -> list[tuple[list[Any], dict[str, Any]]]:
    generator = torch.Generator().manual_seed(0)
    return [([torch.randn(4, 4, generator=generator).to(device)], {}) for _ in range(count)]


def test_the_backend_has_its_device(bcg_backend: str, bcg_device: torch.device) -> None:
    assert bcg_device.type == {"simulated": "cpu", "cuda": "cuda"}[bcg_backend]


def test_a_function_is_captured_and_replayed(
    bcg_capture: Capture, bcg_device: torch.device
) -> None:
    x = torch.ones(3, device=bcg_device)

    def function(x: torch.Tensor, add: float) -> torch.Tensor:
        y = x * 2
        break_graph()
        return y + add

    graph, output = bcg_capture(function, x, add=1.0)
    assert output.tolist() == [3.0] * 3
    x.fill_(5)
    graph.replay()
    assert output.tolist() == [11.0] * 3


def test_a_captured_graph_ends_with_its_test(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest, torch
        from bcg_core.errors import ReplayError
        kept = []
        def test_one(bcg_capture, bcg_device):
            graph, _ = bcg_capture(lambda x: x + 1, torch.ones(2, device=bcg_device))
            graph.replay()
            kept.append(graph)
        def test_two():
            with pytest.raises(ReplayError): kept[0].replay()
        """
    )
    pytester.runpytest("-k", "simulated or two").assert_outcomes(passed=2, deselected=1)


def test_right_replays_pass(
    assert_replay_equals_eager: AssertReplayEqualsEager, bcg_device: torch.device
) -> None:
    calls = _calls(bcg_device)
    runner = assert_replay_equals_eager(Layer(), [(args, {"scale": 3.0}) for args, _ in calls])
    assert runner.stats.replays == 3
    assert runner.stats.captures == 1


def test_random_numbers_are_drawn_from_the_same_state(
    assert_replay_equals_eager: AssertReplayEqualsEager, bcg_device: torch.device
) -> None:
    assert_replay_equals_eager(torch.nn.Dropout(0.5), _calls(bcg_device))


def test_a_runner_may_be_given(
    assert_replay_equals_eager: AssertReplayEqualsEager,
    bcg_backend: str,
    bcg_device: torch.device,
) -> None:
    runner = GraphRunner(Layer(), backend=bcg_backend)
    assert assert_replay_equals_eager(runner, _calls(bcg_device)) is runner


def test_values_baked_into_a_graph_are_found(
    assert_replay_equals_eager: AssertReplayEqualsEager, bcg_device: torch.device
) -> None:
    with pytest.raises(
        pytest.fail.Exception, match=r"call \d: the replay differs from eager: leaf 0 \(float32"
    ):
        assert_replay_equals_eager(Drifting(), _calls(bcg_device))


def test_an_output_that_the_replay_does_not_write_is_found(
    assert_replay_equals_eager: AssertReplayEqualsEager,
    bcg_device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(BreakableCUDAGraph, "replay_in_turn", lambda self: None)
    with pytest.raises(pytest.fail.Exception, match="the replay differs from eager"):
        assert_replay_equals_eager(Layer(), _calls(bcg_device, 1))


def test_a_call_of_another_signature_is_found(
    assert_replay_equals_eager: AssertReplayEqualsEager, bcg_device: torch.device
) -> None:
    calls = [*_calls(bcg_device, 1), ([torch.ones(2, device=bcg_device)], {})]
    with pytest.raises(pytest.fail.Exception, match=r"call 1 was not replayed: it misses: .*"):
        assert_replay_equals_eager(Layer(), calls)


def test_a_capture_that_is_refused_is_found(
    assert_replay_equals_eager: AssertReplayEqualsEager, bcg_device: torch.device
) -> None:
    with pytest.raises(pytest.fail.Exception, match="not captured: runs eagerly"):
        assert_replay_equals_eager(lambda x: x * x.sum().item(), _calls(bcg_device))


def test_no_calls_at_all_are_found(assert_replay_equals_eager: AssertReplayEqualsEager) -> None:
    with pytest.raises(pytest.fail.Exception, match="no calls to compare"):
        assert_replay_equals_eager(Layer(), [])


def test_the_tiny_pipeline_is_on_the_device(tiny_pipeline: Any, bcg_device: torch.device) -> None:
    assert tiny_pipeline.transformer.device.type == bcg_device.type


def test_the_cuda_half_says_why_it_is_skipped(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    pytester.makepyfile("def test_it(bcg_backend): assert bcg_backend == 'simulated'")
    result = pytester.runpytest("-rs")
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED ?1? *: needs 1 GPU(s), this machine has none"])
