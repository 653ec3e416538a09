"""What kind of operation this is: what it writes, whether a capture can hold it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

READS_HOST = "it reads a value of a tensor on the host, which waits for the device"
DATA_SHAPE = "the shape of its result depends on the data"

# Refused by name, whatever their tags say.
_REFUSED = {
    "aten::_linalg_check_errors": READS_HOST,
    "aten::nonzero": DATA_SHAPE,
    "aten::nonzero_numpy": DATA_SHAPE,
    "aten::masked_select": DATA_SHAPE,
    "aten::bincount": DATA_SHAPE,
    "aten::equal": READS_HOST,
    "aten::is_nonzero": READS_HOST,
    "aten::item": READS_HOST,
    "aten::resize_": "the simulation has no resize of memory inside a capture",
}
_EMPTY = {
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::empty_permuted",
    "aten::new_empty",
    "aten::new_empty_strided",
}
_INDEX_PUT = {"aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
# Views in all but their schema, or that only point a tensor at other memory.
_METADATA_ONLY = {"aten::_unsafe_view", "aten::_reshape_alias", "aten::set_", "aten::lift"}


class Traits(NamedTuple):
    """What recording needs to know of one operator overload."""

    name: str
    refused: str | None
    # Run at once, on the real tensors: only their metadata changes.
    immediate: bool
    empty: bool
    random: bool
    # Place and name of each argument that is written to.
    writes: tuple[tuple[int, str], ...]


_traits: dict[Any, Traits] = {}


def traits_of(operation: Any) -> Traits:
    """The traits of an ``OpOverload``."""
    known = _traits.get(operation)
    if known is None:
        known = _traits[operation] = _look(operation)
    return known


def _look(operation: Any) -> Traits:
    schema = operation._schema
    name = schema.name
    tags = operation.tags
    refused = _REFUSED.get(name)
    if refused is None and name not in ("aten::index", "aten::repeat_interleave"):
        if torch.Tag.dynamic_output_shape in tags:
            refused = DATA_SHAPE
        elif torch.Tag.data_dependent_output in tags:
            refused = READS_HOST
    if refused is None and name in ("aten::linspace", "aten::logspace"):
        bounds = [a.type for a in schema.arguments[:2]]
        if any("Tensor" in str(kind) for kind in bounds):
            refused = READS_HOST
    writes = tuple(
        (place, argument.name)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    returns_view = any(
        r.alias_info is not None and not r.alias_info.is_write for r in schema.returns
    )
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(
        operation.name(), "CompositeImplicitAutograd"
    )
    immediate = (
        name in _METADATA_ONLY
        or torch.Tag.inplace_view in tags
        or (returns_view and not writes and not composite)
    )
    return Traits(
        name,
        refused,
        immediate,
        name in _EMPTY,
        torch.Tag.nondeterministic_seeded in tags,
        writes,
    )


def written_by(traits: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensor arguments of this call that the operation writes to."""
    written: list[torch.Tensor] = []
    for place, name in traits.writes:
        value = args[place] if place < len(args) else kwargs.get(name)
        parts = value if isinstance(value, (list, tuple)) else (value,)
        written.extend(part for part in parts if isinstance(part, torch.Tensor))
    return written


def refused_call(traits: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Why this very call cannot be captured, where that depends on its arguments."""
    if traits.refused is not None:
        return traits.refused
    if traits.name == "aten::index" and _has_mask(args[1]):
        return DATA_SHAPE
    # With one value the masked positions are filled; with more, they have to be counted.
    if traits.name in _INDEX_PUT and _has_mask(args[1]) and args[2].numel() != 1:
        return DATA_SHAPE
    if traits.name == "aten::repeat_interleave" and kwargs.get("output_size") is None:
        repeats = args[1] if len(args) > 1 else args[0]
        if isinstance(repeats, torch.Tensor):
            return DATA_SHAPE
    return None


def _has_mask(indices: Any) -> bool:
    return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices)
