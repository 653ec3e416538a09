"""Test files that misbehave, written into a folder of their own and run by a pytest in there."""

from __future__ import annotations

import os
import time
from pathlib import Path
from textwrap import dedent, indent
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The options of the run around must not reach the runs inside."""
    for name in ("PYTEST_ADDOPTS", "PYTEST_TIMEOUT", "PYTEST_XDIST_WORKER", "GITHUB_ACTIONS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def neighbours(pytester: pytest.Pytester) -> Callable[..., Path]:
    """Write a standalone file with one test between two good ones; its body is given."""

    def write(body: str, *, decorators: str = "", before: str = "", name: str = "test_it") -> Path:
        text = (
            "import atexit, ctypes, os, signal, subprocess, sys, threading, time\n"
            "import pytest\n"
            "pytestmark = pytest.mark.standalone\n"
            f"{dedent(before)}\n"
            "def test_first(): print('first is fine')\n\n"
            f"{dedent(decorators)}\n"
            f"def test_guilty(request):\n{indent(dedent(body).strip(), '    ')}\n\n"
            "def test_last(): print('last is fine')\n"
        )
        return pytester.makepyfile(**{name: text})

    return write


@pytest.fixture
def processes_left() -> Callable[[str], list[int]]:
    """The processes whose command line contains a text, a moment later if there are some now."""

    def find(text: str) -> list[int]:
        left: list[int] = []
        for _ in range(20):
            left = [pid for pid in _running() if text.encode() in _command(pid)]
            if not left:
                break
            time.sleep(0.05)
        return left

    return find


def _running() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _command(pid: int) -> bytes:
    if pid == os.getpid():
        return b""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
    except OSError:
        return b""
