"""GraphRunner: a module in front of which captured graphs answer the calls they know."""

from __future__ import annotations

import inspect
import logging
import os
import threading
import time
import traceback
from collections import OrderedDict
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from bcg_core import backends
from bcg_core.breaks import capture_in_progress
from bcg_core.captured import CapturedCall, WarmUpError
from bcg_core.errors import CaptureError, UnsupportedError
from bcg_core.plan import plans_for
from bcg_core.signature import Call, HostTest, difference
from bcg_core.stats import Stats
from bcg_core.tree import tree_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from bcg_core.backends import Backend, Pool
    from bcg_core.plan import Plan
    from bcg_core.signature import Signature

logger = logging.getLogger("bcg_core")

# A module whose tensors are replaced again and again would be captured again and again.
MAX_INVALIDATIONS = 8


@dataclass(frozen=True)
class CaptureEvent:
    """What ``on_capture`` is told."""

    module: str
    """The runner's name: the module's class, or its name in the pipeline."""
    segments: int
    """Segments of the new graph."""
    breaks: int
    """Breaks of the new graph."""
    seconds: float
    """How long warm-up and capture took, plans that failed before included."""
    pool_bytes: int
    """Bytes reserved by the pool, which all graphs of the runner share."""
    graphs: int
    """Graphs held now, the new one included."""


