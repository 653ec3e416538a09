"""How a module is captured: which breaks are placed, and in which order ways are tried."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    import torch


class Plan(Protocol):
    """Called with the warm-up; in its context the module has its breaks placed."""

    def __call__(self, warm_up: Callable[[], None]) -> AbstractContextManager[Any]: ...


@contextmanager
def whole(warm_up: Callable[[], None]) -> Iterator[None]:
    """No breaks but those in the module's own code."""
    warm_up()
    yield


def plans_for(module: torch.nn.Module | None, breaks: str | Sequence[str]) -> list[Plan]:
    return [whole]
