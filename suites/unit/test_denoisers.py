"""Real denoisers of diffusers, broken at attention and whole: bit-exact with eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("diffusers", reason="the denoisers are diffusers'")

from bcg_core import GraphRunner
from bcg_core.tree import tree_tensors
from suites.models.catalogue import CATALOGUE, Entry

pytestmark = pytest.mark.bcg

# What each forward meets: dispatch_attention_fn, scaled_dot_product_attention outside of it, and
# processors that call neither; one more where a text mask makes Qwen-Image's helper a break.
BREAKS = {
    "z_image": 3,
    "qwen_image": 2,
    "qwen_image_masked": 3,
    "sd3": 4,
    "sd35": 5,
    "flux": 2,
    "flux_guided": 2,
    "sana": 4,
}
REPLAYS = 5


def overwrite_pool(runner: GraphRunner) -> None:
    """On CUDA the whole of the graph's pool; the simulation poisons what is freed by itself."""
    from bcg_core.backends.cuda import CUDAPool

    if isinstance(runner._pool, CUDAPool):
        assert runner._pool.fill(0xFF) == runner.stats.pool_bytes


def churn(device: torch.device) -> None:
    kept = [
        torch.full((n, 64), float("nan"), device=device)
        for n in (1, 16, 64, 512)
        for _ in range(16)
    ]
    del kept


@pytest.mark.parametrize("breaks", ["attention", "auto"])
@pytest.mark.parametrize("entry", CATALOGUE, ids=str)
def test_replays_are_bit_exact(
    bcg_backend: str,
    bcg_device: torch.device,
    entry: Entry,
    breaks: str,
    record_property: Any,
    monkeypatch: pytest.MonkeyPatch,
):
    module = entry.build(bcg_device)
    entered = []
    kind = type(module)
    original = kind.forward
    monkeypatch.setattr(kind, "forward", lambda *a, **k: entered.append(1) or original(*a, **k))
    runner = GraphRunner(module, breaks=breaks, backend=bcg_backend)
    inputs = entry.inputs(0, bcg_device)
    assert runner.capture(**inputs), runner.explain(**inputs)
    del inputs

    stats = runner.stats
    number = stats.breaks
    record_property("breaks", number)
    print(
        f"{entry.name}: {'whole' if number == 0 else f'{number} breaks'}, {stats.segments} segments"
    )
    if breaks == "attention":
        assert number == BREAKS[entry.name]
    else:
        assert number == (1 if entry.name == "qwen_image_masked" else 0)

    results = []
    for seed in range(1, REPLAYS + 1):
        inputs = entry.inputs(seed, bcg_device)
        expected = tree_tensors(module(**inputs))
        churn(bcg_device)
        overwrite_pool(runner)
        for captured in runner._graphs.values():
            captured.outputs.poison()
        entered.clear()
        result = tree_tensors(runner(**inputs))
        assert entered == [], "a replay must not enter forward"
        assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))
        results.append((result, expected))
        del inputs
    assert runner.stats.replays == REPLAYS
    for result, expected in results:
        assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))
    first, second = results[0][0][0], results[1][0][0]
    assert not torch.equal(first, second), "other inputs must give another result"


def test_break_at_attention_is_the_function_not_its_processor(bcg_backend: str, bcg_device: Any):
    from suites.models.catalogue import entry

    for name, expected in (("flux", "dispatch_attention_fn"), ("sd3", "scaled_dot_product")):
        runner = GraphRunner(entry(name).build(bcg_device), breaks="attention", backend=bcg_backend)
        runner.capture(**entry(name).inputs(0, bcg_device))
        assert all(expected in name for name in runner.break_names()), runner.break_names()
    sana = GraphRunner(entry("sana").build(bcg_device), breaks="attention", backend=bcg_backend)
    sana.capture(**entry("sana").inputs(0, bcg_device))
    names = sana.break_names()
    assert sum("Attention" in name and ".forward" in name for name in names) == 2, names
