"""Fixtures for tests of captured graphs. Torch and ``bcg_core`` are imported as they are used."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Protocol

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch

    from bcg_core import BreakableCUDAGraph, GraphRunner


class Capture(Protocol):
    """What ``bcg_capture`` gives: captures ``function(*args, **kwargs)`` on the test's backend."""

    def __call__(
        self, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> tuple[BreakableCUDAGraph, Any]: ...


class AssertReplayEqualsEager(Protocol):
    """What ``assert_replay_equals_eager`` gives; see :func:`assert_replay_equals_eager`."""

    def __call__(
        self,
        target: GraphRunner | Callable[..., Any],
        calls: Sequence[tuple[Sequence[Any], Mapping[str, Any]]],
        **runner_options: Any,
    ) -> GraphRunner: ...


@pytest.fixture(params=["simulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def bcg_backend(request: pytest.FixtureRequest) -> str:
    """Each backend in turn, by name; ``cuda`` is skipped, with the reason, where there is none."""
    return str(request.param)


@pytest.fixture
def bcg_device(bcg_backend: str) -> torch.device:
    """The device of the backend's tensors."""
    import torch

    return torch.device("cuda" if bcg_backend == "cuda" else "cpu")


@pytest.fixture
def bcg_capture(bcg_backend: str) -> Iterator[Capture]:
    """``bcg_capture(function, *args, **kwargs) -> (graph, output)``; graphs end with the test."""
    from bcg_core import BreakableCUDAGraph, BreakableCUDAGraphCapture

    graphs: list[BreakableCUDAGraph] = []

    def capture(
        function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> tuple[BreakableCUDAGraph, Any]:
        graph = BreakableCUDAGraph()
        graphs.append(graph)
        with BreakableCUDAGraphCapture(graph, backend=bcg_backend):
            output = function(*args, **kwargs)
        return graph, output

    yield capture
    for graph in graphs:
        graph.reset()


@pytest.fixture
def assert_replay_equals_eager(bcg_backend: str) -> AssertReplayEqualsEager:
    """Assert that replays give, bit for bit, what eager calls give.

    ``assert_replay_equals_eager(target, calls, **runner_options) -> runner``: ``target`` is a
    ``GraphRunner``, or what to make one for; each of ``calls`` is ``(args, kwargs)``, all of one
    signature. The first is captured; then every one is called eagerly and replayed, with the
    graph's outputs poisoned before and random numbers drawn from the same state. Fails when a
    call was not replayed, when the module's forward was entered in Python, or when any leaf of
    the result differs.
    """

    def check(
        target: GraphRunner | Callable[..., Any],
        calls: Sequence[tuple[Sequence[Any], Mapping[str, Any]]],
        **runner_options: Any,
    ) -> GraphRunner:
        __tracebackhide__ = True
        import torch

        from bcg_core import GraphRunner

        if not calls:
            pytest.fail("no calls to compare: give at least one (args, kwargs)")
        if isinstance(target, GraphRunner):
            runner = target
        else:
            runner = GraphRunner(target, **{"backend": bcg_backend, **runner_options})
        # Before the capture: a hook that comes later makes the graph invalid.
        with torch.no_grad(), _Entries(runner.module) as entries:
            first_args, first_kwargs = calls[0]
            if not runner.capture(*first_args, **first_kwargs):
                pytest.fail(f"not captured: {runner.explain(*first_args, **first_kwargs)}")
            for number, (args, kwargs) in enumerate(calls):
                _compare(runner, number, args, kwargs, entries)
        return runner

    return check


@pytest.fixture
def tiny_pipeline(bcg_device: torch.device) -> Any:
    """The built-in tiny ``ZImagePipeline`` on the backend's device, without a progress bar."""
    pytest.importorskip("diffusers", reason="the tiny pipeline is one of diffusers")
    from bcg_core.models import tiny

    pipeline = tiny.tiny_pipeline(device=bcg_device)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _compare(
    runner: GraphRunner,
    number: int,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    entries: _Entries,
) -> None:
    __tracebackhide__ = True
    from bcg_core.rng import preserved
    from bcg_core.tree import tree_tensors

    # A model may change its arguments: eager gets copies, which alias each other as these do.
    eager_args, eager_kwargs = copy.deepcopy((args, kwargs))
    devices = [tensor.device for tensor in tree_tensors((args, kwargs)) if tensor.is_cuda]
    with preserved(device=devices[0] if devices else None):
        expected = runner.module(*eager_args, **eager_kwargs)
    why = runner.explain(*args, **kwargs)
    before = runner.stats.replays
    for captured in runner._graphs.values():
        captured.outputs.poison()
    entries.count = 0
    result = runner(*args, **kwargs)
    if runner.stats.replays != before + 1:
        pytest.fail(f"call {number} was not replayed: it {why}")
    if entries.count:
        pytest.fail(f"call {number}: the forward was entered {entries.count} times in a replay")
    if (difference := _difference(expected, result)) is not None:
        pytest.fail(f"call {number}: the replay differs from eager: {difference}")


class _Entries:
    """Counts how often a module's forward is entered inside a ``with`` block."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.count = 0

    def __enter__(self) -> _Entries:
        from torch.nn.modules.module import register_module_forward_pre_hook

        self._handle = register_module_forward_pre_hook(self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        self._handle.remove()

    def _note(self, module: Any, _: Any) -> None:
        self.count += module is self._module


def _difference(expected: Any, result: Any) -> str | None:
    """What sets two results apart, in words: structure, a leaf, bits; ``None`` for nothing."""
    import torch

    from bcg_core.tree import flatten

    wanted: list[Any] = []
    given: list[Any] = []
    if flatten(expected, wanted) != flatten(result, given):
        return f"its structure is that of a {type(result).__name__}, another one"
    for index, (want, have) in enumerate(zip(wanted, given)):
        if not isinstance(want, torch.Tensor) or not isinstance(have, torch.Tensor):
            if want is not have and want != have:
                return f"leaf {index} is {have!r}, not {want!r}"
        elif (want.shape, want.dtype, want.device) != (have.shape, have.dtype, have.device):
            return f"leaf {index} is {_kind(have)}, not {_kind(want)}"
        elif not torch.equal(_bits(want), _bits(have)):
            return f"leaf {index} ({_kind(want)}) {_how_far(want, have)}"
    return None


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} on {tensor.device}"


def _how_far(want: torch.Tensor, have: torch.Tensor) -> str:
    different = int((want != have).sum())
    if not want.is_floating_point():
        return f"differs in {different} of {want.numel()} elements"
    furthest = float((want.double() - have.double()).abs().max())
    return f"differs in {different} of {want.numel()} elements, by at most {furthest:g}"
