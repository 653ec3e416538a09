"""What a graph has burnt in of its module: noticed when moved, restored when capture moved it."""

from __future__ import annotations

import copy
import operator
import types
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from bcg_core.errors import CaptureError
from bcg_core.layout import Span
from bcg_core.tree import ATOMS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_REGISTRIES = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_GLOBAL_HOOKS = {
    name: getattr(torch.nn.modules.module, f"_global_{name}")
    for name in ("forward_hooks", "forward_pre_hooks")
}
_WATCHED_ELSEWHERE = frozenset({"forward", "training"})
_ABSENT = object()
_NO_OBJECTS = (torch.nn.Module, torch.Tensor, type, types.ModuleType, dict, list, tuple)
# What every module has: registries and hooks, which are looked at by themselves.
_OF_TORCH = frozenset(torch.nn.Module().__dict__)
_MAX_DEPTH = 2


class Watched(NamedTuple):
    """One tensor or submodule, where it is found, and its address and layout at capture."""

    container: Any
    key: Any
    value: Any
    address: Any
    kind: str
    name: str


class Plain:
    """The Python attributes of a module or a helper object: numbers, flags, functions, objects.

    Tensors are among them, but ``ModuleState`` looks at those before.
    """

    def __init__(self, container: dict[str, Any], path: str) -> None:
        self.container = container
        self.path = path
        self.entries = dict(container)
        self.ignored: set[str] = set()
        self._size = len(container)
        self._names = tuple(name for name in container if name not in _OF_TORCH)
        self._values = tuple(container[name] for name in self._names)

    def difference(self) -> str | None:
        """The name of an attribute that is no longer what it was."""
        now = map(self.container.get, self._names)
        if len(self.container) == self._size and not any(map(operator.is_not, now, self._values)):
            return None
        changed = [name for name in self.changes(self.entries) if name not in self.ignored]
        return _join(self.path, changed[0]) if changed else None

    def changes(self, entries: dict[str, Any]) -> list[str]:
        """The names whose values are others than in ``entries``, or are in one alone."""
        now = dict(self.container)
        return [
            name
            for name in {**entries, **now}
            if name not in _WATCHED_ELSEWHERE
            and not _equal(now.get(name, _ABSENT), entries.get(name, _ABSENT))
        ]


def _equal(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and type(a) in ATOMS and repr(a) == repr(b))


