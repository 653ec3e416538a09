"""Breaks placed on a module, and on functions that it calls, without editing either.

They are attributes exchanged for the length of a capture, for the thread that captures, and put
back exactly as they were.
"""

from __future__ import annotations

import difflib
import fnmatch
import importlib
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from bcg_core.breaks import breaking
from bcg_core.errors import UnsupportedError
from bcg_core.interception import callable_at, intercepted, original_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

_HINT = "; name a function as package.module:function or package.module:Class.method"


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


@contextmanager
def exchanged(changes: Sequence[tuple[Site, Callable[..., Any]]]) -> Iterator[None]:
    """Put each function in the place of its site for this thread, and take them off in reverse."""
    with ExitStack() as stack:
        for site, function in changes:
            for holder, attribute in site.holders:
                stack.enter_context(intercepted(holder, attribute, function))
        yield


def sites(module: torch.nn.Module | None, pattern: str) -> list[Site]:
    """What a pattern names; :class:`UnsupportedError` where that is nothing."""
    if ":" in pattern:
        return [_function_site(pattern)]
    if module is None:
        raise UnsupportedError(
            f"pattern {pattern!r} names submodules, and a plain function has none; use "
            "package.module:function"
        )
    # A shared submodule is found under each of its paths, and broken once.
    paths = {path: part for path, part in module.named_modules(remove_duplicate=False) if path}
    found = {
        id(part): (path, part)
        for path, part in reversed(paths.items())
        if type(part).__name__ == pattern or fnmatch.fnmatchcase(path, pattern)
    }
    if not found:
        names = [*paths, *{type(part).__name__ for part in paths.values()}]
        raise UnsupportedError(
            f"break pattern {pattern!r} matches no submodule of {type(module).__name__} by path "
            f"or class{_near(pattern, names)}"
        )
    return [submodule_site(path, part) for path, part in reversed(found.values())]


def submodule_site(path: str, submodule: torch.nn.Module) -> Site:
    """The ``forward`` of a submodule."""
    return Site(path, original_of(submodule.forward), ((submodule, "forward"),))


def _function_site(pattern: str) -> Site:
    module_name, _, path = pattern.partition(":")
    try:
        holder: Any = importlib.import_module(module_name)
    except (ImportError, ValueError) as error:
        raise UnsupportedError(
            f"break pattern {pattern!r}: module {module_name!r} cannot be imported ({error}){_HINT}"
        ) from error
    *classes, attribute = path.split(".")
    for name in classes:
        holder = _found(pattern, holder, name, getattr)
    if classes and not isinstance(holder, type):
        raise UnsupportedError(f"break pattern {pattern!r}: {classes[-1]} is no class{_HINT}")
    _, function = _found(pattern, holder, attribute, callable_at)
    if isinstance(function, type) or not callable(function):
        what = "a class" if isinstance(function, type) else f"a {type(function).__name__}"
        raise UnsupportedError(f"break pattern {pattern!r} names {what}, not a function{_HINT}")
    if isinstance(holder, type):
        return Site(pattern, function, ((holder, attribute),))
    aliases = _importers(attribute, function, module_name)
    return Site(pattern, function, ((holder, attribute), *aliases))


def _importers(name: str, function: Any, origin: str) -> Iterator[tuple[Any, str]]:
    """The other attributes of imported modules that hold the function.

    In the packages of others it is looked for under its own name alone, since there are tens of
    thousands of names. Torch's own modules are not touched: torch looks functions up by identity.
    """
    package = origin.partition(".")[0]
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("torch."):
            continue
        namespace = getattr(module, "__dict__", {})
        same_package = module_name.partition(".")[0] == package
        for alias in list(namespace) if same_package else [name]:
            at_origin = module_name == origin and alias == name
            if not at_origin and original_of(namespace.get(alias)) is function:
                yield module, alias


def _found(pattern: str, holder: Any, name: str, look_up: Callable[[Any, str], Any]) -> Any:
    try:
        return look_up(holder, name)
    except AttributeError:
        raise UnsupportedError(
            f"break pattern {pattern!r} matches nothing: {getattr(holder, '__name__', holder)} has "
            f"no {name!r}{_near(name, dir(holder))}"
        ) from None


def _near(name: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, names, n=3)
    return f"; did you mean {' or '.join(close)}?" if close else "; see named_modules() for paths"
