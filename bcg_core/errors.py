"""Every exception of ``bcg_core``; each message ends with what to do next."""

from __future__ import annotations


class BCGError(RuntimeError):
    """Base of every error that ``bcg_core`` raises on purpose."""


class CaptureError(BCGError):
    """A capture could not be finished; nothing of it is left behind."""


class CaptureRefusedError(CaptureError):
    """Work that no graph can hold: a host read, a host copy, a shape that depends on data."""


class NestedCaptureError(CaptureError):
    """A capture (or a bare replay) was started while this thread was already capturing."""


class ReplayError(BCGError):
    """A captured graph could not be replayed."""


class UseAfterFreeError(CaptureError, ReplayError):
    """Memory that a graph reads was freed or given to another tensor."""


class BridgeError(ReplayError):
    """A break returned something else than at capture: shape, dtype, layout, structure or value."""


class NestedReplayError(ReplayError):
    """A replay was started on a pool on which this thread is already replaying."""


class EnableError(BCGError):
    """``enable`` or ``disable`` cannot do what was asked of this pipeline or module."""


class UnsupportedError(BCGError):
    """An option or a model that this version does not serve, refused by name."""
