"""Random state kept as it was over a stretch of code."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def preserved(
    generators: tuple[torch.Generator, ...] = (), device: torch.device | None = None
) -> Iterator[None]:
    """Put back the state of the default generators and of ``generators``, however the body ends.

    The default generators are the CPU's and, where ``device`` is a CUDA device, that device's.
    """
    cpu = torch.default_generator.get_state()
    given = [generator.get_state() for generator in generators]
    cuda = torch.cuda.get_rng_state(device) if _is_cuda(device) else None
    try:
        yield
    finally:
        torch.default_generator.set_state(cpu)
        for generator, state in zip(generators, given):
            generator.set_state(state)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)  # type: ignore[arg-type]


def _is_cuda(device: torch.device | None) -> bool:
    return device is not None and device.type == "cuda"
