"""The lock of a pool: threads take turns, a thread that comes back to it is told."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from bcg_core.errors import NestedReplayError

if TYPE_CHECKING:
    from collections.abc import Iterator


class PoolLock:
    """One user of a pool at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None

    def held_here(self) -> bool:
        """Whether this thread holds the lock."""
        return self._owner == threading.get_ident()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the lock; :class:`NestedReplayError` if this thread holds it already."""
        if self.held_here():
            raise NestedReplayError(
                "nested replay: this thread is already capturing or replaying on the same pool, "
                "and a second replay would overwrite memory that the first still reads; give the "
                "inner graph a pool of its own, or call it outside"
            )
        with self._lock:
            self._owner = threading.get_ident()
            try:
                yield
            finally:
                self._owner = None
