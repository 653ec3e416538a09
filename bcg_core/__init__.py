"""Breakable CUDA graphs: captured segments, with eager breaks only where they must be."""

from bcg_core.breaks import break_graph, eager_on_graph
from bcg_core.graph import BreakableCUDAGraph, BreakableCUDAGraphCapture

__all__ = [
    "BreakableCUDAGraph",
    "BreakableCUDAGraphCapture",
    "break_graph",
    "eager_on_graph",
]
