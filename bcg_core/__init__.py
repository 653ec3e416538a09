"""Breakable CUDA graphs: captured segments, with eager breaks only where they must be."""

from bcg_core.breaks import break_graph, eager_on_graph
from bcg_core.graph import BreakableCUDAGraph, BreakableCUDAGraphCapture
from bcg_core.pipeline import Session, disable, enable
from bcg_core.runner import CaptureEvent, GraphRunner
from bcg_core.stats import Stats

__all__ = [
    "BreakableCUDAGraph",
    "BreakableCUDAGraphCapture",
    "CaptureEvent",
    "GraphRunner",
    "Session",
    "Stats",
    "break_graph",
    "disable",
    "eager_on_graph",
    "enable",
]