class ModuleState:
    """Tensors and structure of a module when it was captured.

    :meth:`difference` finds what a replay would not see: a parameter, buffer or tensor attribute
    that was replaced or moved, a submodule or Python attribute that was exchanged, train for eval.
    Values changed in place are seen by a replay and are no difference, nor is what the forward
    pass itself counts or notes in its attributes.
    """

    def __init__(self, module: torch.nn.Module | None) -> None:
        self._watched: list[Watched] = []
        self._sizes: list[tuple[Any, int, str]] = []
        # By key, not by number: the key of a hook is never used again.
        self._hooks: list[tuple[Any, tuple[int, ...], str]] = [
            (hooks, tuple(hooks), f"torch's {name}") for name, hooks in _GLOBAL_HOOKS.items()
        ]
        self._training: list[tuple[torch.nn.Module, bool, str]] = []
        self._plain: list[Plain] = []
        self._forwards: list[tuple[dict[str, Any], Any, str]] = []
        if module is None:
            return
        for path, submodule in module.named_modules():
            self._training.append((submodule, submodule.training, path))
            attributes = submodule.__dict__
            self._forwards.append((attributes, attributes.get("forward"), path))
            for hooks in _HOOKS:
                self._hooks.append(
                    (attributes[hooks], tuple(attributes[hooks]), _join(path, hooks))
                )
            for registry in _REGISTRIES:
                entries = attributes[registry]
                self._sizes.append((entries, len(entries), _join(path, registry)))
                for name, value in entries.items():
                    self._watch(entries, name, value, registry[1:-1], _join(path, name))
            self._plain.append(Plain(attributes, path))
            for name, value in attributes.items():
                if name not in _REGISTRIES:
                    self._watch_tensors(attributes, name, value, _join(path, name))
                    if _is_plain_object(value):
                        self._plain.append(Plain(value.__dict__, _join(path, name)))

    def _watch(self, container: Any, key: Any, value: Any, kind: str, name: str) -> None:
        address = None
        if isinstance(value, torch.Tensor) and _plain(value):
            address = _place(value)
        self._watched.append(Watched(container, key, value, address, kind, name))

    def _watch_tensors(
        self, container: Any, key: Any, value: Any, name: str, depth: int = 0
    ) -> None:
        """Watch the tensors of a plain attribute: itself, in a container, in a helper object."""
        if isinstance(value, torch.Tensor):
            self._watch(container, key, value, "attribute", name)
        elif isinstance(value, (list, dict, tuple)) and value:
            items = value.items() if isinstance(value, dict) else enumerate(value)
            inside = [
                (k, v)
                for k, v in items
                if isinstance(v, torch.Tensor) or (depth < _MAX_DEPTH and _holds_tensors(v))
            ]
            if inside:
                self._watch(container, key, value, "attribute", name)
                for k, v in inside:
                    self._watch_tensors(value, k, v, f"{name}[{k!r}]", depth + 1)
        elif depth < _MAX_DEPTH and _is_plain_object(value):
            for k, v in value.__dict__.items():
                self._watch_tensors(value.__dict__, k, v, f"{name}.{k}", depth + 1)

    def ignore_changes_since(self, before: ModuleState) -> None:
        """Leave aside the Python attributes that the forward pass itself has changed."""
        then = {id(plain.container): plain for plain in before._plain}
        for plain in self._plain:
            old = then.get(id(plain.container))
            plain.ignored = set(plain.changes(old.entries)) if old is not None else set()

    def memory(self) -> set[int]:
        """The storages of the module's tensors."""
        values = [w.value for w in self._watched if w.address]
        return {value.untyped_storage().data_ptr() for value in values} - {0}

    def require_own(self, foreign: Callable[[torch.Tensor], bool]) -> None:
        """Refuse a module that keeps a tensor whose memory each replay rewrites."""
        for _, _, value, address, kind, name in self._watched:
            if address and foreign(value):
                raise CaptureError(
                    f"forward leaves a tensor of this call in {kind} {name}, which a replay "
                    "would not do; return it instead, or update a tensor in place"
                )

    def difference(self) -> str | None:
        """What has changed since, in one line; ``None`` while a replay still sees the module."""
        for container, key, value, address, kind, name in self._watched:
            try:
                now = container[key]
            except (KeyError, IndexError):
                return f"{kind} {name} was removed"
            if now is not value:
                return f"{kind} {name} was replaced"
            if address is not None and _place(value) != address:
                return f"{kind} {name} was moved"
        for entries, size, name in self._sizes:
            if len(entries) != size:
                return f"{name} has {len(entries)} entries, captured were {size}"
        for hooks, keys, name in self._hooks:
            if tuple(hooks) != keys:
                return f"{name} have changed"
        for attributes, forward, path in self._forwards:
            if attributes.get("forward") is not forward:
                return f"forward of {path or 'the module'} was replaced"
        for plain in self._plain:
            changed = plain.difference()
            if changed is not None:
                return f"attribute {changed} was changed"
        for submodule, training, path in self._training:
            if submodule.training is not training:
                mode = "train" if submodule.training else "eval"
                return f"{path or 'the module'} is in {mode} mode, captured was not"
        return None


def _holds_tensors(value: Any) -> bool:
    if not isinstance(value, (list, dict, tuple)):
        return False
    parts = value.values() if isinstance(value, dict) else value
    return any(isinstance(part, (torch.Tensor, list, dict, tuple)) for part in parts)


