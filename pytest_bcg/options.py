"""Command-line options and ini settings of the plugin, and how their values are read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

DEFAULT_REGISTRY = "suites/registry.yaml"

# A limit that pytest-timeout enforces inside the process gets this much longer outside of it.
_TIMEOUT_GRACE = 5.0
_START_TIMEOUT = 120.0
_EXIT_TIMEOUT = 30.0


def add(parser: pytest.Parser) -> None:
    group = parser.getgroup("bcg", "breakable CUDA graphs: suites and isolation")
    group.addoption(
        "--bcg-suite",
        action="append",
        default=[],
        dest="bcg_suites",
        metavar="NAME",
        help="run the tests of this suite of the registry (may be given several times)",
    )
    group.addoption(
        "--bcg-registry",
        dest="bcg_registry",
        metavar="PATH",
        help=f"the suites' registry (default: ini bcg_registry, else {DEFAULT_REGISTRY})",
    )
    group.addoption(
        "--bcg-isolate",
        choices=("marked", "none"),
        default="marked",
        dest="bcg_isolate",
        help="marked: tests marked standalone run in a fresh process for each file (default); "
        "none: everything runs in this process",
    )
    group.addoption(
        "--bcg-nightly",
        action="store_true",
        dest="bcg_nightly",
        help="run tests marked nightly too (as an -m expression that names nightly does)",
    )
    parser.addini("bcg_registry", "the suites' registry, relative to the root directory")
    parser.addini(
        "bcg_timeout_grace",
        f"seconds that a standalone process has beyond a test's time-out ({_TIMEOUT_GRACE:g})",
    )
    parser.addini(
        "bcg_start_timeout",
        "seconds that a standalone process has to start and to collect its file "
        f"({_START_TIMEOUT:g})",
    )
    parser.addini(
        "bcg_exit_timeout",
        f"seconds that a standalone process has to exit after its last test ({_EXIT_TIMEOUT:g})",
    )


def suites(config: pytest.Config) -> Sequence[str]:
    names: list[str] = config.getoption("bcg_suites")
    return names


def registry_path(config: pytest.Config) -> Path:
    """Where the registry lies: the option (from where pytest was started), the ini, the default."""
    given: str | None = config.getoption("bcg_registry")
    if given:
        return config.invocation_params.dir / given
    return config.rootpath / (str(config.getini("bcg_registry")) or DEFAULT_REGISTRY)


def isolation(config: pytest.Config) -> str:
    return str(config.getoption("bcg_isolate"))


def serves(config: pytest.Config) -> bool:
    """Whether this is a standalone process, whose parent selects the tests and refuses misuse."""
    return bool(getattr(config.option, "bcg_serves", False))


def nightly(config: pytest.Config) -> bool:
    """Whether nightly tests were asked for; an ``-m`` that names them decides for itself."""
    return bool(config.getoption("bcg_nightly")) or "nightly" in str(config.getoption("markexpr"))


def timeout_grace(config: pytest.Config) -> float:
    return _seconds(config, "bcg_timeout_grace", _TIMEOUT_GRACE)


def start_timeout(config: pytest.Config) -> float:
    return _seconds(config, "bcg_start_timeout", _START_TIMEOUT)


def exit_timeout(config: pytest.Config) -> float:
    return _seconds(config, "bcg_exit_timeout", _EXIT_TIMEOUT)


def check(config: pytest.Config) -> None:
    """Raise ``pytest.UsageError`` for a setting that cannot be read, before anything runs."""
    for read in (timeout_grace, start_timeout, exit_timeout):
        read(config)


def _seconds(config: pytest.Config, name: str, default: float) -> float:
    text = str(config.getini(name) or "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = -1.0
    if not value > 0:
        raise pytest.UsageError(f"ini option {name} is {text!r}: give a number of seconds above 0")
    return value
