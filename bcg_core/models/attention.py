"""What "broken at attention" means for a module: found by watching one forward, not by lists."""

from __future__ import annotations

import functools
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from bcg_core.placement import exchanged, sites, submodule_site

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from bcg_core.placement import Site

FUNCTIONS = (
    "torch.nn.functional:scaled_dot_product_attention",
    "diffusers.models.attention_dispatch:dispatch_attention_fn",
)


class Attention:
    """What the forwards of one thread met: each attention call counted once, by its pattern.

    ``functions``: calls of attention functions, without those that another one made. ``silent``:
    calls of modules that have a processor and that met no other attention.
    """

    def __init__(self) -> None:
        self.functions: dict[str, int] = {}
        self.silent: dict[str, int] = {}
        # For each module with a processor that is running: has it met attention yet?
        self._met: list[bool] = []
        self._in_function = False

    @property
    def patterns(self) -> list[str]:
        """Break patterns, each as small as it can be: a function rather than its processor."""
        return [*self.functions, *self.silent]

    def _count(self, counts: dict[str, int], name: str) -> None:
        counts[name] = counts.get(name, 0) + 1
        if self._met:
            self._met[-1] = True

    def _watch_function(self, site: Site) -> Callable[..., Any]:
        @functools.wraps(site.function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._in_function:
                return site.function(*args, **kwargs)
            self._count(self.functions, site.name)
            self._in_function = True
            try:
                return site.function(*args, **kwargs)
            finally:
                self._in_function = False

        return watched

    def _watch_processor(self, site: Site) -> Callable[..., Any]:
        @functools.wraps(site.function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            self._met.append(False)
            try:
                return site.function(*args, **kwargs)
            finally:
                if not self._met.pop():
                    self._count(self.silent, site.name)
                elif self._met:
                    self._met[-1] = True

        return watched


@contextmanager
def observed(module: torch.nn.Module | None) -> Iterator[Attention]:
    """Watch the attention of the forward passes in the body."""
    seen = Attention()
    changes: list[tuple[Site, Callable[..., Any]]] = []
    for pattern in FUNCTIONS:
        # What is not imported is not called; diffusers is not imported for its own sake.
        if pattern.partition(":")[0] in sys.modules:
            (site,) = sites(module, pattern)
            changes.append((site, seen._watch_function(site)))
    if module is not None:
        for path, submodule in module.named_modules():
            if path and callable(getattr(submodule, "processor", None)):
                site = submodule_site(path, submodule)
                changes.append((site, seen._watch_processor(site)))
    with exchanged(changes):
        yield seen
