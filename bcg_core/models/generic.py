"""The adapter of every model that has none of its own."""

from __future__ import annotations

from bcg_core.models.adapter import Adapter

ADAPTER = Adapter(
    "generic",
    module_classes=(),
    source="nothing is assumed: no padding, no breaks; whole, or broken at attention if refused",
)
