"""Breaks placed on a module, and on functions that it calls, without editing either.

They are attributes exchanged for the length of a capture and put back exactly as they were.
Outside a capture a placed break is a plain call, so that other threads notice nothing.
"""

from __future__ import annotations

import difflib
import fnmatch
import importlib
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from bcg_core.breaks import breaking
from bcg_core.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch


@dataclass(frozen=True)
class PlacedBreak:
    """Where a break goes.

    ``pattern`` is a glob on the module path (``layers.*.attention``), the class name of
    submodules, or ``package.module:function`` (``package.module:Class.method``).
    ``replacement`` and ``when`` are as in :func:`bcg_core.breaks.breaking`.
    """

    pattern: str
    replacement: Callable[..., Any] | None = None
    when: Callable[..., bool] | None = None


class Site(NamedTuple):
    """Something callable, and every attribute by which it is called."""

    name: str
    function: Callable[..., Any]
    holders: tuple[tuple[Any, str], ...]


@contextmanager
def placed(
    module: torch.nn.Module | None, breaks: Sequence[PlacedBreak | str]
) -> Iterator[list[str]]:
    """Place breaks for the length of the body; yields the names of the places.

    Raises :class:`UnsupportedError` for a pattern that matches nothing.
    """
    wrapped = []
    for one in breaks:
        spec = PlacedBreak(one) if isinstance(one, str) else one
        for site in sites(module, spec.pattern):
            wrapped.append((site, breaking(site.function, spec.replacement, spec.when)))
    with exchanged(wrapped):
        yield [site.name for site, _ in wrapped]


# Two threads that exchanged and restored the same attribute in turn would put each other's
# function back: one at a time.
_exchanging = threading.RLock()


@contextmanager
def exchanged(changes: Sequence[tuple[Site, Callable[..., Any]]]) -> Iterator[None]:
    """Put each function in the place of its site, and the originals back, in reverse order."""
    undo: list[tuple[Any, str, bool, Any]] = []
    with _exchanging:
        try:
            for site, function in changes:
                for holder, attribute in site.holders:
                    own = vars(holder)
                    undo.append((holder, attribute, attribute in own, own.get(attribute)))
                    is_static = isinstance(own.get(attribute), staticmethod)
                    setattr(holder, attribute, staticmethod(function) if is_static else function)
            yield
        finally:
            for holder, attribute, had_own, before in reversed(undo):
                if had_own:
                    setattr(holder, attribute, before)
                else:
                    delattr(holder, attribute)


def sites(module: torch.nn.Module | None, pattern: str) -> list[Site]:
    """What a pattern names; :class:`UnsupportedError` where that is nothing."""
    if ":" in pattern:
        return [_function_site(pattern)]
    if module is None:
        raise UnsupportedError(
            f"pattern {pattern!r} names submodules, and a plain function has none; use "
            "package.module:function"
        )
    paths = {path: submodule for path, submodule in module.named_modules() if path}
    found = [
        path
        for path, submodule in paths.items()
        if type(submodule).__name__ == pattern or fnmatch.fnmatchcase(path, pattern)
    ]
    if not found:
        names = [*paths, *{type(submodule).__name__ for submodule in paths.values()}]
        raise UnsupportedError(
            f"break pattern {pattern!r} matches no submodule of {type(module).__name__} by path "
            f"or class{_near(pattern, names)}"
        )
    return [submodule_site(path, paths[path]) for path in found]


def submodule_site(path: str, submodule: torch.nn.Module) -> Site:
    """The ``forward`` of a submodule."""
    return Site(path, submodule.forward, ((submodule, "forward"),))


def _function_site(pattern: str) -> Site:
    module_name, _, path = pattern.partition(":")
    try:
        holder: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise UnsupportedError(
            f"break pattern {pattern!r}: {module_name} cannot be imported ({error})"
        ) from error
    *classes, attribute = path.split(".")
    for name in classes:
        holder = _attribute(holder, name, pattern)
    function = _attribute(holder, attribute, pattern)
    if not callable(function):
        raise UnsupportedError(f"break pattern {pattern!r} names something that is not callable")
    holders = [(holder, attribute)]
    if not classes:
        holders += importers(attribute, function, module_name)
    return Site(pattern, function, tuple(holders))


def importers(name: str, function: Any, origin: str) -> list[tuple[Any, str]]:
    """The modules besides ``origin`` that hold the function under its name; torch's own are not
    touched, since torch looks functions up by identity."""
    return [
        (module, name)
        for module_name, module in list(sys.modules.items())
        if module_name != origin
        and not module_name.startswith("torch.")
        and getattr(module, "__dict__", {}).get(name) is function
    ]


def _attribute(holder: Any, name: str, pattern: str) -> Any:
    try:
        return getattr(holder, name)
    except AttributeError:
        raise UnsupportedError(
            f"break pattern {pattern!r}: {getattr(holder, '__name__', holder)} has no "
            f"{name!r}{_near(name, dir(holder))}"
        ) from None


def _near(name: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, names, n=3)
    return f"; did you mean {' or '.join(close)}?" if close else "; see named_modules() for paths"
