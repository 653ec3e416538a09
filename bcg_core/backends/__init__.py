"""What a backend is: where memory lies, how operations are recorded and how they are replayed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import torch

from bcg_core.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from bcg_core.errors import CaptureError

BackendName = Literal["auto", "cuda", "simulated"]


class Segment(Protocol):
    """A recorded stretch of operations."""

    def replay(self) -> None:
        """Run the recorded operations on the recorded addresses."""

    def release(self) -> None:
        """Give the segment's memory back to its pool."""


class Pool(Protocol):
    """Memory that the segments of one or more graphs share, and the lock over it."""

    @property
    def handle(self) -> Any:
        """What ``BreakableCUDAGraph.pool()`` returns and its constructor takes."""

    def exclusive(self) -> AbstractContextManager[None]:
        """Hold the pool for one replay or capture.

        Other threads wait. The same thread gets :class:`NestedReplayError`: a replay inside a
        replay would overwrite memory that the outer one still reads.
        """

    def bytes(self) -> int:
        """Bytes of device memory that the pool has reserved."""


class Recorder(Protocol):
    """One capture as the backend sees it. Entered for the length of the capture."""

    def __enter__(self) -> Recorder: ...

    def __exit__(self, *exception: object) -> None: ...

    def begin_segment(self) -> None:
        """Start recording; the operations of this thread are no longer executed."""

    def end_segment(self) -> Segment | None:
        """Stop recording; ``None`` for a segment without operations."""

    def abandon_segment(self) -> None:
        """Stop recording after an error, whatever state it is in, and forget the segment."""

    def explain(self, error: Exception) -> CaptureError | None:
        """The refusal behind an error that the device raised in a segment, with its place."""

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the capture's own pool holds the memory of ``tensor``."""

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor over the same memory that does not keep the memory alive."""


class Backend(Protocol):
    """One way to capture and replay."""

    name: str

    def new_pool(self, handle: Any = None) -> Pool:
        """The pool of this handle, or a new one."""

    def recorder(
        self,
        pool: Pool,
        hold: Callable[[torch.Tensor], None],
        stream: Any = None,
        generators: tuple[torch.Generator, ...] = (),
    ) -> Recorder:
        """A recorder into ``pool``.

        ``hold`` is called with each tensor that a recorded operation reads and that the pool
        does not own: the graph has to keep it alive. ``generators`` are those besides the
        default ones that the body may draw from.
        """

    def eager(self, pool: Pool) -> AbstractContextManager[None]:
        """The context in which the break of a replay runs."""

    def warm_up(self) -> AbstractContextManager[Any]:
        """The context of a warm-up: where a later capture runs, but with nothing recorded."""

    def is_capturing(self) -> bool:
        """Whether this thread's current stream is in a capture, ours or another's."""


def resolve(name: str, device: torch.device | None = None) -> Backend:
    """The backend of this name; ``auto`` follows ``device`` or, without one, what there is."""
    if name not in get_args(BackendName):
        raise UnsupportedError(
            f"backend {name!r} is unknown; the backends are {', '.join(get_args(BackendName))}"
        )
    if name == "auto":
        on_cuda = torch.cuda.is_available() if device is None else device.type == "cuda"
        name = "cuda" if on_cuda else "simulated"
    if device is not None and device.type not in ("cpu", "cuda"):
        raise UnsupportedError(
            f"tensors are on {device}; graphs are captured on cuda, or simulated on cpu"
        )
    if name == "cuda":
        if not torch.cuda.is_available():
            raise UnsupportedError(
                "backend 'cuda' needs a CUDA device and this process sees none; use "
                "backend='simulated', which runs on any machine"
            )
        from bcg_core.backends.cuda import CUDA

        return CUDA
    from bcg_core.backends.simulated import SIMULATED

    return SIMULATED
