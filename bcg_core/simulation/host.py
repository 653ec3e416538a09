"""Host reads and host data that never reach the dispatcher, seen by the Python call instead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Callable

_READ = "it reads a tensor on the host, which waits for the device"
_DATA = "it copies host data to the device"

_REFUSED: dict[Any, str] = {
    torch.Tensor.tolist: _READ,
    torch.Tensor.numpy: _READ,
    torch.Tensor.__array__: _READ,
    torch.Tensor.cpu: _READ,
    torch.Tensor.__repr__: _READ,
    torch.Tensor.__format__: _READ,
    torch.tensor: _DATA,
    torch.as_tensor: _DATA,
    torch.asarray: _DATA,
    torch.from_numpy: _DATA,
    torch.frombuffer: _DATA,
    torch.Tensor.new_tensor: _DATA,
    torch.Tensor.new: _DATA,
}
_NAMES = {function: getattr(function, "__name__", str(function)) for function in _REFUSED}
_INDEXING = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)


class HostAccess(TorchFunctionMode):
    """Calls ``refuse(name, reason)`` for each host access while ``active()`` is true."""

    def __init__(self, active: Callable[[], bool], refuse: Callable[[str, str], None]) -> None:
        super().__init__()
        self._active = active
        self._refuse = refuse

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._active():
            reason = _REFUSED.get(function)
            if reason is not None and not _is_free(function, args):
                self._refuse(_NAMES[function], reason)
            elif function in _INDEXING and _has_host_index(args[1]):
                self._refuse("indexing by a list", _DATA)
        return function(*args, **kwargs)


def _is_free(function: Any, args: tuple[Any, ...]) -> bool:
    """Whether the call copies nothing: a tensor passed through, or no elements."""
    if _REFUSED[function] is _READ or not args:
        return function is torch.Tensor.__format__ and len(args) > 0 and args[0].is_meta
    data = args[-1] if function in (torch.Tensor.new_tensor, torch.Tensor.new) else args[0]
    if isinstance(data, torch.Tensor):
        return function in (torch.as_tensor, torch.asarray)
    return isinstance(data, (list, tuple)) and not data


def _has_host_index(index: Any) -> bool:
    """Whether an index holds a list of numbers, which becomes a tensor on the host first."""
    parts = index if isinstance(index, tuple) else (index,)
    for part in parts:
        if isinstance(part, list) and part and not isinstance(part[0], (slice, torch.Tensor)):
            return True
        if type(part).__module__ == "numpy" and hasattr(part, "ndim") and part.ndim:
            return True
    return False
