"""The line of the user's program that is running: the innermost frame outside torch and us."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from types import FrameType

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
# Standard library frames between the user's line and torch, as of ``functools.wraps`` wrappers.
_GLUE = (os.path.dirname(os.path.abspath(os.__file__)) + os.sep + "contextlib.py",)
_internal: dict[str, bool] = {}


class Location(NamedTuple):
    """A place in source; the file need not exist (``<stdin>``, ``exec``)."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


def _is_internal(file: str) -> bool:
    known = _internal.get(file)
    if known is None:
        known = _internal[file] = file.startswith((_OURS, _TORCH)) or file in _GLUE
    return known


def user_location() -> Location:
    """The innermost frame of this thread that is neither torch's nor ``bcg_core``'s."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not _is_internal(frame.f_code.co_filename):
            return Location(
                frame.f_code.co_filename,
                frame.f_lineno,
                getattr(frame.f_code, "co_qualname", frame.f_code.co_name),
            )
        frame = frame.f_back
    return Location("<unknown>", 0, "<unknown>")


def location_of(function: Any) -> Location:
    """Where a function is defined; for a callable object, where its class's ``__call__`` is."""
    name = name_of(function)
    function = getattr(function, "__wrapped__", function)
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None:
        code = getattr(type(function).__call__, "__code__", None)
    if code is None:
        return Location("<built-in>", 0, name)
    return Location(code.co_filename, code.co_firstlineno, name)


def name_of(function: Any) -> str:
    """The qualified name of a function, unwrapped; of a callable object, its class's."""
    function = getattr(function, "__wrapped__", function)
    return getattr(function, "__qualname__", None) or type(function).__qualname__
