"""Who watches captures and replays of this thread: the sanitizer, a profiler, nobody."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bcg_core.graph import Break, BreakableCUDAGraph
    from bcg_core.simulation.replay import Step


class Monitor:
    """Told of what the engine does in the thread that :func:`monitored` it. Hooks do nothing."""

    def captured(self, graph: BreakableCUDAGraph) -> None:
        """A capture has ended well."""

    def failed(self, error: BaseException) -> None:
        """A capture has ended with ``error``."""

    def replaying(self, graph: BreakableCUDAGraph) -> None:
        """A replay of a whole graph begins; not called for the replays inside a capture."""

    def ran(self, step: Step | Break) -> None:
        """A step of a simulated segment, or a break of a replay, has run."""


_thread = threading.local()


def current() -> Monitor | None:
    """The monitor of this thread."""
    return getattr(_thread, "monitor", None)


@contextmanager
def monitored(monitor: Monitor | None) -> Iterator[None]:
    """Tell ``monitor`` of what the engine does in this thread inside the block."""
    before = current()
    _thread.monitor = monitor
    try:
        yield
    finally:
        _thread.monitor = before
