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
