"""What the simulation costs against eager, on the tiny Z-Image transformer, side by side."""

from __future__ import annotations

import statistics
import time
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers", reason="the denoiser is diffusers'")

from bcg_core import BreakableCUDAGraph, BreakableCUDAGraphCapture, GraphRunner
from bcg_core.simulation import outcomes
from suites.models.catalogue import entry

pytestmark = pytest.mark.bcg

ROUNDS = 15
LIMITS = {"replay": 1.2, "runner": 1.4, "cold capture": 25.0, "warm capture": 15.0}


def measure() -> dict[str, float]:
    """Medians over interleaved rounds, each as a ratio to eager."""
    model = entry("z_image")
    module = model.build()
    inputs = model.inputs(0)
    graph = BreakableCUDAGraph()
    with torch.no_grad(), BreakableCUDAGraphCapture(graph, backend="simulated"):
        module(**inputs)
    runner = GraphRunner(module, backend="simulated")

    def capture(cold: bool) -> None:
        if cold:
            outcomes.forget()
        with BreakableCUDAGraphCapture(BreakableCUDAGraph(), backend="simulated"):
            module(**inputs)

    work: dict[str, Any] = {
        "eager": lambda: module(**inputs),
        "replay": graph.replay,
        "runner": lambda: runner(**inputs),
        "cold capture": lambda: capture(cold=True),
        "warm capture": lambda: capture(cold=False),
    }
    times: dict[str, list[float]] = {name: [] for name in work}
    with torch.no_grad():
        for number in range(ROUNDS + 1):
            for name, run in work.items():
                started = time.perf_counter()
                run()
                if number:
                    times[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {name: medians[name] / medians["eager"] for name in LIMITS}


def test_cost_of_the_simulation_against_eager(record_property: Any):
    ratios = measure()
    for name, ratio in ratios.items():
        record_property(name, round(ratio, 2))
    print(", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items()))
    assert {name: ratio for name, ratio in ratios.items() if ratio > LIMITS[name]} == {}
