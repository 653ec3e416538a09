"""What a runner has done, in numbers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True)
class Stats:
    """Every call is one of three: a replay, a call that captured, an eager call."""

    calls: int = 0
    """Calls so far: ``replays`` + ``eager_calls`` + those that captured."""
    captures: int = 0
    """Graphs captured, those of ``capture()`` and those captured ahead included."""
    replays: int = 0
    """Calls answered by a graph that was there already."""
    misses: dict[str, int] = field(default_factory=dict)
    """Calls for which no valid graph was there, by reason."""
    fallbacks: int = 0
    """Captures that failed; the calls behind them ran eagerly."""
    eager_calls: int = 0
    """Calls that ran eagerly, for whatever reason."""
    evictions: int = 0
    """Graphs given up for newer ones, by ``max_graphs`` or ``max_pool_bytes``."""
    graphs: int = 0
    """Graphs held now."""
    segments: int = 0
    """Segments of the graphs held now."""
    breaks: int = 0
    """Breaks of the graphs held now."""
    pool_bytes: int = 0
    """Bytes reserved by the graphs' pool now."""


def total(stats: Iterable[Stats]) -> Stats:
    """The sum of several runners' statistics."""
    sums: dict[str, int] = {}
    misses: dict[str, int] = {}
    for one in stats:
        for entry in dataclasses.fields(one):
            if entry.name != "misses":
                sums[entry.name] = sums.get(entry.name, 0) + getattr(one, entry.name)
        for reason, count in one.misses.items():
            misses[reason] = misses.get(reason, 0) + count
    return Stats(misses=misses, **sums)
