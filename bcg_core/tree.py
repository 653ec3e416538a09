"""Leaves inside nested values: flatten, rebuild in the same structure, map over the tensors."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from bcg_core.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MAX_DEPTH = 64
ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})
# Above this length a list of plain values is one leaf: a 72,000-element list of ``None`` must not
# cost a Python step an element at every call.
LONG_SEQUENCE = 32


class Node(NamedTuple):
    """One container of a flattened value; hashable, and equal where the structure is equal."""

    kind: type
    names: tuple[Any, ...] | None
    children: tuple[Node | None, ...]


def _is_dataclass(kind: type) -> bool:
    return dataclasses.is_dataclass(kind)


def _is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def _container(kind: type) -> str | None:
    """How values of this type are taken apart; ``None`` for a leaf."""
    if kind in ATOMS or issubclass(kind, (torch.Tensor, torch.Size, torch.nn.Module)):
        return None
    if _is_dataclass(kind):
        return "fields"
    if issubclass(kind, (tuple, list)):
        return "sequence"
    if issubclass(kind, dict):
        return "mapping"
    return None


_containers: dict[type, str | None] = {}


def flatten(value: Any, leaves: list[Any], depth: int = 0) -> Node | None:
    """Append the leaves of ``value`` to ``leaves`` and return its structure; ``None`` is a leaf.

    Taken apart are tuples, lists, dictionaries, named tuples, dataclasses and the output classes
    of diffusers and transformers; everything else is a leaf.
    """
    kind = type(value)
    try:
        container = _containers[kind]
    except KeyError:
        container = _containers[kind] = _container(kind)
    if container is None:
        leaves.append(value)
        return None
    if depth > MAX_DEPTH:
        raise UnsupportedError(
            f"a {kind.__name__} is nested deeper than {MAX_DEPTH} levels, or contains itself; "
            "pass tensors in flatter containers"
        )
    names: tuple[Any, ...] | None = None
    parts: Any = value
    if container == "mapping":
        names = tuple(value)
        parts = value.values()
    elif container == "fields":
        names = tuple(field.name for field in dataclasses.fields(value))
        parts = [getattr(value, name, None) for name in names]
    elif len(value) > LONG_SEQUENCE and ATOMS.issuperset(map(type, value)):
        leaves.append(value)
        return None
    return Node(kind, names, tuple([flatten(part, leaves, depth + 1) for part in parts]))


def unflatten(node: Node | None, leaves: Iterator[Any], like: Any = None) -> Any:
    """The value of structure ``node`` whose leaves come from ``leaves``, in order.

    ``like`` is the value that was flattened; what its type keeps beside its leaves (the factory
    of a ``defaultdict``, a dataclass's plain attributes) is taken from it.
    """
    if node is None:
        return next(leaves)
    kind, names, children = node
    if names is None:
        originals = like if like is not None else [None] * len(children)
        parts = [unflatten(c, leaves, o) for c, o in zip(children, originals, strict=True)]
        if kind is list:
            return parts
        return kind(*parts) if _is_named_tuple(kind) else kind(parts)
    if _is_dataclass(kind):
        fields = {n: unflatten(c, leaves, getattr(like, n, None)) for n, c in zip(names, children)}
        if issubclass(kind, OrderedDict):  # the output classes of diffusers and transformers
            return kind(**fields)
        made = copy.copy(like) if like is not None else object.__new__(kind)
        for name, part in fields.items():
            object.__setattr__(made, name, part)
        return made
    made = kind() if like is None or kind is dict else copy.copy(like)
    for name, child in zip(names, children):
        made[name] = unflatten(child, leaves, None if like is None else like[name])
    return made


def tree_leaves(value: Any) -> list[Any]:
    """The leaves of ``value`` in the order of :func:`flatten`."""
    leaves: list[Any] = []
    flatten(value, leaves)
    return leaves


def tree_tensors(value: Any) -> list[torch.Tensor]:
    """The tensors among the leaves of ``value``."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """``value`` with each tensor replaced by ``function(tensor)``; other leaves pass through.

    A tensor that occurs twice is mapped once and occurs twice in the result.
    """
    leaves: list[Any] = []
    node = flatten(value, leaves)
    mapped: dict[int, Any] = {}
    out = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            if id(leaf) not in mapped:
                mapped[id(leaf)] = function(leaf)
            leaf = mapped[id(leaf)]
        out.append(leaf)
    return unflatten(node, iter(out), value)


def refuse_hidden_tensors(leaf: Any, what: str) -> None:
    """Refuse an output that is no known container, and yet holds a tensor of the graph."""
    if isinstance(leaf, (torch.nn.Module, type)):
        return
    held = dict(enumerate(leaf)) if isinstance(leaf, (set, frozenset, deque)) else {}
    attributes = getattr(leaf, "__dict__", None)
    if isinstance(attributes, dict):
        held.update(attributes)
    for name, value in held.items():
        if isinstance(value, torch.Tensor):
            place = "" if isinstance(name, int) else f" in its attribute {name!r}"
            raise UnsupportedError(
                f"{what} is a {type(leaf).__name__} that holds a tensor{place}, which no replay "
                "would refresh; return tensors in a tuple, list, dict, named tuple or dataclass"
            )


def describe_path(node: Node | None, index: int, root: str = "output") -> str:
    """The path of leaf number ``index`` in a value of structure ``node``: ``output[1].sample``."""

    def walk(node: Node | None, path: str) -> Iterator[str]:
        if node is None:
            yield path
            return
        attributes = _is_dataclass(node.kind)
        for position, child in enumerate(node.children):
            name = position if node.names is None else node.names[position]
            yield from walk(child, f"{path}.{name}" if attributes else f"{path}[{name!r}]")

    return next(path for i, path in enumerate(walk(node, root)) if i == index)
