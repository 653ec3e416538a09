"""Model families: adapters, what attention is, and tiny denoisers through replayed graphs."""

from __future__ import annotations

import gc
import importlib.util
import subprocess
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bcg_core import GraphRunner
from bcg_core.backends.cuda import CUDAPool
from bcg_core.backends.simulated import SimulatedPool
from bcg_core.errors import UnsupportedError
from bcg_core.models import adapter_for, generic, qwen_image, registered, z_image
from bcg_core.models.attention import observed
from bcg_core.placement import placed
from bcg_core.tree import flatten, unflatten
from suites.models.catalogue import CATALOGUE, Entry, entry

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_bcg.fixtures import AssertReplayEqualsEager, Capture

pytestmark = pytest.mark.bcg

needs_diffusers = pytest.mark.skipif(
    importlib.util.find_spec("diffusers") is None,
    reason="the models are those of diffusers",
)
each_model = pytest.mark.parametrize("model", CATALOGUE, ids=str)

# Of one forward: attention functions called, and processors that called none.
ATTENTION = {
    "z_image": {"dispatch_attention_fn": 3},
    "qwen_image": {"dispatch_attention_fn": 2},
    "qwen_image_masked": {"dispatch_attention_fn": 2},
    "sd3": {"scaled_dot_product_attention": 4},
    "sd35": {"scaled_dot_product_attention": 5},
    "flux": {"dispatch_attention_fn": 2},
    "flux_guided": {"dispatch_attention_fn": 2},
    "sana": {
        "scaled_dot_product_attention": 2,
        "transformer_blocks.0.attn1": 1,
        "transformer_blocks.1.attn1": 1,
    },
}
# Breaks of the adapter, besides attention.
OWN_BREAKS = {"qwen_image_masked": 1}


def attention_of(module: nn.Module | None, forward: Callable[[], Any]) -> dict[str, int]:
    with observed(module) as seen, torch.no_grad():
        forward()
    counts = {**seen.functions, **seen.silent}
    return {name.rpartition(":")[2]: count for name, count in counts.items()}


# Adapters


def test_image_generation_models_are_registered_as_bcg_supported():
    adapters = registered()
    assert sorted(adapters) == ["QwenImageTransformer2DModel", "ZImageTransformer2DModel"]
    assert adapters["ZImageTransformer2DModel"] is z_image.ADAPTER
    assert adapters["QwenImageTransformer2DModel"] is qwen_image.ADAPTER
    assert "ZImagePipeline" in z_image.ADAPTER.pipeline_classes
    assert "QwenImagePipeline" in qwen_image.ADAPTER.pipeline_classes
    with pytest.raises(TypeError):
        adapters["Other"] = generic.ADAPTER  # type: ignore[index]


@needs_diffusers
def test_registered_classes_exist_in_diffusers():
    import diffusers

    for adapter in registered().values():
        for name in (*adapter.module_classes, *adapter.pipeline_classes):
            assert isinstance(getattr(diffusers, name), type), name
        assert adapter.source, adapter.name


@needs_diffusers
def test_a_module_gets_the_adapter_of_its_class_or_of_its_base():
    class Derived(type(entry("qwen_image").build())):  # type: ignore[misc]
        pass

    assert adapter_for(entry("z_image").build()) is z_image.ADAPTER
    assert adapter_for(entry("qwen_image").build()) is qwen_image.ADAPTER
    assert adapter_for(Derived.__new__(Derived)) is qwen_image.ADAPTER
    assert adapter_for(entry("sd3").build()) is generic.ADAPTER
    assert adapter_for(nn.Linear(1, 1)) is adapter_for(None) is generic.ADAPTER


def test_a_class_of_the_same_name_from_elsewhere_gets_the_generic_adapter():
    elsewhere = type("ZImageTransformer2DModel", (nn.Module,), {})
    assert adapter_for(elsewhere()) is generic.ADAPTER


