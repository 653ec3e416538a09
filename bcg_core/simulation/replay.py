"""A recorded stretch of operations, run again on the recorded addresses."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from bcg_core import monitor
from bcg_core.errors import ReplayError, UseAfterFreeError

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable

    from bcg_core.location import Location
    from bcg_core.simulation.memory import Life

_copy_ = torch.ops.aten.copy_.default._op


class Step(NamedTuple):
    """One recorded event: call ``run(*args, **kwargs)``, copy what it returns into ``out``."""

    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: torch.Tensor | None
    name: str
    location: Location | None
    written: tuple[torch.Tensor, ...] = ()


class Read(NamedTuple):
    """Memory outside the arena that a segment reads: it must still be there at replay."""

    owner: weakref.ref[Any]
    name: str
    location: Location
    life: Life | None


def copy_all(results: Any, outs: tuple[torch.Tensor | None, ...]) -> None:
    """Copy each of an operation's results to its recorded address; ``None`` is not recorded."""
    for result, out in zip(results, outs):
        if out is not None:
            _copy_(out, result)


class SimulatedSegment:
    """The steps of one segment. They hold no memory: addresses are all they know."""

    def __init__(self, steps: list[Step], reads: list[Read]) -> None:
        self.steps = steps
        self.reads = reads
        self._calls = [step[:4] for step in steps]

    def replay(self) -> None:
        """Run the steps in order, below autograd, autocast and every Python mode.

        What autocast, autograd or a mode did at capture was recorded as operations already.
        """
        for read in self.reads:
            if read.owner() is None:
                raise UseAfterFreeError(
                    f"{read.name}, recorded at {read.location}, reads memory outside the pool that "
                    "has been freed since; the graph, or a bridge, has to hold it",
                    "outside" if read.life is None else "bridge",
                    read.name,
                    read.location,
                    read.life,
                )
        watching = monitor.current()
        done = 0
        with ExitStack() as stack:
            stack.enter_context(torch._C._DisableTorchDispatch())
            stack.enter_context(torch._C.DisableTorchFunction())
            stack.enter_context(torch._C._DisableAutocast())
            stack.enter_context(torch._C._AutoDispatchBelowAutograd())
            try:
                for run, args, kwargs, out in self._calls:
                    if out is None:
                        run(*args, **kwargs)
                    else:
                        _copy_(out, run(*args, **kwargs))
                    if watching is not None:
                        watching.ran(self.steps[done])
                    done += 1
            except Exception as error:
                step = self.steps[done]
                raise ReplayError(
                    f"replaying {step.name}, recorded at {step.location}: {error}; an input "
                    "outside the range that this operation takes, or memory that nothing wrote"
                ) from error

    def release(self) -> None:
        """Forget the steps."""
        self.steps = []
        self.reads = []
        self._calls = []
