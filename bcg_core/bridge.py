"""Bridges: what a break returned at capture, kept at its address and refilled at each replay.

The segment after a break has the addresses of the break's outputs burnt in. At replay the break
returns fresh tensors somewhere else; their bytes are copied to the old addresses. So the memory
of a bridge has to live as long as the graph, or belong to the graph's own pool.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from bcg_core.errors import BridgeError
from bcg_core.layout import Layout, Span, layout_of, overlapping, require_plain
from bcg_core.tree import (
    ATOMS,
    Node,
    describe_path,
    flatten,
    refuse_hidden_tensors,
    unflatten,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


def _copy_output(tensors: Sequence[torch.Tensor]) -> list[Span]:
    """Copies of a break's output tensors, those that overlap kept together, leaf by leaf."""
    return [Span.copy_of([tensors[i] for i in group]) for group in overlapping(tensors)]


class Bridge:
    """The output of one break, in the structure in which the break returned it."""

    def __init__(self, name: str, output: Any, inputs: Sequence[torch.Tensor]) -> None:
        self.name = name
        leaves: list[Any] = []
        self._node: Node | None = flatten(output, leaves)
        memory = {t.untyped_storage().data_ptr() for t in inputs if t.layout is torch.strided}
        self._layouts: list[Layout | None] = [None] * len(leaves)
        # Addresses of outputs that lie in the memory of an input: there is nothing to copy.
        self._passed: dict[int, int] = {}
        self._plain: dict[int, Any] = {}
        copied: list[int] = []
        for index, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                refuse_hidden_tensors(leaf, f"{self._path(index)} of break {name}")
                self._plain[index] = leaf
                continue
            require_plain(leaf, f"{self._path(index)} of break {name}")
            self._layouts[index] = layout_of(leaf)
            address = leaf.untyped_storage().data_ptr()
            if address and address in memory:
                self._passed[index] = leaf.data_ptr()
            else:
                copied.append(index)
        tensors = [leaves[i] for i in copied]
        self._groups = [[copied[i] for i in group] for group in overlapping(tensors)]
        self._spans = _copy_output(tensors)
        # The same tensor returned twice is one tensor to the next segment, too.
        same: dict[int, torch.Tensor] = {}
        for group, span in zip(self._groups, self._spans):
            for index, view in zip(group, span.views):
                leaves[index] = same.setdefault(id(leaves[index]), view)
        self._leaves: list[Any] | None = leaves
        self._original = output

    def tensors(self) -> list[torch.Tensor]:
        """The tensors that the bridge holds."""
        return [view for span in self._spans for view in span.views]

    def take(self) -> Any:
        """The bridged output for the body of the capture; once, so that it is not kept alive."""
        leaves, original = self._leaves, self._original
        self._leaves = self._original = None
        assert leaves is not None
        return unflatten(self._node, iter(leaves), original)

    def refill(self, output: Any) -> None:
        """Copy a fresh output of the break over the bridge.

        Raises :class:`BridgeError` where it is not the like of what was captured; the graph then
        cannot go on, since the next segment would read something else.
        """
        leaves: list[Any] = []
        node = flatten(output, leaves)
        if node != self._node:
            raise self._error(
                f"returned another structure: {_outline(node)}, captured was {_outline(self._node)}"
            )
        for index, (leaf, layout) in enumerate(zip(leaves, self._layouts)):
            if layout is None:
                self._compare_plain(index, leaf)
            elif not isinstance(leaf, torch.Tensor):
                raise self._error(
                    f"{self._path(index)} is a {type(leaf).__name__}, captured was a tensor"
                )
            else:
                self._compare_layout(index, leaf, layout)
        with torch.no_grad():
            for group, span in zip(self._groups, self._spans):
                fresh = [leaves[i] for i in group]
                if len(group) > 1 and self._moved(fresh, span):
                    raise self._error("its outputs no longer overlap in memory as at capture")
                span.refill(fresh)

    def _moved(self, fresh: list[torch.Tensor], span: Span) -> bool:
        starts = [t.data_ptr() for t in fresh]
        low = min(starts)
        same_memory = len({t.untyped_storage().data_ptr() for t in fresh}) == 1
        return not same_memory or tuple(s - low for s in starts) != span.offsets

    def _compare_layout(self, index: int, leaf: torch.Tensor, layout: Layout) -> None:
        fresh = layout_of(leaf)
        if fresh != layout:
            for field, now, then in zip(Layout._fields, fresh, layout):
                if now != then:
                    raise self._error(
                        f"{self._path(index)} has {field} {_show(now)}, captured was {_show(then)}"
                    )
        if leaf.numel() and leaf.data_ptr() != self._passed.get(index, leaf.data_ptr()):
            raise self._error(
                f"{self._path(index)} was the memory of an input at capture and no longer is"
            )

    def _compare_plain(self, index: int, leaf: Any) -> None:
        captured = self._plain[index]
        if leaf is captured:
            return
        if type(leaf) is not type(captured) or not _same_plain(leaf, captured):
            raise self._error(
                f"{self._path(index)} is {_show(leaf)}, captured was {_show(captured)}; the "
                "segment after the break has the captured value burnt in"
            )

    def _path(self, index: int) -> str:
        return describe_path(self._node, index)

    def _error(self, what: str) -> BridgeError:
        return BridgeError(
            f"break {self.name}: {what}; capture again with these inputs, or make the break "
            "return the same at every call"
        )


def _same_plain(a: Any, b: Any) -> bool:
    """Whether two non-tensor leaves of one type count as unchanged.

    Plain values are compared; other objects cannot be compared without running their code, so
    that two of one type count as the same.
    """
    if isinstance(a, float):
        return (a == b and math.copysign(1, a) == math.copysign(1, b)) or (a != a and b != b)
    comparable = (*ATOMS, torch.dtype, torch.device, torch.Size, list, tuple, slice, range)
    if isinstance(a, (*comparable, type)):
        return bool(a == b)
    return True


def _show(value: Any) -> str:
    text = str(value) if not isinstance(value, str) else repr(value)
    return text if len(text) <= 80 else text[:77] + "…"


def _outline(node: Node | None) -> str:
    if node is None:
        return "one leaf"
    names = "" if node.names is None else " of " + ", ".join(map(str, node.names))
    return f"{node.kind.__name__} with {len(node.children)} entries{names}"
