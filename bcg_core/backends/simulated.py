"""The simulated backend: CUDA-graph semantics on CPU tensors."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from bcg_core.backends.pool_lock import PoolLock
from bcg_core.errors import UnsupportedError
from bcg_core.simulation.memory import Arena
from bcg_core.simulation.recorder import DeviceMode, SimulatedRecorder

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    import torch

    from bcg_core.backends import Pool


class SimulatedPool(PoolLock):
    """An arena for what segments allocate, and a heap for what breaks allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena()
        self.heap = Arena()

    @property
    def handle(self) -> SimulatedPool:
        return self

    def bytes(self) -> int:
        return self.arena.bytes()


class SimulatedBackend:
    """Records ATen operations on the CPU and replays them on the recorded addresses."""

    name = "simulated"

    def new_pool(self, handle: Any = None) -> SimulatedPool:
        if handle is None:
            return SimulatedPool()
        if not isinstance(handle, SimulatedPool):
            raise UnsupportedError(
                f"a pool of type {type(handle).__name__} is not one of the simulation's; pass "
                "what another simulated graph's pool() returned"
            )
        return handle

    def recorder(
        self,
        pool: Pool,
        hold: Callable[[torch.Tensor], None],
        stream: Any = None,
        generators: tuple[torch.Generator, ...] = (),
    ) -> SimulatedRecorder:
        assert isinstance(pool, SimulatedPool)
        return SimulatedRecorder(pool.arena, pool.heap, hold, generators)

    def eager(self, pool: Pool) -> DeviceMode:
        assert isinstance(pool, SimulatedPool)
        return DeviceMode(pool.heap)

    def warm_up(self) -> AbstractContextManager[None]:
        return nullcontext()

    def is_capturing(self) -> bool:
        return False


SIMULATED = SimulatedBackend()
