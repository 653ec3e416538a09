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
    if device is not None and device.type != "cuda":
        device = None
    cuda = torch.cuda.get_rng_state(device) if device is not None else None
    try:
        yield
    finally:
        torch.default_generator.set_state(cpu)
        for generator, state in zip(generators, given):
            generator.set_state(state)
        if cuda is not None and device is not None:
            torch.cuda.set_rng_state(cuda, device)