def test_importing_the_models_imports_no_diffusers():
    program = (
        "import sys, bcg_core, bcg_core.models, bcg_core.models.attention, torch\n"
        "from bcg_core.models.attention import observed\n"
        "with observed(torch.nn.Linear(1, 1)) as seen: pass\n"
        "print('diffusers' in sys.modules, 'transformers' in sys.modules, seen.patterns)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    assert result.stdout.split() == ["False", "False", "[]"]


@needs_diffusers
def test_a_caption_of_another_length_is_captured_ahead(bcg_backend: str, bcg_device: torch.device):
    model = entry("z_image")
    module = model.build(bcg_device)
    inputs = model.inputs(0, bcg_device)
    inputs["cap_feats"] = [inputs["cap_feats"][0]] * 2  # two images of one prompt
    args, kwargs = z_image.at_text_length((), inputs, 20)
    longer = {**model.inputs(1, bcg_device), "cap_feats": [torch.randn(20, 16).to(bcg_device)] * 2}
    runner = GraphRunner(module, backend=bcg_backend)
    with torch.no_grad():
        assert runner.capture(*args, **kwargs)
        expected = module(**longer)[0]
        result = runner(**longer)[0]
    assert runner.stats.replays == 1
    assert all(torch.equal(one, other) for one, other in zip(expected, result))
    assert [len(caption) for caption in inputs["cap_feats"]] == [11, 11]


def test_a_caption_is_found_by_place_and_in_nested_lists():
    x, t, caption = torch.ones(1), torch.ones(1), torch.ones(3, 4)
    args, kwargs = z_image.at_text_length((x, t, [[caption, None], [caption]]), {}, 7)
    (first, none), (second,) = args[2]
    assert first.shape == (7, 4)
    assert first is second
    assert none is None
    assert args[0] is x
    assert kwargs == {}


# The catalogue


@needs_diffusers
@each_model
def test_weights_depend_on_the_seed_alone(model: Entry):
    state = torch.get_rng_state()
    first, again, other = model.build(), model.build(), model.build(seed=1)
    model.inputs(0)
    assert torch.equal(torch.get_rng_state(), state)
    pairs = list(zip(first.parameters(), again.parameters(), other.parameters()))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert not any(torch.equal(a, c) for a, _, c in pairs)
    assert not any(p.requires_grad for p in first.parameters())
    assert not first.training


@needs_diffusers
@each_model
def test_every_floating_input_and_mask_changes_the_output(model: Entry):
    """Else a graph that ignores an input would pass for a right one."""
    module = model.build()
    leaves: list[Any] = []
    structure = flatten(model.inputs(0), leaves)
    others: list[Any] = []
    assert flatten(model.inputs(1), others) == structure

    def run(values: list[Any]) -> list[torch.Tensor]:
        inputs = unflatten(structure, iter(values), model.inputs(0))
        with torch.no_grad():
            return list(module(**inputs)[0])

    expected = run(leaves)
    changed = 0
    for index, (leaf, other) in enumerate(zip(leaves, others)):
        if not isinstance(leaf, torch.Tensor) or torch.equal(leaf, other):
            continue
        result = run([*leaves[:index], other, *leaves[index + 1 :]])
        assert not all(torch.equal(a, b) for a, b in zip(expected, result)), f"input {index}"
        changed += 1
    # Text positions of Flux are zero in all its pipelines.
    tensors = sum(isinstance(leaf, torch.Tensor) for leaf in leaves)
    assert changed == tensors - ("txt_ids" in model.inputs(0))


# Attention


@needs_diffusers
@each_model
def test_attention_is_found_by_watching_one_forward(model: Entry):
    module, inputs = model.build(), model.inputs(0)
    before = [dict(vars(part)) for part in module.modules()]
    counts = attention_of(module, lambda: module(**inputs))
    print(f"{model.name}: {counts}")
    assert counts == ATTENTION[model.name]
    assert [dict(vars(part)) for part in module.modules()] == before


class Written(nn.Module):
    """A layer with a processor, as attention layers of diffusers are."""

    def __init__(self, processor: Callable[..., Any]) -> None:
        super().__init__()
        self.processor = processor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.processor(self, x)


def linear_attention(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x @ (x.transpose(-1, -2) @ x)


def dot_product_attention(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(x, x, x)


class Processor(nn.Module):
    def forward(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return linear_attention(layer, x)


@pytest.mark.parametrize(
    "processor",
    [linear_attention, partial(linear_attention), Processor()],
    ids=["function", "partial", "module"],
)
def test_a_processor_that_calls_no_attention_function_is_a_site(
    processor: Callable[..., Any], bcg_capture: Capture, bcg_device: torch.device
):
    module = nn.Sequential(Written(processor), Written(dot_product_attention))
    x = torch.randn(1, 3, 4, device=bcg_device)
    with observed(module) as seen:
        expected = module(x)
    assert seen.silent == {"0": 1}
    assert seen.functions == {"torch.nn.functional:scaled_dot_product_attention": 1}
    with placed(module, seen.patterns):
        graph, result = bcg_capture(module, x)
    assert graph.breaks == 2
    assert torch.equal(result, expected)


def test_of_nested_processors_the_inner_one_is_the_site():
    inner = Written(linear_attention)
    outer = Written(lambda layer, x: inner(x))
    module = nn.ModuleDict({"inner": inner, "outer": outer})
    assert attention_of(module, lambda: outer(torch.ones(1, 3, 4))) == {"inner": 1}


def test_attention_of_another_thread_is_not_counted():
    x = torch.ones(1, 3, 4)
    module = Written(dot_product_attention)

    def forward() -> None:
        thread = threading.Thread(target=lambda: [module(x) for _ in range(3)])
        thread.start()
        thread.join(30)
        module(x)

    assert attention_of(module, forward) == {"scaled_dot_product_attention": 1}


def test_attention_of_torchs_own_layers_is_found():
    layer = nn.MultiheadAttention(4, 2).train()
    x = torch.randn(3, 1, 4)
    counts = attention_of(layer, lambda: layer(x, x, x, need_weights=False))
    assert counts == {"scaled_dot_product_attention": 1}


def test_without_attention_the_capture_is_whole(bcg_backend: str, bcg_device: torch.device):
    module = nn.Linear(4, 4).requires_grad_(False).to(bcg_device)
    runner = GraphRunner(module, "attention", backend=bcg_backend)
    assert runner.capture(torch.ones(2, 4, device=bcg_device))
    assert (runner.stats.segments, runner.stats.breaks) == (1, 0)


# Replays


def churn(device: torch.device) -> None:
    """Overwrite what memory there is to be had."""
    gc.collect()
    for size in (16, 256, 4096, 1 << 16):
        kept = [torch.full((size,), float("nan"), device=device) for _ in range(32)]
        del kept


def fill_pool(runner: GraphRunner, byte: int) -> None:
    """Overwrite the memory of the graphs, from which nothing may be read before it is written."""
    pool = runner._pool
    if isinstance(pool, CUDAPool):
        assert pool.fill(byte) == pool.bytes()
    else:
        assert isinstance(pool, SimulatedPool)
        for chunk in pool.arena._chunks:
            chunk.memory.fill_(byte)


@needs_diffusers
@pytest.mark.parametrize("breaks", ["auto", "attention"])
@each_model
def test_replays_of_changed_inputs_equal_eager(
    model: Entry,
    breaks: str,
    bcg_backend: str,
    bcg_device: torch.device,
    assert_replay_equals_eager: AssertReplayEqualsEager,
):
    """Five replays with poisoned outputs, without the forward; again over spoiled memory."""
    module = model.build(bcg_device)
    calls = [((), model.inputs(seed, bcg_device)) for seed in range(5)]
    runner = assert_replay_equals_eager(module, calls, breaks=breaks)
    stats = runner.stats
    assert stats.replays == 5
    assert (stats.fallbacks, stats.eager_calls, stats.captures) == (0, 0, 1)
    expected = OWN_BREAKS.get(model.name, 0)
    if breaks == "attention":
        expected += sum(ATTENTION[model.name].values())
    print(f"{model.name}, {breaks}: {stats.breaks or 'no'} breaks, {stats.segments} segments")
    assert stats.breaks == expected
    churn(bcg_device)
    assert_replay_equals_eager(runner, [((), model.inputs(6, bcg_device))])
    fill_pool(runner, 0xFF)
    assert_replay_equals_eager(runner, [((), model.inputs(7, bcg_device))])
    assert runner.stats.replays == 7


@needs_diffusers
def test_results_stay_as_they_are_while_the_graph_goes_on(
    bcg_backend: str, bcg_device: torch.device
):
    model = entry("flux")
    module = model.build(bcg_device)
    runner = GraphRunner(module, "attention", backend=bcg_backend)
    with torch.no_grad():
        results = [runner(**model.inputs(seed, bcg_device))[0] for seed in range(4)]
        expected = [module(**model.inputs(seed, bcg_device))[0] for seed in range(4)]
    assert runner.stats.replays == 3
    assert all(torch.equal(one, other) for one, other in zip(results, expected))


@needs_diffusers
@pytest.mark.parametrize(
    ("name", "function", "count"),
    [
        ("flux", "dispatch_attention_fn ", 2),
        ("sd3", "scaled_dot_product_attention ", 4),
        ("sana", "Attention.forward ", 2),
    ],
)
def test_breaks_at_attention_are_named_after_the_function_that_runs(
    name: str, function: str, count: int, bcg_backend: str, bcg_device: torch.device
):
    model = entry(name)
    runner = GraphRunner(model.build(bcg_device), "attention", backend=bcg_backend)
    with torch.no_grad():
        assert runner.capture(**model.inputs(0, bcg_device))
    names = runner.break_names()
    assert sum(function in one for one in names) == count, names


@needs_diffusers
def test_patterns_come_with_the_breaks_that_the_model_needs(
    bcg_backend: str, bcg_device: torch.device
):
    model = entry("qwen_image_masked")
    module, inputs = model.build(bcg_device), model.inputs(0, bcg_device)
    runner = GraphRunner(module, ["QwenImageTransformerBlock"], backend=bcg_backend)
    with torch.no_grad():
        assert runner.capture(**inputs)
    assert runner.stats.breaks == 1 + 2
    unbroken = GraphRunner(module, "none", backend=bcg_backend)
    with torch.no_grad():
        assert not unbroken.capture(**inputs)
        assert "transformer_qwenimage.py" in unbroken.explain(**inputs)


def test_an_unknown_way_to_break_is_refused_with_the_ways_there_are():
    with pytest.raises(UnsupportedError, match="'attn' is none of auto, attention, none"):
        GraphRunner(nn.Linear(1, 1), "attn")
