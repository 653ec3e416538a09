"""What a standalone process prints: read as it comes, and only its last part is kept.

The child writes a mark into the stream at the end of each phase of a test, so that the output
can be laid to its phase although it travels apart from the reports.
"""

from __future__ import annotations

import os

KEPT_BYTES = 256 * 1024
_CHUNK = 65536


def mark(token: str, number: int) -> bytes:
    """The bytes that end a phase: ``token`` is the child's own, random, so no test prints it."""
    return f"\0bcg {token} {number}\0".encode("ascii")


class Output:
    """One stream of the child, read through a non-blocking descriptor, bounded in memory."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._kept = bytearray()
        self._dropped = 0
        self.open = True

    def fileno(self) -> int:
        return self._descriptor

    def read(self) -> bool:
        """Take in one piece of what is there; ``False`` when there is nothing (now, or ever)."""
        if not self.open:
            return False
        try:
            data = os.read(self._descriptor, _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self.open = False
            return False
        self._kept += data
        surplus = len(self._kept) - 2 * KEPT_BYTES
        if surplus > 0:
            # Trimmed rarely and by half, so that endless output costs little.
            self._drop(len(self._kept) - KEPT_BYTES)
        return True

    def until(self, end: bytes) -> str:
        """The text up to the mark ``end``, which the child has written before it said so."""
        while (found := self._kept.find(end)) < 0 and self.read():
            pass
        if found < 0:
            return self.rest()
        text = self._text(found)
        del self._kept[: found + len(end)]
        return text

    def rest(self) -> str:
        """Everything kept since the last mark. A child that still writes is not waited for."""
        for _ in range(8 * KEPT_BYTES // _CHUNK):
            if not self.read():
                break
        text = self._text(len(self._kept))
        self._kept.clear()
        return text

    def close(self) -> None:
        self.open = False
        os.close(self._descriptor)

    def _drop(self, count: int) -> None:
        del self._kept[:count]
        self._dropped += count

    def _text(self, end: int) -> str:
        start = max(0, end - KEPT_BYTES)
        left_out = self._dropped + start
        self._dropped = 0
        text = self._kept[start:end].decode("utf-8", errors="replace")
        return f"[the first {left_out} bytes were left out]\n{text}" if left_out else text
