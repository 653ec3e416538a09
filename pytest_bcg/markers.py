"""The markers: what they take, what is refused, and which tests they put aside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from pytest_bcg import gpus, options

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True)
class Argument:
    """One argument of a marker: what it takes, in words, and the test for it."""

    takes: str
    accepts: Callable[[Any], bool]
    required: bool = False


@dataclass(frozen=True)
class Marker:
    """A marker's arguments, by name and in the order in which they may be given by position."""

    signature: str
    meaning: str
    arguments: Mapping[str, Argument]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


MARKERS: Mapping[str, Marker] = {
    "bcg": Marker("bcg", "the test captures or replays breakable CUDA graphs", {}),
    "standalone": Marker(
        "standalone", "the tests of this file run in a fresh process of their own", {}
    ),
    "nightly": Marker("nightly", "runs only with --bcg-nightly or an -m that names nightly", {}),
    "gpu": Marker(
        "gpu(count=1, memory=None)",
        "needs this many GPUs, each with this much memory ('20GiB'); skipped where they are not",
        {
            "count": Argument(
                "a whole number from 1",
                lambda value: _is_number(value) and isinstance(value, int) and value >= 1,
            ),
            "memory": Argument("a size such as '20GiB'", gpus.is_size),
        },
    ),
    "est_time": Marker(
        "est_time(seconds)",
        "how long the test is expected to take",
        {
            "seconds": Argument(
                "a number of seconds above 0",
                lambda value: _is_number(value) and value > 0,
                required=True,
            )
        },
    ),
}


def register(config: pytest.Config) -> None:
    for marker in MARKERS.values():
        config.addinivalue_line("markers", f"{marker.signature}: {marker.meaning}")


def check(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Raise ``pytest.UsageError`` that lists every misused marker with its test, file and line.

    A worker of xdist must not end so; it reports them as failures to collect. A standalone process
    has no tests then, and its parent raises.
    """
    problems = []
    for item in items:
        for mark in item.iter_markers():
            if mark.name in MARKERS and (problem := _misuse(mark)):
                path, line, _ = item.location
                where = f"{path}:{(line or 0) + 1}: {item.nodeid}"
                problems.append(f"{where}: marker {mark.name} {problem}")
    if problems and hasattr(config, "workerinput"):
        text = "\n".join(dict.fromkeys(problems))
        report = pytest.CollectReport(items[0].session.nodeid, "failed", text, [])
        config.hook.pytest_collectreport(report=report)
    elif problems and options.serves(config):
        items.clear()
    elif problems:
        raise pytest.UsageError(*dict.fromkeys(problems))


def _misuse(mark: pytest.Mark) -> str | None:
    marker = MARKERS[mark.name]
    known = marker.arguments
    listed = ", ".join(f"{name} ({argument.takes})" for name, argument in known.items())
    expected = f"it takes {listed}" if known else "it takes no arguments"
    if len(mark.args) > len(known):
        return f"got {len(mark.args)} arguments by position; {expected}"
    # The marker has no more positions than names; the rest of the names is not zipped.
    given: dict[str, object] = dict(zip(known, mark.args))
    for name, value in mark.kwargs.items():
        if name not in known:
            return f"got an unknown argument {name!r}; {expected}"
        if name in given:
            return f"got {name!r} twice; {expected}"
        given[name] = value
    for name, argument in known.items():
        if name not in given:
            if argument.required:
                return f"needs {name!r}; {expected}"
        elif not argument.accepts(given[name]) and not (
            given[name] is None and not argument.required
        ):
            return f"got {name}={given[name]!r}; {expected}"
    return None


def deselect_nightly(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out nightly tests unless they were asked for."""
    if options.nightly(config):
        return
    left_out = [item for item in items if item.get_closest_marker("nightly")]
    if left_out:
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=left_out)