class GraphRunner:
    """Calls ``module`` through captured graphs; lossless, or eager with the reason counted.

    The first call of a signature (shapes, strides, dtypes, Python values, modes and flags) warms
    up, captures and replays; later ones replay. Results are the caller's own. A call that needs
    gradients runs eagerly, as does one that cannot be captured.

    ``breaks``: ``"auto"`` (the adapter's plan, else whole, and if that is refused broken at
    attention), ``"attention"``, ``"none"``, or patterns: a glob on the module path, a class name,
    or ``package.module:function``. ``host_inputs`` names tensor arguments that live on the host;
    their content is part of the signature. ``max_graphs`` and ``max_pool_bytes`` bound what is
    kept, the least recently used goes first. ``forward`` is what to capture in place of
    ``module.__call__``; ``ahead`` gives further calls to capture when one is captured.
    ``on_capture`` is told of each graph, ``on_miss`` and ``on_fallback`` get the reason of each
    call that no graph answered and of each capture that failed.

    Raises :class:`UnsupportedError` for a pattern that matches nothing, for a backend that is not
    there, and for any ``mode`` or ``plan`` but the default; ``ValueError`` for no graphs at all.
    """

    def __init__(
        self,
        module: Callable[..., Any],
        breaks: str | Sequence[str] = "auto",
        mode: Literal["lossless"] = "lossless",
        plan: None = None,
        host_inputs: Sequence[str] = (),
        max_graphs: int = 8,
        max_pool_bytes: int | None = None,
        backend: str = "auto",
        *,
        on_capture: Callable[[CaptureEvent], None] | None = None,
        on_miss: Callable[[str], None] | None = None,
        on_fallback: Callable[[str], None] | None = None,
        forward: Callable[..., Any] | None = None,
        ahead: Callable[..., Iterable[tuple[tuple[Any, ...], dict[str, Any]]]] | None = None,
    ) -> None:
        if mode != "lossless":
            raise UnsupportedError(f"mode {mode!r} is not served; the one mode is 'lossless'")
        if plan is not None:
            raise UnsupportedError("plan= is not served; give patterns with breaks=[...] instead")
        if max_graphs < 1:
            raise ValueError(f"max_graphs is {max_graphs}; at least one graph has to be kept")
        backends.resolve(backend)
        self.module = module
        self.name = type(module).__name__
        self.breaks = breaks
        self.max_graphs = max_graphs
        self.max_pool_bytes = max_pool_bytes
        self.sealed = False
        self._module = module if isinstance(module, torch.nn.Module) else None
        self._body = forward or module
        self._backend_name = backend
        self._host_inputs = tuple(host_inputs)
        self._parameters = _parameter_names(
            forward if forward is not None else getattr(module, "forward", module)
        )
        self._on_capture = on_capture
        self._on_miss = on_miss
        self._on_fallback = on_fallback
        self._ahead = ahead
        self._plans = plans_for(self._module, breaks)
        # Serialises calls from threads; a thread that comes back to the runner is let through
        # and runs eagerly.
        self._lock = threading.RLock()
        self._busy = False
        self._pool: Pool | None = None
        self._backend: Backend | None = None
        self._graphs: OrderedDict[Signature, CapturedCall] = OrderedDict()
        self._failed: dict[Signature, str] = {}
        self._counts: dict[str, int] = {}
        self._misses: dict[str, int] = {}
        self._invalidations = 0

    # Calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What ``module(*args, **kwargs)`` returns."""
        if os.environ.get("BCG_DISABLE") == "1":
            return self._eager(args, kwargs)
        if capture_in_progress():
            return self._body(*args, **kwargs)
        with self._lock:
            if self._busy:
                return self._body(*args, **kwargs)
            self._busy = True
            try:
                return self._answer(args, kwargs)
            finally:
                self._busy = False

    def _answer(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call, reason = self._take_apart(args, kwargs)
        if call is None:
            return self._miss(reason, args, kwargs)
        assert self._backend is not None
        if self._backend.is_capturing():
            return self._body(*args, **kwargs)
        with self._on_device(call):
            captured = self._graphs.get(call.signature)
            if captured is not None:
                stale = captured.state.difference()
                if stale is None:
                    overlap = captured.overlap(call)
                    if overlap is not None:
                        return self._miss(overlap, args, kwargs)
                    self._count("calls")
                    self._count("replays")
                    self._graphs.move_to_end(call.signature)
                    return self._replay(captured, call)
                self._invalidate(stale)
                reason = stale
            else:
                reason = self._failed.get(call.signature) or self._reason(call)
            if self.sealed or call.signature in self._failed or self._unstable():
                return self._miss(reason, args, kwargs)
            self._note_miss(reason)
            captured = self._capture(call)
            if captured is None or captured.overlap(call) is not None:
                return self._eager(args, kwargs)
            self._count("calls")
            result = self._replay(captured, call)
            self._capture_ahead(args, kwargs)
            return result

    def capture(self, *args: Any, **kwargs: Any) -> bool:
        """Capture this call's signature without computing a result; whether a graph is there.

        Draws no random numbers and leaves buffers as they were.
        """
        if os.environ.get("BCG_DISABLE") == "1" or self.sealed or capture_in_progress():
            return False
        with self._lock:
            call, _ = self._take_apart(args, kwargs)
            if call is None or self._busy:
                return False
            self._busy = True
            try:
                with self._on_device(call):
                    return self._ensure(call)
            finally:
                self._busy = False

    def explain(self, *args: Any, **kwargs: Any) -> str:
        """One line: whether this call would be replayed, and if not which argument differs."""
        with self._lock:
            call, reason = self._take_apart(args, kwargs)
            if call is None:
                return f"runs eagerly: {reason}"
            captured = self._graphs.get(call.signature)
            if captured is not None:
                stale = captured.state.difference()
                return "replays" if stale is None else f"misses: {stale}"
            if call.signature in self._failed:
                return f"runs eagerly: {self._failed[call.signature]}"
            return f"misses: {self._reason(call)}"

    @property
    def stats(self) -> Stats:
        """Counters and what is held now."""
        with self._lock:
            graphs = [captured.graph for captured in self._graphs.values()]
            return Stats(
                calls=self._counts.get("calls", 0),
                captures=self._counts.get("captures", 0),
                replays=self._counts.get("replays", 0),
                misses=dict(self._misses),
                fallbacks=self._counts.get("fallbacks", 0),
                eager_calls=self._counts.get("eager_calls", 0),
                evictions=self._counts.get("evictions", 0),
                graphs=len(graphs),
                segments=sum(graph.segments for graph in graphs),
                breaks=sum(graph.breaks for graph in graphs),
                pool_bytes=self._pool.bytes() if self._pool is not None and graphs else 0,
            )

    def break_names(self) -> list[str]:
        """The breaks of the graph captured last: function, file and line."""
        with self._lock:
            return next(reversed(self._graphs.values())).graph.break_names() if self._graphs else []

    def seal(self) -> None:
        """Capture nothing from now on: a call replays or runs eagerly, and both are counted."""
        self.sealed = True

    def reset(self) -> None:
        """Forget every graph and give its memory back; counters stay, the seal is taken off."""
        with self._lock:
            self._drop_graphs()
            self._failed.clear()
            self._invalidations = 0
            self.sealed = False

    def __reduce__(self) -> Any:
        raise TypeError(
            "a GraphRunner holds device addresses and cannot be copied or pickled; copy the "
            "module and make a new runner for it"
        )

    # Inside

    def _take_apart(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call | None, str]:
        """The call's signature, or the reason why it has to run eagerly."""
        if torch.is_grad_enabled() and self._needs_grad(args, kwargs):
            return None, "the call needs gradients"
        try:
            device = self._device(args, kwargs)
            self._backend = backends.resolve(self._backend_name, device)
            on_cuda = self._backend.name == "cuda"
            if on_cuda and (device is None or device.type != "cuda"):
                raise UnsupportedError(
                    "backend 'cuda' and a call without CUDA tensors; move the module and its "
                    "arguments to the GPU, or use backend='simulated'"
                )
            if not on_cuda and device is not None and device.type == "cuda":
                raise UnsupportedError(
                    f"backend 'simulated' and tensors on {device}; use backend='cuda' or 'auto'"
                )
            test = HostTest(self._host_inputs, on_cuda, self._parameters)
            return Call(args, kwargs, test, device), ""
        except UnsupportedError as error:
            return None, str(error)

    def _needs_grad(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if self._module is not None and any(p.requires_grad for p in self._module.parameters()):
            return True
        return any(t.requires_grad for t in tree_tensors((args, kwargs)))

    def _device(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
        tensors = tree_tensors((args, kwargs))
        for tensor in tensors:
            if tensor.is_cuda:
                return tensor.device
        if self._module is not None:
            parameter = next(self._module.parameters(), None)
            if parameter is not None:
                return parameter.device
        return tensors[0].device if tensors else None

    def _on_device(self, call: Call) -> AbstractContextManager[Any]:
        on_cuda = call.device is not None and call.device.type == "cuda"
        return torch.cuda.device(call.device) if on_cuda else nullcontext()

    def _replay(self, captured: CapturedCall, call: Call) -> Any:
        assert self._pool is not None
        with self._pool.exclusive():
            return captured.replay(call)

    def _ensure(self, call: Call) -> bool:
        captured = self._graphs.get(call.signature)
        if captured is not None:
            stale = captured.state.difference()
            if stale is None:
                return True
            self._invalidate(stale)
        if call.signature in self._failed:
            return False
        return self._capture(call) is not None

    def _capture(self, call: Call) -> CapturedCall | None:
        """Capture under the first plan that works; on failure one warning, and ``None``."""
        assert self._backend is not None
        started = time.perf_counter()
        failure: Exception | None = None
        for plan in self._plans:
            try:
                captured = self._capture_with(plan, call)
            except WarmUpError as error:
                raise error.error from None
            except Exception as error:
                failure = failure or error
                # The traceback's frames hold the static inputs and the half-made graph.
                traceback.clear_frames(error.__traceback__)
                continue
            if captured is None:
                failure = CaptureError(
                    f"its graph needs more than max_pool_bytes={self.max_pool_bytes}; raise the "
                    "limit or run this shape eagerly"
                )
                break
            self._count("captures")
            self._graphs[call.signature] = captured
            while len(self._graphs) > self.max_graphs:
                self._evict()
            self._tell_capture(captured, time.perf_counter() - started)
            return captured
        reason = f"capture failed: {failure}"
        self._failed[call.signature] = reason
        self._count("fallbacks")
        logger.warning("%s runs eagerly: %s", self.name, reason)
        if self._on_fallback is not None:
            self._on_fallback(str(failure))
        return None

    def _capture_with(self, plan: Plan, call: Call) -> CapturedCall | None:
        captured = self._capture_once(plan, call)
        limit = self.max_pool_bytes
        if limit is None or self._pool is None or self._pool.bytes() <= limit:
            return captured
        # A shared pool gives nothing back while one of its graphs lives: begin another.
        captured.graph.reset()
        had_others = bool(self._graphs)
        while self._graphs:
            self._evict()
        self._pool = None
        return self._capture_with(plan, call) if had_others else None

    def _capture_once(self, plan: Plan, call: Call) -> CapturedCall:
        assert self._backend is not None
        if self._pool is None:
            self._pool = self._backend.new_pool()
        return CapturedCall(
            self._body,
            self._module,
            call,
            self._backend,
            self._pool,
            plan,
        )

    def _tell_capture(self, captured: CapturedCall, seconds: float) -> None:
        assert self._pool is not None
        event = CaptureEvent(
            self.name,
            captured.graph.segments,
            captured.graph.breaks,
            seconds,
            self._pool.bytes(),
            len(self._graphs),
        )
        logger.info("captured %s", event)
        if self._on_capture is not None:
            self._on_capture(event)

    def _capture_ahead(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._ahead is None:
            return
        for more_args, more_kwargs in self._ahead(*args, **kwargs):
            call, _ = self._take_apart(more_args, more_kwargs)
            if call is not None and len(self._graphs) < self.max_graphs:
                self._ensure(call)

    def _invalidate(self, reason: str) -> None:
        logger.info("%s: graphs are no longer valid: %s", self.name, reason)
        self._invalidations += 1
        self._drop_graphs()

    def _unstable(self) -> bool:
        return self._invalidations > MAX_INVALIDATIONS

    def _drop_graphs(self) -> None:
        for captured in self._graphs.values():
            captured.graph.reset()
        self._graphs.clear()
        self._pool = None

    def _evict(self) -> None:
        _, oldest = self._graphs.popitem(last=False)
        oldest.graph.reset()
        self._count("evictions")

    def _reason(self, call: Call) -> str:
        """How a call differs from the captured one that is nearest to it."""
        if not self._graphs:
            return "nothing is captured yet"
        candidates = [difference(call, s, self._parameters) for s in self._graphs]
        return "; ".join(min(candidates, key=len)[:3])

    def _note_miss(self, reason: str) -> None:
        self._misses[reason] = self._misses.get(reason, 0) + 1
        if self._on_miss is not None:
            self._on_miss(reason)

    def _miss(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._note_miss(reason)
        return self._eager(args, kwargs)

    def _eager(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._count("calls")
        self._count("eager_calls")
        return self._body(*args, **kwargs)

    def _count(self, what: str) -> None:
        self._counts[what] = self._counts.get(what, 0) + 1


def _parameter_names(function: Callable[..., Any]) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ()
