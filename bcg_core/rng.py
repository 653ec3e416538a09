"""Random state kept as it was over a stretch of code."""

from __future__ import annotations

import random
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from bcg_core.errors import CaptureError

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


@contextmanager
def draws_noticed() -> Iterator[None]:
    """Refuse a body that draws from the generators of Python or NumPy: a replay would not."""
    numpy = sys.modules.get("numpy.random")
    python_state = random.getstate()
    numpy_state = numpy.get_state() if numpy is not None else None
    try:
        yield
    finally:
        drawn = []
        if random.getstate() != python_state:
            random.setstate(python_state)
            drawn.append("Python")
        if numpy is not None and str(numpy.get_state()) != str(numpy_state):
            numpy.set_state(numpy_state)
            drawn.append("NumPy")
    if drawn:
        raise CaptureError(
            f"forward draws from the random generator of {' and '.join(drawn)}, which a replay "
            "would not; draw before the call, or with torch"
        )
