"""One denoising step of a real-size Z-Image transformer: eager, a bare graph, and our runner.

    python benchmarks/step_time.py --size 256 512 --out benchmarks/results/step_time.json

Needs a CUDA device with about 20 GB free and no download: weights are random, in bf16. Rounds are
interleaved and each call is synchronised before and after; the raw times are written out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from bcg_core import GraphRunner
from bcg_core.perf import environment


def build() -> torch.nn.Module:
    from diffusers import ZImageTransformer2DModel

    with torch.device("meta"):
        module = ZImageTransformer2DModel()
    module = module.to(torch.bfloat16).to_empty(device="cuda").eval().requires_grad_(False)
    generator = torch.Generator("cuda").manual_seed(0)
    for parameter in module.parameters():
        parameter.normal_(std=0.02, generator=generator)
    return module


def inputs(size: int, seed: int) -> tuple[Any, ...]:
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    time_step = torch.rand(1, generator=generator, device="cuda").to(torch.bfloat16)
    return [normal(16, 1, size // 8, size // 8)], time_step, [normal(96, 2560)]


def bare_graph(module: torch.nn.Module, args: tuple[Any, ...]) -> Any:
    """``torch.cuda.graph`` over the same forward, without copies: the floor of a whole graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        module(*args, return_dict=False)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = module(*args, return_dict=False)
    return lambda: (graph.replay(), output)


def measure(module: torch.nn.Module, size: int, rounds: int) -> dict[str, Any]:
    args = inputs(size, 0)
    whole = GraphRunner(module, breaks="none")
    broken = GraphRunner(module, breaks="attention")
    ways = {
        "eager": lambda: module(*args, return_dict=False),
        "bare torch.cuda.graph": bare_graph(module, args),
        "GraphRunner, whole": lambda: whole(*args, return_dict=False),
        "GraphRunner, broken at attention": lambda: broken(*args, return_dict=False),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 2):
        for name, run in ways.items():
            torch.cuda.synchronize()
            started = time.perf_counter()
            run()
            torch.cuda.synchronize()
            if number >= 2:
                times[name].append((time.perf_counter() - started) * 1e3)
    exact = {}
    for name, runner in (("whole", whole), ("broken at attention", broken)):
        other = inputs(size, 1)
        expected = module(*other, return_dict=False)[0][0]
        exact[name] = torch.equal(runner(*other, return_dict=False)[0][0], expected)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "size": size,
        "median_ms": medians,
        "eager_over": {name: medians["eager"] / value for name, value in medians.items()},
        "bit_exact": exact,
        "breaks": broken.stats.breaks,
        "segments": broken.stats.segments,
        "pool_bytes": {"whole": whole.stats.pool_bytes, "broken": broken.stats.pool_bytes},
        "replays": {"whole": whole.stats.replays, "broken": broken.stats.replays},
        "raw_ms": times,
    }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a CUDA device is needed, and this process sees none")
    module = build()
    results = [measure(module, size, options.rounds) for size in options.size]
    for result in results:
        print(f"{result['size']}²: {result['segments']} segments, exact {result['bit_exact']}")
        for name, ms in result["median_ms"].items():
            print(f"  {name:34} {ms:8.2f} ms  {result['eager_over'][name]:5.2f} x eager")
    if options.out is not None:
        record = {"environment": environment(torch.device("cuda")), "results": results}
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
