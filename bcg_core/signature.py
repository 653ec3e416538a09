"""The key of a call: what its result depends on besides the values of its tensors."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from bcg_core.ambient import Ambient, current_ambient
from bcg_core.errors import UnsupportedError
from bcg_core.layout import Layout, byte_range, is_plain, layout_of, overlapping, require_plain
from bcg_core.tree import ATOMS, Node, describe_path, flatten

if TYPE_CHECKING:
    from collections.abc import Sequence

# Kernels are chosen by the alignment of an address up to this many bytes.
_KERNEL_ALIGNMENT = 16
# A tensor that lives on the host is compared by its bytes, up to this many.
MAX_HOST_BYTES = 4096
_MAX_ATTRIBUTES = 256
_VALUES = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, range)


class TensorKey(NamedTuple):
    """A tensor argument: its layout, the residue of its address, the tensors it overlaps."""

    layout: Layout
    alignment: int
    group: int
    offset: int


class HostKey(NamedTuple):
    """A tensor argument on the host: capture burns its bytes in, so that they are the key."""

    layout: Layout
    content: bytes


class Signature(NamedTuple):
    """The key of a call; hashable, and comparable part by part for people."""

    structure: Node | None
    leaves: tuple[Any, ...]
    ambient: Ambient


class Call:
    """One call of a module, taken apart."""

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        on_host: HostTest,
        device: torch.device | None = None,
    ) -> None:
        self.device = device
        self.arguments = (args, kwargs)
        self.leaves: list[Any] = []
        self.structure = flatten(self.arguments, self.leaves)
        self.device_leaves: list[int] = []
        keys: list[Any] = []
        for index, leaf in enumerate(self.leaves):
            if isinstance(leaf, torch.Tensor):
                if on_host(self, index, leaf):
                    keys.append(_host_key(leaf, self.path(index)))
                else:
                    self.device_leaves.append(index)
                    keys.append(leaf)
            else:
                keys.append(_plain_key(leaf, lambda i=index: self.path(i)))
        self.groups = self._tensor_keys(keys)
        self.signature = Signature(self.structure, tuple(keys), current_ambient())

    def path(self, index: int) -> str:
        """Where the leaf number ``index`` is: ``[0][1]`` or ``['name']``."""
        path = describe_path(self.structure, index, "")
        return path[3:]  # behind the [0] of the positional and the [1] of the keyword arguments

    def _tensor_keys(self, keys: list[Any]) -> list[list[int]]:
        tensors = [self.leaves[i] for i in self.device_leaves]
        for index, tensor in zip(self.device_leaves, tensors):
            if type(tensor) is not torch.Tensor or not is_plain(tensor):
                require_plain(tensor, f"argument {self.path(index)}")
            if tensor.data_ptr() % tensor.element_size():
                raise UnsupportedError(
                    f"argument {self.path(index)} starts within an element of {tensor.dtype}; "
                    "clone() it before the call"
                )
        groups = _groups(tensors)
        for number, group in enumerate(groups):
            low = min(byte_range(tensors[i])[0] for i in group)
            for i in group:
                tensor = tensors[i]
                address = tensor.data_ptr()
                keys[self.device_leaves[i]] = TensorKey(
                    layout_of(tensor),
                    address % _KERNEL_ALIGNMENT,
                    number if len(group) > 1 else -1,
                    address - low,
                )
        return [[self.device_leaves[i] for i in group] for group in groups]


class HostTest:
    """Which tensor arguments live on the host: those named, and CPU tensors of a CUDA model."""

    def __init__(self, names: Sequence[str], cuda: bool, parameters: Sequence[str]) -> None:
        self._names = frozenset(names)
        self._cuda = cuda
        self._parameters = tuple(parameters)

    def __call__(self, call: Call, index: int, leaf: torch.Tensor) -> bool:
        if self._cuda:
            return leaf.device.type == "cpu"
        if not self._names:
            return False
        return argument_name(call, index, self._parameters).split("[")[0] in self._names


def argument_name(call: Call, index: int, parameters: Sequence[str]) -> str:
    """The name of a leaf in the terms of the call: ``encoder_hidden_states[0]``."""
    path = describe_path(call.structure, index, "")
    head, _, rest = path[1:].partition("]")
    first, _, tail = rest.removeprefix("[").partition("]")
    if head == "1":
        return first.strip("'\"") + tail
    position = int(first)
    name = parameters[position] if position < len(parameters) else f"argument {position}"
    return name + tail


def _groups(tensors: list[torch.Tensor]) -> list[list[int]]:
    """Overlapping tensors together; looked at closely only where a storage is shared."""
    storages = {t.untyped_storage().data_ptr() for t in tensors}
    if len(storages) == len(tensors):
        return [[i] for i in range(len(tensors))]
    return sorted(overlapping(tensors))


def _host_key(tensor: torch.Tensor, path: str) -> HostKey:
    require_plain(tensor, f"argument {path}")
    size = tensor.numel() * tensor.element_size()
    if size > MAX_HOST_BYTES:
        raise UnsupportedError(
            f"argument {path} is a host tensor of {size} bytes, more than the {MAX_HOST_BYTES} "
            "that are compared at each call; move it to the device before the call"
        )
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return HostKey(layout_of(tensor), bytes(data.tolist()))


def _plain_key(value: Any, path: Any, depth: int = 0) -> Any:
    """A hashable key of a non-tensor, by content and without running the value's own code.

    Equality methods of strangers can raise, be slow, or be absent; an object is compared by its
    attributes. What is callable, a module or a class is compared by identity (the graph keeps it
    alive, so that its address is not given to another).
    """
    kind = type(value)
    if kind is float:
        return value.hex() if value == value else "nan"  # 0.0 and -0.0 are two keys
    if kind is complex:
        return (complex, value.real.hex(), value.imag.hex())
    if kind in ATOMS or isinstance(value, _VALUES):
        return (kind, value)
    if isinstance(value, enum.Enum):
        return (kind, value.name)
    if isinstance(value, (list, tuple)):  # a long one of plain values, or inside an object
        if ATOMS.issuperset(map(type, value)):
            return (kind, tuple(value), _types(value))
        return (kind, tuple(_plain_key(part, path, depth + 1) for part in value))
    if isinstance(value, (set, frozenset)):
        return (kind, frozenset(_plain_key(part, path, depth + 1) for part in value))
    if isinstance(value, dict):
        return (kind, tuple((k, _plain_key(v, path, depth + 1)) for k, v in value.items()))
    if isinstance(value, torch.Tensor):
        raise UnsupportedError(
            f"argument {path()} holds a tensor inside an object that is no known container, so "
            "that its value would not be refreshed; pass tensors in lists, tuples, dictionaries, "
            "named tuples or dataclasses"
        )
    if isinstance(value, (torch.Generator, torch.nn.Module, type)) or callable(value):
        return (kind, id(value))
    if kind.__module__ == "numpy" and hasattr(value, "tobytes"):
        if value.nbytes > MAX_HOST_BYTES:
            return (kind, id(value))
        return (kind, str(value.dtype), value.shape, value.tobytes())
    attributes = getattr(value, "__dict__", None)
    if not attributes or depth > 3 or len(attributes) > _MAX_ATTRIBUTES:
        return (kind,) if not attributes else (kind, id(value))
    return (
        kind,
        tuple((name, _plain_key(part, path, depth + 1)) for name, part in attributes.items()),
    )


def _types(values: Sequence[Any]) -> Any:
    """The types of many plain values: ``1``, ``True`` and ``1.0`` are equal, but not the same."""
    kinds = set(map(type, values))
    return kinds.pop() if len(kinds) == 1 else tuple(map(type, values))


def difference(new: Call, captured: Signature, parameters: Sequence[str]) -> list[str]:
    """One line for each way in which a call differs from a captured one."""
    signature = new.signature
    lines: list[str] = []
    if signature.structure != captured.structure:
        return [_structure_difference(signature.structure, captured.structure, parameters)]
    for index, (mine, theirs) in enumerate(zip(signature.leaves, captured.leaves)):
        if mine == theirs:
            continue
        name = argument_name(new, index, parameters)
        lines.append(f"{name} {_leaf_difference(mine, theirs, new.leaves[index])}")
    ambient = captured.ambient.difference(signature.ambient)
    if ambient is not None:
        lines.append(ambient)
    return lines


def _leaf_difference(mine: Any, theirs: Any, leaf: Any) -> str:
    if isinstance(mine, TensorKey) and isinstance(theirs, TensorKey):
        for field, now, then in zip(Layout._fields, mine.layout, theirs.layout):
            if now != then:
                return f"has {field} {now}, captured was {then}"
        if mine.alignment != theirs.alignment:
            return (
                f"starts {mine.alignment} bytes past a {_KERNEL_ALIGNMENT}-byte boundary, "
                f"captured was {theirs.alignment}"
            )
        return "overlaps other arguments in memory in another way than captured"
    if isinstance(mine, HostKey) and isinstance(theirs, HostKey):
        return "is a host tensor with other content than captured"
    now = "a tensor" if isinstance(leaf, torch.Tensor) else _brief(leaf)
    return f"is {now}, captured was {_brief_key(theirs)}"


def _structure_difference(mine: Node | None, theirs: Node | None, parameters: Sequence[str]) -> str:
    """In words: which argument has another structure."""
    assert mine is not None
    assert theirs is not None
    (args, kwargs), (args_then, kwargs_then) = mine.children, theirs.children
    assert args is not None
    assert args_then is not None
    assert kwargs is not None
    assert kwargs_then is not None
    if len(args.children) != len(args_then.children):
        return f"{len(args.children)} positional arguments, captured were {len(args_then.children)}"
    for position, (a, b) in enumerate(zip(args.children, args_then.children)):
        if a != b:
            name = parameters[position] if position < len(parameters) else f"argument {position}"
            return f"{name} is {_kind(a)}, captured was {_kind(b)}"
    now = dict(zip(kwargs.names or (), kwargs.children))
    then = dict(zip(kwargs_then.names or (), kwargs_then.children))
    for name in [*now, *then]:
        if name not in then:
            return f"{name} is given, captured was without it"
        if name not in now:
            return f"{name} is not given, captured was with it"
        if now[name] != then[name]:
            return f"{name} is {_kind(now[name])}, captured was {_kind(then[name])}"
    return "the keyword arguments come in another order than captured"


def _kind(node: Node | None) -> str:
    if node is None:
        return "one value"
    return f"a {node.kind.__name__} of {len(node.children)}"


def _brief(value: Any) -> str:
    if type(value) in ATOMS or isinstance(value, _VALUES):
        text = repr(value)
        return text if len(text) <= 60 else text[:57] + "…"
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"


def _brief_key(key: Any) -> str:
    if isinstance(key, (TensorKey, HostKey)):
        return f"a tensor of shape {key.layout.shape}"
    if isinstance(key, str):
        return str(float.fromhex(key)) if key != "nan" else "nan"
    kind, *rest = key
    if kind in ATOMS or issubclass(kind, _VALUES):
        return _brief(rest[0])
    if issubclass(kind, (list, tuple)) and rest:
        return f"a {kind.__name__} of {len(rest[0])}"
    return f"another {kind.__name__}"
