"""Which GPUs a test asks for, and whether this machine has them.

Torch is imported only once a test that is going to run carries the marker ``gpu``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence

_SIZE = re.compile(r"\s*(\d{1,18}(?:\.\d+)?)\s*([kmgt]?)(i?)b\s*", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(text: str) -> int:
    """Bytes in ``'20GiB'`` (binary) or ``'20GB'`` (decimal). ``ValueError`` for anything else."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a size: write it as '20GiB' or '512MB'")
    number, prefix, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** _POWERS[prefix.lower()])


def is_size(value: object) -> bool:
    return isinstance(value, str) and _SIZE.fullmatch(value) is not None


@dataclass(frozen=True)
class Demand:
    """What a ``gpu`` marker asks for: devices, and bytes of memory on each of them."""

    count: int = 1
    memory: int | None = None

    @classmethod
    def of(cls, item: pytest.Item) -> Demand | None:
        mark = item.get_closest_marker("gpu")
        if mark is None:
            return None
        given = dict(zip(("count", "memory"), mark.args)) | dict(mark.kwargs)
        memory = given.get("memory")
        return cls(given.get("count") or 1, None if memory is None else parse_size(memory))


def skip_without_devices(items: Sequence[pytest.Item]) -> None:
    """Mark the tests that ask for more GPUs than there are as skipped, with the reason.

    Counting devices makes no CUDA context, so it is safe in a process that tests are spawned from.
    """
    for item in items:
        demand = None if item.get_closest_marker("skip") else Demand.of(item)
        if demand is not None and (reason := _too_few(demand.count)):
            item.add_marker(pytest.mark.skip(reason=reason), append=False)


def skip_without_memory(item: pytest.Item) -> None:
    """Skip, as the test is set up, unless enough devices have the memory that it asks for.

    Reading a device's memory makes a CUDA context, which belongs into the test's own process.
    """
    demand = Demand.of(item)
    if demand is None or demand.memory is None:
        return
    import torch

    sizes = [
        torch.cuda.get_device_properties(index).total_memory
        for index in range(torch.cuda.device_count())
    ]
    if sum(size >= demand.memory for size in sizes) < demand.count:
        listed = ", ".join(f"{size / 1024**3:.1f} GiB" for size in sizes) or "none"
        pytest.skip(
            f"needs {demand.count} GPU(s) with {demand.memory / 1024**3:.1f} GiB; here: {listed}"
        )


def _too_few(count: int) -> str | None:
    try:
        import torch
    except ImportError as error:
        return f"needs {count} GPU(s), and torch cannot be imported: {error}"
    there = torch.cuda.device_count()
    if there >= count:
        return None
    return f"needs {count} GPU(s), this machine has {there or 'none'}"
