"""How a module is captured: which breaks are placed, and in which order ways are tried."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from bcg_core.errors import UnsupportedError
from bcg_core.models import adapter_for
from bcg_core.models.attention import observed
from bcg_core.placement import PlacedBreak, placed, sites

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    import torch

WAYS = ("auto", "attention", "none")


class Plan(Protocol):
    """Called with the warm-up; in its context the module has its breaks placed."""

    def __call__(self, warm_up: Callable[[], None]) -> AbstractContextManager[Any]: ...


def plans_for(module: torch.nn.Module | None, breaks: str | Sequence[str]) -> list[Plan]:
    """The plans to try in order until one captures.

    ``"auto"``: the adapter's breaks and else whole; if that is refused, broken at attention, too.
    The adapter's breaks are there with all but ``"none"``: the model cannot be captured without.
    Raises :class:`UnsupportedError` for patterns that match nothing.
    """
    own = _placeable(adapter_for(module).breaks)
    if isinstance(breaks, str) and breaks in WAYS:
        whole: Plan = partial(_at_patterns, module, own)
        attention: Plan = partial(_at_attention, module, own)
        unbroken: Plan = partial(_at_patterns, module, [])
        ways = {"auto": [whole, attention], "attention": [attention], "none": [unbroken]}
        return ways[breaks]
    if isinstance(breaks, str):
        raise UnsupportedError(
            f"breaks={breaks!r} is none of {', '.join(WAYS)}; give patterns as a list: "
            f"breaks=[{breaks!r}]"
        )
    for pattern in breaks:
        sites(module, pattern)
    return [partial(_at_patterns, module, [*own, *breaks])]


@contextmanager
def _at_patterns(
    module: torch.nn.Module | None,
    breaks: Sequence[PlacedBreak | str],
    warm_up: Callable[[], None],
) -> Iterator[None]:
    warm_up()
    with placed(module, breaks):
        yield


@contextmanager
def _at_attention(
    module: torch.nn.Module | None, breaks: Sequence[PlacedBreak], warm_up: Callable[[], None]
) -> Iterator[None]:
    with observed(module) as seen:
        warm_up()
    with placed(module, [*breaks, *seen.patterns]):
        yield


def _placeable(breaks: Sequence[PlacedBreak]) -> list[PlacedBreak]:
    """Those on functions of modules that are imported: others cannot be called."""
    return [b for b in breaks if b.pattern.partition(":")[0] in sys.modules]
