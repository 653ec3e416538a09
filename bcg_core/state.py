"""What a graph has burnt in of its module: noticed when moved, restored when capture moved it."""

from __future__ import annotations

import types
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from bcg_core.errors import CaptureError
from bcg_core.layout import layout_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_REGISTRIES = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_MAX_DEPTH = 2


class Watched(NamedTuple):
    """One tensor or submodule, where it is found, and its address at capture."""

    container: Any
    key: Any
    value: Any
    address: int | None
    kind: str
    name: str


class ModuleState:
    """Tensors and structure of a module when it was captured.

    :meth:`difference` finds what a replay would not see: a parameter, buffer or tensor attribute
    that was replaced or moved, a submodule that was exchanged, train for eval. Values changed in
    place are seen by a replay and are no difference.
    """

    def __init__(self, module: torch.nn.Module | None) -> None:
        self._watched: list[Watched] = []
        self._sizes: list[tuple[Any, int, str]] = []
        self._training: list[tuple[torch.nn.Module, bool, str]] = []
        self._forwards: list[tuple[dict[str, Any], Any, str]] = []
        if module is None:
            return
        for path, submodule in module.named_modules():
            self._training.append((submodule, submodule.training, path))
            attributes = submodule.__dict__
            self._forwards.append((attributes, attributes.get("forward"), path))
            for hooks in _HOOKS:
                self._sizes.append((attributes[hooks], len(attributes[hooks]), _join(path, hooks)))
            for registry in _REGISTRIES:
                entries = attributes[registry]
                self._sizes.append((entries, len(entries), _join(path, registry)))
                for name, value in entries.items():
                    self._watch(entries, name, value, registry[1:-1], _join(path, name))
            for name, value in attributes.items():
                if name not in _REGISTRIES:
                    self._watch_tensors(attributes, name, value, _join(path, name))

    def _watch(self, container: Any, key: Any, value: Any, kind: str, name: str) -> None:
        address = value.data_ptr() if isinstance(value, torch.Tensor) and _plain(value) else None
        self._watched.append(Watched(container, key, value, address, kind, name))

    def _watch_tensors(
        self, container: Any, key: Any, value: Any, name: str, depth: int = 0
    ) -> None:
        """Watch the tensors of a plain attribute: itself, in a container, in a helper object."""
        if isinstance(value, torch.Tensor):
            self._watch(container, key, value, "attribute", name)
        elif isinstance(value, (list, dict, tuple)) and value:
            items = value.items() if isinstance(value, dict) else enumerate(value)
            inside = [(k, v) for k, v in items if isinstance(v, torch.Tensor)]
            if inside:
                self._watch(container, key, value, "attribute", name)
                for k, v in inside:
                    self._watch(value, k, v, "attribute", f"{name}[{k!r}]")
        elif depth < _MAX_DEPTH and _is_plain_object(value):
            for k, v in value.__dict__.items():
                self._watch_tensors(value.__dict__, k, v, f"{name}.{k}", depth + 1)

    def difference(self) -> str | None:
        """What has changed since, in one line; ``None`` while a replay still sees the module."""
        for container, key, value, address, kind, name in self._watched:
            try:
                now = container[key]
            except (KeyError, IndexError):
                return f"{kind} {name} was removed"
            if now is not value:
                return f"{kind} {name} was replaced"
            if address is not None and value.data_ptr() != address:
                return f"{kind} {name} was moved"
        for entries, size, name in self._sizes:
            if len(entries) != size:
                return f"{name} has {len(entries)} entries, captured were {size}"
        for attributes, forward, path in self._forwards:
            if attributes.get("forward") is not forward:
                return f"forward of {path or 'the module'} was replaced"
        for submodule, training, path in self._training:
            if submodule.training is not training:
                mode = "train" if submodule.training else "eval"
                return f"{path or 'the module'} is in {mode} mode, captured was not"
        return None


def _is_plain_object(value: Any) -> bool:
    """Whether a value is an object with data, rather than a module, a class or code."""
    if isinstance(value, (torch.nn.Module, type, types.ModuleType)) or hasattr(value, "__code__"):
        return False
    return isinstance(getattr(value, "__dict__", None), dict) and not hasattr(value, "__func__")


def _plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


@contextmanager
def buffers_preserved(module: torch.nn.Module | None) -> Iterator[None]:
    """Put back the values and the identity of every buffer, however the body ends.

    Batch statistics, counters and moving averages must not be updated by a warm-up or a capture.
    """
    saved = []
    if module is not None:
        for submodule in module.modules():
            for name, buffer in submodule._buffers.items():
                if buffer is not None:
                    saved.append((submodule._buffers, name, buffer, buffer.detach().clone()))
    try:
        yield
    finally:
        with torch.no_grad():
            for entries, name, buffer, copy in saved:
                entries[name] = buffer
                if not torch.equal(buffer, copy):
                    buffer.copy_(copy)


@contextmanager
def attributes_kept(module: torch.nn.Module | None, warn: Callable[[str], None]) -> Iterator[None]:
    """Undo what the body rebinds: tensors of the graph's pool must not stay in the module.

    A buffer that ends with another value than it began with makes the capture fail: eager would
    rebind it at every call, and a replay cannot.
    """
    before = ModuleState(module)
    yield
    for container, key, value, _, kind, name in before._watched:
        if not isinstance(container, dict) or kind == "module":
            continue
        now = container.get(key)
        if now is value:
            continue
        container[key] = value
        if kind == "attribute":
            if not _same(now, value):
                warn(f"forward rebinds {name}; a replay leaves it as it was")
        elif not _same(now, value):
            raise CaptureError(
                f"forward rebinds {kind} {name} to a new value, which a replay would not do; "
                f"update it in place ({name}.copy_(...)) instead"
            )


def _same(now: Any, before: Any) -> bool:
    if not isinstance(now, torch.Tensor) or not isinstance(before, torch.Tensor):
        return now is before
    return layout_of(now) == layout_of(before) and torch.equal(now, before)
