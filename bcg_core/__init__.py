"""Breakable CUDA graphs: captured segments, with eager breaks only where they must be."""

from bcg_core.breaks import break_graph, eager_on_graph
from bcg_core.graph import BreakableCUDAGraph, BreakableCUDAGraphCapture
from bcg_core.runner import GraphRunner

__all__ = [
    "BreakableCUDAGraph",
    "BreakableCUDAGraphCapture",
    "GraphRunner",
    "break_graph",
    "eager_on_graph",
]
