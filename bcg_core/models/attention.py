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
    """What one forward met: attention functions, and processors that called none of them."""

    def __init__(self) -> None:
        self.functions: dict[str, int] = {}
        self.silent: dict[str, int] = {}
        self._open: list[list[bool]] = []

    @property
    def patterns(self) -> list[str]:
        """Break patterns, each as small as it can be: a function rather than its processor."""
        return [*self.functions, *self.silent]

    def _watch_function(self, site: Site) -> Callable[..., Any]:
        @functools.wraps(site.function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.functions[site.name] = self.functions.get(site.name, 0) + 1
            for met in self._open:
                met[0] = True
            return site.function(*args, **kwargs)

        return watched

    def _watch_processor(self, site: Site) -> Callable[..., Any]:
        @functools.wraps(site.function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            met = [False]
            self._open.append(met)
            try:
                return site.function(*args, **kwargs)
            finally:
                self._open.pop()
                if not met[0]:
                    self.silent[site.name] = self.silent.get(site.name, 0) + 1

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
