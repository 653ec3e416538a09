"""A hint for xdist: the tests of a standalone file stay on one worker, so it starts one process.

Correctness does not hang on it: spread over workers, each has a process of its own for the file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_bcg import options
from pytest_bcg.isolation.declared import declares_standalone

if TYPE_CHECKING:
    import pytest


def scheduler(config: pytest.Config, log: Any) -> Any:
    """A scheduler for ``--dist load``, xdist's default; ``None`` leaves any other to xdist."""
    if config.getoption("dist") != "load" or options.isolation(config) == "none":
        return None
    return StandaloneLoadScheduling(config, log)


class StandaloneLoadScheduling:
    """xdist's own ``load`` scheduling, unless a collected file turns out to be standalone.

    Which tests there are is known only when the workers have collected, long after xdist asked
    for a scheduler; so the choice is made as the first test is scheduled.
    """

    def __init__(self, config: pytest.Config, log: Any) -> None:
        from xdist.scheduler import LoadScheduling  # type: ignore[import-untyped, unused-ignore]

        self._config = config
        self._log = log
        self._chosen: Any = LoadScheduling(config, log)
        self._open = True
        self._collections: dict[Any, list[str]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._chosen, name)

    def add_node_collection(self, node: Any, collection: list[str]) -> None:
        if self._open:
            self._collections[node] = list(collection)
        self._chosen.add_node_collection(node, collection)

    def schedule(self) -> None:
        if self._open and self._chosen.collection_is_completed:
            self._open = False
            self._choose()
        self._chosen.schedule()

    def _choose(self) -> None:
        root = self._config.rootpath
        files = {test.partition("::")[0] for tests in self._collections.values() for test in tests}
        standalone = {file for file in files if declares_standalone(root / file)}
        if not standalone:
            return
        chosen = _by_file(standalone, self._config, self._log)
        for node in self._chosen.nodes:
            chosen.add_node(node)
            chosen.add_node_collection(node, self._collections[node])
        self._chosen = chosen


def _by_file(standalone: set[str], config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped, unused-ignore]

    class StandaloneFiles(LoadScopeScheduling):  # type: ignore[misc, unused-ignore]
        """Work units: a standalone file as a whole, every other test by itself."""

        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if file in standalone else nodeid

    return StandaloneFiles(config, log)
