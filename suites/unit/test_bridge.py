"""Bridges and weak references, leaf by leaf, over every structure that models return."""

from __future__ import annotations

import collections
import dataclasses
import gc
from typing import Any, NamedTuple

import pytest
import torch

from bcg_core import BreakableCUDAGraph, BreakableCUDAGraphCapture, eager_on_graph
from bcg_core.bridge import Bridge, _copy_output
from bcg_core.errors import UnsupportedError
from bcg_core.tree import map_tensors, tree_tensors

pytestmark = pytest.mark.bcg


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Plain:
    sample: Any
    note: str = "kept"


@dataclasses.dataclass(frozen=True)
class Frozen:
    sample: Any
    scale: float = 0.5


@dataclasses.dataclass
class ModelOutput(collections.OrderedDict):  # the shape of diffusers' and transformers' outputs
    sample: Any = None
    hidden: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)


STRUCTURES: dict[str, Any] = {
    "tensor": lambda a, b: a,
    "tuple": lambda a, b: (a, b),
    "list": lambda a, b: [a, b],
    "dict": lambda a, b: {"a": a, 3: b},
    "ordered dict": lambda a, b: collections.OrderedDict(z=a, y=b),
    "defaultdict": lambda a, b: collections.defaultdict(list, {"a": a, "b": b}),
    "named tuple": lambda a, b: Pair(a, b),
    "dataclass": lambda a, b: Plain((a, b)),
    "frozen dataclass": lambda a, b: Frozen({"x": [a, b]}),
    "model output": lambda a, b: ModelOutput(sample=a, hidden=(b, None)),
    "nested": lambda a, b: {"x": [(a, Pair(b, None)), Plain([a])], "n": (1, "two", None, 3.5)},
    "diffusers output": None,
    "transformers output": None,
}


def build(structure: str, a: Any, b: Any) -> Any:
    if structure == "diffusers output":
        outputs = pytest.importorskip("diffusers.models.modeling_outputs")
        return outputs.Transformer2DModelOutput(sample=(a, b))
    if structure == "transformers output":
        outputs = pytest.importorskip("transformers.modeling_outputs")
        return outputs.BaseModelOutput(last_hidden_state=a, hidden_states=(a, b))
    return STRUCTURES[structure](a, b)


