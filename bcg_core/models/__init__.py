"""Which model families have an adapter; every other module gets the generic one."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from bcg_core.models import generic, qwen_image, z_image

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bcg_core.models.adapter import Adapter

_ADAPTERS = (z_image.ADAPTER, qwen_image.ADAPTER)


def registered() -> Mapping[str, Adapter]:
    """Adapters by the name of the module class that they serve."""
    return MappingProxyType({name: a for a in _ADAPTERS for name in a.module_classes})


def adapter_for(module: Any) -> Adapter:
    """The adapter of the module's class or of one that it derives from, else the generic one.

    Only of diffusers' classes: others of the same name take other arguments.
    """
    by_name = registered()
    for kind in type(module).__mro__:
        if kind.__name__ in by_name and kind.__module__.partition(".")[0] == "diffusers":
            return by_name[kind.__name__]
    return generic.ADAPTER
