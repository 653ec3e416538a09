"""How long a standalone test may take: what pytest-timeout was told, seen from outside."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


@dataclass(frozen=True)
class Limit:
    """Seconds from a test's start, or from the start of its call alone; ``None`` for no limit."""

    seconds: float | None
    call_only: bool = False

    @classmethod
    def of(cls, item: pytest.Item) -> Limit:
        """The limit of pytest-timeout's marker, option, environment variable or ini setting."""
        config = item.config
        if not config.pluginmanager.hasplugin("timeout"):
            return cls(None)
        mark = item.get_closest_marker("timeout")
        given = dict(mark.kwargs) if mark else {}
        if mark:
            given.update(zip(("timeout", "method", "func_only"), mark.args))
        seconds = given.get("timeout")
        if seconds is None:
            seconds = config.getoption("timeout")
        if seconds is None:
            seconds = os.environ.get("PYTEST_TIMEOUT") or config.getini("timeout") or None
        call_only = given.get("func_only")
        if call_only is None:
            call_only = config.getini("timeout_func_only")
        try:
            value = 0.0 if seconds is None else float(seconds)
        except (TypeError, ValueError):
            # pytest-timeout refuses it too, inside, where the test's report says so.
            value = 0.0
        return cls(value if value > 0 else None, bool(call_only))
