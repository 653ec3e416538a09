"""Standing in for an attribute in one thread, while all others meet what was there before."""

from __future__ import annotations

import functools
import inspect
import threading
from contextlib import contextmanager
from types import FunctionType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_ABSENT = object()
_lock = threading.Lock()
# By the identity of the holder, which the switch keeps alive.
_switches: dict[tuple[int, str], _Switch] = {}


class _Switch:
    """What stands at an attribute, once, however many threads intercept it at a time.

    Threads that each exchanged and restored the attribute would put back each other's function;
    one lock around their captures would deadlock with the locks that a capture takes.
    """

    def __init__(self, holder: Any, attribute: str) -> None:
        self.holder = holder
        self.attribute = attribute
        self.users = 0
        self.by_thread: dict[int, Callable[..., Any]] = {}
        self._before = vars(holder).get(attribute, _ABSENT)
        kind, original = callable_at(holder, attribute)
        switch = _switching(original, self.by_thread)
        self._put_there = switch if kind is None else kind(switch)
        self._put(self._put_there)

    def _put(self, value: Any) -> None:
        # On an instance, not by setattr: a class's own may do more than set.
        if isinstance(self.holder, type):
            setattr(self.holder, self.attribute, value)
        else:
            vars(self.holder)[self.attribute] = value

    def restore(self) -> None:
        if vars(self.holder).get(self.attribute) is not self._put_there:
            return  # somebody has put their own function there since; below it we are a plain call
        if self._before is not _ABSENT:
            self._put(self._before)
        elif isinstance(self.holder, type):
            delattr(self.holder, self.attribute)
        else:
            del vars(self.holder)[self.attribute]


def _switching(
    original: Callable[..., Any], by_thread: dict[int, Callable[..., Any]]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def switch(*args: Any, **kwargs: Any) -> Any:
        return by_thread.get(threading.get_ident(), original)(*args, **kwargs)

    switch._bcg_original = original  # type: ignore[attr-defined]
    return switch


def callable_at(holder: Any, attribute: str) -> tuple[Any, Callable[..., Any]]:
    """``staticmethod``, ``classmethod`` or ``None``, and the function, whatever stands in for it.

    A method of a class is the plain function; raises ``AttributeError`` where there is nothing.
    """
    if not isinstance(holder, type):
        return None, original_of(getattr(holder, attribute))
    found = inspect.getattr_static(holder, attribute)
    if isinstance(found, (staticmethod, classmethod)):
        return type(found), original_of(found.__func__)
    return None, original_of(found)


def original_of(value: Any) -> Any:
    """What ``value`` stands in for, or ``value`` itself."""
    return getattr(value, "_bcg_original", value) if type(value) is FunctionType else value


@contextmanager
def intercepted(holder: Any, attribute: str, function: Callable[..., Any]) -> Iterator[None]:
    """This thread's calls of ``holder.attribute`` go to ``function`` inside the block.

    ``holder`` is a Python module, an instance (its class is left alone) or a class. Afterwards
    the attribute is what it was, or gone where the holder had none of its own. Blocks nest, the
    innermost function answers. ``function`` calls the original by itself, as ``callable_at``
    gives it: through the attribute it would meet itself.
    """
    key = (id(holder), attribute)
    with _lock:
        switch = _switches.get(key)
        if switch is None:
            switch = _switches[key] = _Switch(holder, attribute)
        switch.users += 1
    thread = threading.get_ident()
    before = switch.by_thread.get(thread)
    switch.by_thread[thread] = function
    try:
        yield
    finally:
        if before is None:
            del switch.by_thread[thread]
        else:
            switch.by_thread[thread] = before
        with _lock:
            switch.users -= 1
            if not switch.users:
                del _switches[key]
                switch.restore()
