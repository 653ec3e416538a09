"""Ending a standalone process together with everything that it started.

The child leads a session and a process group of its own. What left both (``setsid``) is found
by an environment variable that descendants inherit, where ``/proc`` shows environments.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

TOKEN_VARIABLE = "PYTEST_BCG_PROCESS"
_ROUNDS = 10


def signal_group(leader: int, number: int) -> None:
    """Send a signal to the child's whole group; an empty group is fine."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def kill_all(leader: int, token: str) -> None:
    """Kill the group of ``leader`` and every process that carries ``token``, until none is left."""
    signal_group(leader, signal.SIGKILL)
    for _ in range(_ROUNDS):
        left = _carriers(token)
        if not left:
            return
        for process in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)


def _carriers(token: str) -> list[int]:
    entry = f"{TOKEN_VARIABLE}={token}".encode()
    found = []
    with contextlib.suppress(OSError):
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                # A zombie's environment reads as empty, so what is dead already is not found.
                with contextlib.suppress(OSError):
                    if entry in (folder / "environ").read_bytes().split(b"\0"):
                        found.append(int(folder.name))
    return found
