"""An adapter: what is known of a model family that a capture cannot find out by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from bcg_core.placement import PlacedBreak

    Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Adapter:
    """Data about one model family.

    ``breaks`` are placed in every capture. ``at_text_length(args, kwargs, length)`` makes of a
    call the like call of another caption length, to capture ahead; its values do not matter and
    no call is ever changed by it. ``source`` says what public fact or measured run it rests on.
    """

    name: str
    module_classes: tuple[str, ...]
    pipeline_classes: tuple[str, ...] = ()
    breaks: tuple[PlacedBreak, ...] = ()
    at_text_length: Callable[[tuple[Any, ...], dict[str, Any], int], Arguments] | None = None
    source: str = ""


def changed(
    arguments: Arguments, position: int, name: str, change: Callable[[Any], Any]
) -> Arguments:
    """The call with one argument changed, given by place or by name; ``None`` is left alone."""
    args, kwargs = arguments
    if len(args) > position:
        if args[position] is not None:
            args = (*args[:position], change(args[position]), *args[position + 1 :])
    elif kwargs.get(name) is not None:
        kwargs = {**kwargs, name: change(kwargs[name])}
    return args, kwargs
