"""Where a capture is broken: ``eager_on_graph``, ``break_graph``, and the capture active now."""

from __future__ import annotations

import functools
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Function = TypeVar("Function", bound="Callable[..., Any]")


class ActiveCapture(Protocol):
    """What a break needs of the capture that it interrupts."""

    def run_break(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """End the segment, run ``function`` eagerly, record it, begin the next segment."""


# Thread-local, not a context variable: a thread started with a copied context must not believe
# that its own operations are being recorded.
_thread = threading.local()


def active_capture() -> ActiveCapture | None:
    """The capture that records this thread's operations now; ``None`` outside and in a break."""
    return getattr(_thread, "capture", None)


@contextmanager
def capturing(capture: ActiveCapture | None) -> Iterator[None]:
    """Make ``capture`` the active one of this thread; ``None`` hides it, as inside a break."""
    before = active_capture()
    _thread.capture = capture
    try:
        yield
    finally:
        _thread.capture = before


def capture_in_progress() -> bool:
    """Whether this thread is between the beginning and the end of a capture, breaks included."""
    return getattr(_thread, "in_progress", False)


@contextmanager
def in_progress() -> Iterator[None]:
    """The length of one capture of this thread."""
    _thread.in_progress = True
    try:
        yield
    finally:
        _thread.in_progress = False


def breaking(
    function: Function,
    replacement: Callable[..., Any] | None = None,
    when: Callable[..., bool] | None = None,
) -> Function:
    """``function``, which while a graph is captured runs as an eager break.

    Outside a capture, and inside another break, it is a plain call. ``replacement`` is what the
    break runs in its place, with the same arguments; ``when`` says for which arguments there is
    a break at all.
    """

    @functools.wraps(function)
    def broken(*args: Any, **kwargs: Any) -> Any:
        capture = active_capture()
        if capture is None or (when is not None and not when(*args, **kwargs)):
            return function(*args, **kwargs)
        return capture.run_break(replacement or function, args, kwargs)

    return broken  # type: ignore[return-value]


def eager_on_graph(enable: bool = True) -> Callable[[Function], Function]:
    """Mark a function as a break: while a graph is captured it runs eagerly, between segments.

    Outside a capture, and inside another break, the decorated function is a plain call. With
    ``enable=False`` the decorator returns the function itself. At every replay it must return what
    it returned at capture in all but the tensors' values, or the replay raises ``BridgeError``;
    tensors inside objects that are no known container raise ``UnsupportedError`` at capture.
    """
    return breaking if enable else lambda function: function


@eager_on_graph()
def break_graph() -> None:
    """End the current segment and begin another: an empty break. Nothing outside a capture."""