def _is_plain_object(value: Any) -> bool:
    """Whether a value is an object with data, rather than a module, a class or code."""
    if isinstance(value, _NO_OBJECTS) or hasattr(value, "__code__"):
        return False
    return isinstance(getattr(value, "__dict__", None), dict) and not hasattr(value, "__func__")


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.size(), tensor.stride()


def _plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def generators_of(module: torch.nn.Module | None) -> list[torch.Generator]:
    """The random generators that a module holds in its attributes."""
    parts = module.modules() if module is not None else ()
    values = [value for part in parts for value in part.__dict__.values()]
    return [value for value in values if isinstance(value, torch.Generator)]


class Preserved:
    """Buffers, tensor attributes and Python attributes of a module, over warm-up and capture.

    What each call writes to a tensor in place is undone: batch statistics, counters, caches. What
    the warm-up wrote and the capture did not is an initialisation, done once, and stays.
    """

    def __init__(self, module: torch.nn.Module | None) -> None:
        self._saved: list[tuple[torch.Tensor, Span]] = []
        self._warmed: list[Span] = []
        self._attributes: list[tuple[Any, Any]] = []
        if module is None:
            return
        tensors: dict[int, torch.Tensor] = {}
        for _, _, value, address, kind, _ in ModuleState(module)._watched:
            if address and kind in ("buffer", "attribute"):
                tensors.setdefault(id(value), value)
        with torch.no_grad():
            self._saved = [(t, Span.copy_of([t])) for t in tensors.values()]
        for submodule in module.modules():
            attributes = submodule.__dict__
            self._save_attributes(attributes)

    def _save_attributes(self, container: Any, depth: int = 0) -> None:
        self._attributes.append((container, copy.copy(container)))
        for value in container.values() if isinstance(container, dict) else container:
            if type(value) in (dict, list) and depth <= _MAX_DEPTH:
                self._save_attributes(value, depth + 1)

    def warmed(self) -> None:
        """To be called between warm-up and capture."""
        with torch.no_grad():
            self._warmed = [Span.copy_of([tensor]) for tensor, _ in self._saved]

    wrote = False

    def undo_writes(self) -> None:
        """Put back the values that the capture, too, has written."""
        with torch.no_grad():
            warmed = self._warmed or [before for _, before in self._saved]
            for (tensor, before), after in zip(self._saved, warmed):
                now = Span.copy_of([tensor])
                if after is before or not torch.equal(now.memory, after.memory):
                    before.write_back([tensor])
                    self.wrote = True

    def undo(self) -> None:
        """Put back everything, after a failure."""
        for container, entries in self._attributes:
            if isinstance(container, list):
                container[:] = entries
                continue
            # Not cleared first: other threads may be calling the module.
            container.update(entries)
            for name in container.keys() - entries.keys():
                del container[name]
        self._warmed = []
        self.undo_writes()


@contextmanager
def state_preserved(module: torch.nn.Module | None) -> Iterator[Preserved]:
    """Warm-up and capture leave no trace in the module, and a failure none at all."""
    preserved = Preserved(module)
    try:
        yield preserved
    except BaseException:
        preserved.undo()
        raise
    preserved.undo_writes()


@contextmanager
def attributes_kept(module: torch.nn.Module | None) -> Iterator[None]:
    """Undo what the body rebinds: tensors of the graph's pool must not stay in the module.

    A tensor that is exchanged for another makes the capture fail: eager would rebind it at every
    call, and a replay cannot. That both hold the same values here says nothing of other inputs.
    """
    before = ModuleState(module)
    yield
    for container, key, value, _, kind, name in before._watched:
        if not isinstance(container, (dict, list)) or kind == "module":
            continue
        try:
            now = container[key]
        except (KeyError, IndexError):
            now = None
        if now is value:
            continue
        if isinstance(container, list) and key >= len(container):
            raise CaptureError(f"forward removes {name}, which a replay would not do")
        container[key] = value
        if isinstance(value, torch.Tensor):
            raise CaptureError(
                f"forward rebinds {kind} {name} to a new tensor, which a replay would not do; "
                f"update it in place ({name}.copy_(...)) instead"
            )