def capture_dropping_everything(
    backend: str, x: torch.Tensor, structure: str
) -> tuple[BreakableCUDAGraph, torch.Tensor]:
    """A graph whose break outputs nothing but the graph itself can keep alive.

    The second break allocates and frees memory of the bridge's size, at capture and at replay,
    before the segment that reads the first bridge.
    """

    @eager_on_graph()
    def make(t: torch.Tensor) -> Any:
        return build(structure, t * 2, t * 3)

    @eager_on_graph()
    def churn(t: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            torch.full_like(t, 1e9)
        return t * 5

    def body() -> torch.Tensor:
        made = make(x + 1)
        tensors = [t + 0 for t in tree_tensors(made)]
        other = churn(x)
        again = [t + 0 for t in tree_tensors(made)]
        return sum(tensors[1:], tensors[0]) + sum(again[1:], again[0]) + other

    graph = BreakableCUDAGraph()
    with torch.no_grad(), BreakableCUDAGraphCapture(graph, backend=backend):
        output = body()
    return graph, output


def expected(x: torch.Tensor, structure: str) -> torch.Tensor:
    tensors = tree_tensors(build(structure, (x + 1) * 2, (x + 1) * 3))
    return sum(tensors[1:], tensors[0]) + sum(tensors[1:], tensors[0]) + x * 5


def check_replays(backend: str, device: torch.device, structure: str) -> None:
    x = torch.randn(4, 8, device=device)
    graph, output = capture_dropping_everything(backend, x, structure)
    for _ in range(3):
        gc.collect()
        x.copy_(torch.randn(4, 8, device=device))
        churned = [torch.full((4, 8), 1e9, device=device) for _ in range(64)]
        del churned
        output.fill_(7)
        graph.replay()
        assert torch.equal(output, expected(x, structure))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_eager_output_is_held_strongly_for_replay_bridge(
    bcg_backend: str, bcg_device: torch.device, structure: str
):
    check_replays(bcg_backend, bcg_device, structure)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_bridge_keeps_structure_type_and_plain_leaves(bcg_device: torch.device, structure: str):
    a, b = torch.randn(2, 3, device=bcg_device), torch.randn(3, device=bcg_device)
    output = build(structure, a, b)
    bridge = Bridge("make", output, [])
    bridged = bridge.take()
    assert type(bridged) is type(output)
    assert repr(map_tensors(lambda t: t.tolist(), bridged)) == repr(
        map_tensors(lambda t: t.tolist(), output)
    )
    held = {t.untyped_storage().data_ptr() for t in bridge.tensors()}
    assert {t.untyped_storage().data_ptr() for t in tree_tensors(bridged)} == held
    assert not held & {t.untyped_storage().data_ptr() for t in (a, b)}
    bridge.refill(build(structure, a + 1, b + 1))
    assert torch.equal(tree_tensors(bridged)[0], a + 1)


def test_copy_output_copies_leaf_by_leaf_with_strides(bcg_device: torch.device):
    a = torch.randn(4, 6, device=bcg_device)
    tensors = [a.t(), torch.randn(1, 3, device=bcg_device).expand(5, 3), a.t()[1:]]
    copies = {tuple(v.shape): v for span in _copy_output(tensors) for v in span.views}
    assert len(copies) == len(tensors)
    for tensor in tensors:
        copy = copies[tuple(tensor.shape)]
        assert copy.stride() == tensor.stride()
        assert torch.equal(copy, tensor)
        assert copy.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()


def test_break_output_in_an_unknown_container_is_refused(bcg_backend: str, bcg_device: Any):
    class Box:
        def __init__(self, inside: torch.Tensor) -> None:
            self.inside = inside

    @eager_on_graph()
    def boxed(t: torch.Tensor) -> Box:
        return Box(t * 2)

    x = torch.randn(4, device=bcg_device)
    with (
        pytest.raises(UnsupportedError, match=r"boxed .*Box that holds a tensor.*'inside'"),
        BreakableCUDAGraphCapture(BreakableCUDAGraph(), backend=bcg_backend),
    ):
        boxed(x)


def test_break_output_that_is_sparse_is_refused(bcg_backend: str, bcg_device: Any):
    @eager_on_graph()
    def sparse(t: torch.Tensor) -> torch.Tensor:
        return t.to_sparse()

    x = torch.eye(4, device=bcg_device)
    with (
        pytest.raises(UnsupportedError, match="sparse"),
        BreakableCUDAGraphCapture(BreakableCUDAGraph(), backend=bcg_backend),
    ):
        sparse(x)


def test_break_that_puts_a_tensor_into_its_arguments_is_refused(bcg_backend: str, bcg_device: Any):
    @eager_on_graph()
    def fill(parts: dict[str, torch.Tensor]) -> None:
        parts["b"] = parts["a"] * 3

    def body() -> torch.Tensor:
        parts = {"a": x * 2}
        fill(parts)
        return parts["b"] + 1

    x = torch.randn(4, device=bcg_device)
    with (
        pytest.raises(UnsupportedError, match=r"fill .*puts a new tensor into its arguments"),
        BreakableCUDAGraphCapture(BreakableCUDAGraph(), backend=bcg_backend),
    ):
        body()


def test_break_gets_fresh_containers_at_every_replay(bcg_backend: str, bcg_device: Any):
    lengths: list[int] = []

    @eager_on_graph()
    def appends(parts: list[torch.Tensor]) -> torch.Tensor:
        lengths.append(len(parts))
        parts.append(parts[0])
        return parts[0] * 2

    x = torch.randn(4, device=bcg_device)
    graph = BreakableCUDAGraph()
    with BreakableCUDAGraphCapture(graph, backend=bcg_backend):
        appends([x + 1])
    graph.replay()
    graph.replay()
    assert lengths == [1, 1, 1]


def test_enable_false_is_the_function_itself():
    def function() -> None: ...

    assert eager_on_graph(enable=False)(function) is function
    wrapped = eager_on_graph()(function)
    assert wrapped.__wrapped__ is function
    assert wrapped.__qualname__ == function.__qualname__
