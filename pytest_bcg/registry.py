"""Suites by name, read from YAML; whatever is wrong in it is reported with file and line."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

DEFAULT_RUNNER = "ubuntu-latest"


class RegistryError(Exception):
    """The registry cannot be used; the message names file, line, and what is known there."""


@dataclass(frozen=True)
class Suite:
    """Test files that run together: where, for how long, and whether in processes of their own."""

    name: str
    patterns: tuple[str, ...]
    runner: str = DEFAULT_RUNNER
    est_time: float | None = None
    standalone: bool = False


@dataclass(frozen=True)
class Registry:
    """The suites of one file. Their patterns are relative to ``root``."""

    path: Path
    root: Path
    suites: Mapping[str, Suite]

    @cached_property
    def names(self) -> str:
        return ", ".join(self.suites) or "none"

    def suite(self, name: str) -> Suite:
        try:
            return self.suites[name]
        except KeyError:
            guess = get_close_matches(name, self.suites, n=1)
            hint = f" Did you mean {guess[0]}?" if guess else ""
            raise RegistryError(
                f"no suite {name!r} in {self.path}.{hint} Suites: {self.names}"
            ) from None

    def files(self, suite: Suite) -> list[Path]:
        """The suite's test files, in the order of its patterns; a pattern without any is an error.

        A pattern that names a folder stands for the ``test_*.py`` files beneath it.
        """
        found: dict[Path, None] = {}
        for pattern in suite.patterns:
            try:
                globbed = sorted(self.root.glob(pattern))
            except (ValueError, IndexError):
                # Before Python 3.13: '**' beside other text, and '.'.
                raise RegistryError(
                    f"{self.path}: suite {suite.name}: {pattern!r} is no glob: give a file, a "
                    "folder beneath the root, or a glob such as tests/**/test_*.py"
                ) from None
            matches = [
                file
                for match in globbed
                for file in (sorted(match.rglob("test_*.py")) if match.is_dir() else [match])
            ]
            if not matches:
                raise RegistryError(
                    f"{self.path}: suite {suite.name}: no test file matches {pattern!r} "
                    f"beneath {self.root}"
                )
            found.update(dict.fromkeys(matches))
        return list(found)


def load(path: Path, root: Path) -> Registry:
    """Read the registry at ``path``; raise :class:`RegistryError` for anything but a valid one."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RegistryError(f"cannot read the registry of suites {path}: {reason}") from None
    try:
        document = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise RegistryError(f"{path}:{line}: not valid YAML: {error.problem}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise RegistryError(f"{path}: not valid YAML: {error}") from None
    return Registry(path, root, _Reader(path).suites(document))


class _Reader:
    """Turns YAML nodes, which know their lines, into suites."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def suites(self, document: yaml.Node | None) -> dict[str, Suite]:
        if document is None:
            raise RegistryError(
                f"{self._path}:1: the registry is empty; it needs a mapping 'suites'"
            )
        top = self._mapping(document, "the registry", ("suites",))
        if "suites" not in top:
            raise self._error(document, "the key 'suites' is missing; known keys: suites")
        entries = self._mapping(top["suites"], "'suites'", None)
        return {name: self._suite(name, node) for name, node in entries.items()}

    def _suite(self, name: str, node: yaml.Node) -> Suite:
        what = f"suite {name}"
        keys = self._mapping(node, what, ("files", "runner", "est_time", "standalone"))
        if "files" not in keys:
            raise self._error(node, f"{what}: 'files' is missing: give a list of files or globs")
        return Suite(
            name,
            self._files(keys["files"], what),
            runner=self._text(keys["runner"], f"{what}: runner")
            if "runner" in keys
            else DEFAULT_RUNNER,
            est_time=self._seconds(keys["est_time"], what) if "est_time" in keys else None,
            standalone=self._flag(keys["standalone"], what) if "standalone" in keys else False,
        )

    def _mapping(
        self, node: yaml.Node, what: str, known: Iterable[str] | None
    ) -> dict[str, yaml.Node]:
        if not isinstance(node, yaml.MappingNode):
            raise self._error(node, f"{what} must be a mapping")
        entries: dict[str, yaml.Node] = {}
        for key_node, value in node.value:
            key = self._text(key_node, f"a name in {what}")
            if key in entries:
                raise self._error(key_node, f"{what}: {key!r} appears twice")
            if known is not None and key not in known:
                raise self._error(
                    key_node, f"{what}: unknown key {key!r}; known keys: {', '.join(known)}"
                )
            entries[key] = value
        return entries

    def _files(self, node: yaml.Node, what: str) -> tuple[str, ...]:
        if not isinstance(node, yaml.SequenceNode) or not node.value:
            raise self._error(node, f"{what}: files must be a list of at least one file or glob")
        patterns = []
        for entry in node.value:
            pattern = self._text(entry, f"{what}: an entry of files")
            if pattern.startswith("/") or ".." in pattern.split("/"):
                raise self._error(
                    entry, f"{what}: {pattern!r} must be relative to the root, without '..'"
                )
            patterns.append(pattern)
        return tuple(patterns)

    def _text(self, node: yaml.Node, what: str) -> str:
        value = self._scalar(node)
        if not isinstance(value, str) or not value.strip():
            raise self._error(node, f"{what} must be text")
        return value

    def _seconds(self, node: yaml.Node, what: str) -> float:
        value = self._scalar(node)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < inf:
            raise self._error(node, f"{what}: est_time must be a number of seconds above 0")
        return value

    def _flag(self, node: yaml.Node, what: str) -> bool:
        value = self._scalar(node)
        if not isinstance(value, bool):
            raise self._error(node, f"{what}: standalone must be true or false")
        return value

    def _scalar(self, node: yaml.Node) -> object:
        if not isinstance(node, yaml.ScalarNode):
            return None
        try:
            value: object = yaml.safe_load(yaml.serialize(node))
        except (yaml.YAMLError, ValueError):
            raise self._error(node, f"{node.value!r} cannot be read") from None
        return value

    def _error(self, node: yaml.Node, message: str) -> RegistryError:
        return RegistryError(f"{self._path}:{node.start_mark.line + 1}: {message}")
