"""The tests of the suites that were asked for, instead of or out of those on the command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from pytest_bcg import options

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class _Selection:
    files: frozenset[Path]
    standalone: frozenset[Path]


_KEY = pytest.StashKey[_Selection]()


def configure(config: pytest.Config) -> None:
    """Read the suites asked for; ``pytest.UsageError`` for an unknown one or a faulty registry.

    Without paths on the command line their files are what is collected; with paths, the tests
    beneath them that belong to a suite.
    """
    names = options.suites(config)
    if not names:
        return
    from pytest_bcg import registry  # with YAML, which a run without suites need not import

    try:
        suites = registry.load(options.registry_path(config), config.rootpath)
        files = {name: suites.files(suites.suite(name)) for name in names}
    except registry.RegistryError as error:
        raise pytest.UsageError(f"--bcg-suite: {error}") from None
    config.stash[_KEY] = _Selection(
        frozenset(file for found in files.values() for file in found),
        frozenset(f for name in names if suites.suite(name).standalone for f in files[name]),
    )
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args = list(dict.fromkeys(str(f) for found in files.values() for f in found))


def apply(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of no suite asked for; mark those of a standalone suite so."""
    selection = config.stash.get(_KEY, None)
    if selection is None:
        return
    left_out = [item for item in items if item.path not in selection.files]
    if left_out:
        items[:] = [item for item in items if item.path in selection.files]
        config.hook.pytest_deselected(items=left_out)
    for item in items:
        if item.path in selection.standalone and not item.get_closest_marker("standalone"):
            item.add_marker(pytest.mark.standalone)
