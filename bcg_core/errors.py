"""Every exception of ``bcg_core``; each message ends with what to do next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from bcg_core.location import Location
    from bcg_core.simulation.memory import Life


class BCGError(RuntimeError):
    """Base of every error that ``bcg_core`` raises on purpose."""


class CaptureError(BCGError):
    """A capture could not be finished; nothing of it is left behind."""


class CaptureRefusedError(CaptureError):
    """Work that no graph can hold: a host read, a host copy, a shape that depends on data."""

    def __init__(
        self, message: str, operation: str = "", location: Location | None = None, reason: str = ""
    ) -> None:
        super().__init__(message)
        self.operation = operation
        self.location = location
        self.reason = reason


class NestedCaptureError(CaptureError):
    """A capture (or a bare replay) was started while this thread was already capturing."""


class ReplayError(BCGError):
    """A captured graph could not be replayed."""


class UseAfterFreeError(CaptureError, ReplayError):
    """Memory that a graph reads was freed or given to another tensor.

    ``operation`` at ``location`` reads it. ``kind`` says whose memory it was: an input of a break,
    a tensor that a break made, the graph's own pool, or anything outside. ``life`` tells where the
    tensor was made and where its last reference died, as far as that was watched.
    """

    def __init__(
        self,
        message: str,
        kind: Literal["break input", "bridge", "pool", "outside"],
        operation: str,
        location: Location,
        life: Life | None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.operation = operation
        self.location = location
        self.life = life


class BridgeError(ReplayError):
    """A break returned something else than at capture: shape, dtype, layout, structure or value."""


class NestedReplayError(ReplayError):
    """A replay was started on a pool on which this thread is already replaying."""


class EnableError(BCGError):
    """``enable`` or ``disable`` cannot do what was asked of this pipeline or module."""


class UnsupportedError(BCGError):
    """An option or a model that this version does not serve, refused by name."""
