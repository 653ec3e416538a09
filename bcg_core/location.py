"""The line of the user's program that is running: the innermost frame outside torch and us."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
# Standard library frames between the user's line and torch, as of ``functools.wraps`` wrappers.
_GLUE = (os.path.dirname(os.path.abspath(os.__file__)) + os.sep + "contextlib.py",)
_internal: dict[str, bool] = {}
_MODULE_CALL = torch.nn.Module._call_impl.__code__
_thread = threading.local()


class Location(NamedTuple):
    """A place in source; the file need not exist (``<stdin>``, ``exec``).

    ``module`` is the path of the innermost submodule that was running, inside
    :func:`modules_named`; empty elsewhere, and in the root itself.
    """

    file: str
    line: int
    function: str
    module: str = ""

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
                _running_module(frame),
            )
        frame = frame.f_back
    return Location("<unknown>", 0, "<unknown>")


@contextmanager
def modules_named(*roots: torch.nn.Module | None) -> Iterator[None]:
    """Inside the block this thread's locations name the submodules of ``roots`` that run."""
    before = getattr(_thread, "names", None)
    _thread.names = {
        id(module): path
        for root in roots
        if root is not None
        for path, module in root.named_modules()
    }
    try:
        yield
    finally:
        _thread.names = before


def _running_module(frame: FrameType | None) -> str:
    names = getattr(_thread, "names", None)
    while names and frame is not None:
        if frame.f_code is _MODULE_CALL:
            path = names.get(id(frame.f_locals.get("self")))
            if path is not None:
                return str(path)
        frame = frame.f_back
    return ""


def error_location(error: BaseException) -> Location:
    """The innermost frame of the user's program in the traceback of ``error``."""
    found = Location("<unknown>", 0, "<unknown>")
    traceback = error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if not _is_internal(code.co_filename):
            name = getattr(code, "co_qualname", code.co_name)
            found = Location(code.co_filename, traceback.tb_lineno, name)
        traceback = traceback.tb_next
    return found


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
