"""Breakable CUDA graphs: captured segments, with eager breaks only where they must be."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_HOMES = {
    "BreakableCUDAGraph": "graph",
    "BreakableCUDAGraphCapture": "graph",
    "CaptureEvent": "runner",
    "GraphRunner": "runner",
    "Session": "pipeline",
    "Stats": "stats",
    "break_graph": "breaks",
    "disable": "pipeline",
    "eager_on_graph": "breaks",
    "enable": "pipeline",
}


def __getattr__(name: str) -> Any:
    # Importing torch takes seconds, and the command line refuses a mistake before that.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
