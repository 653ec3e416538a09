"""enable and disable: a runner in front of the denoisers of a diffusers pipeline."""

from __future__ import annotations

import inspect
import types
from typing import TYPE_CHECKING, Any

import torch

from bcg_core.errors import EnableError
from bcg_core.models import adapter_for
from bcg_core.runner import GraphRunner
from bcg_core.stats import Stats, total

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from bcg_core.runner import CaptureEvent

# The parts of diffusers that hold modules which run once a step; encoders and VAEs run once an
# image, where a graph gains nothing.
_DENOISER_PACKAGES = (
    "diffusers.models.transformers",
    "diffusers.models.unets",
    "diffusers.models.controlnets",
)
_DENOISER_NAMES = ("transformer", "transformer_2", "unet", "controlnet", "prior", "decoder")


class EnabledForward:
    """``module.forward`` while a session is on: the runner, looking like the original."""

    def __init__(self, module: torch.nn.Module, runner: GraphRunner) -> None:
        original = module.forward
        self.original = original
        self.had_own = "forward" in module.__dict__
        self.module = module
        self.runner = runner
        self.__wrapped__ = original
        self.__name__ = "forward"
        self.__qualname__ = getattr(original, "__qualname__", "forward")
        self.__doc__ = original.__doc__
        self.__signature__ = inspect.signature(original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.runner(*args, **kwargs)

    def restore(self) -> None:
        """Put the module's own ``forward`` back, as it was found."""
        if self.had_own:
            self.module.forward = self.original
        else:
            self.module.__dict__.pop("forward", None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # A copy of the module has weights of its own and no graph: it gets its own forward.
        copy = memo.get(id(self.module), self.module)
        return types.MethodType(type(copy).forward, copy)

    def __reduce__(self) -> Any:
        return _own_forward, (self.module,)


def _own_forward(module: torch.nn.Module) -> Any:
    return types.MethodType(type(module).forward, module)


class Session:
    """Runners in front of the denoisers of one pipeline, until :meth:`disable`.

    A context manager. ``runners`` maps the denoiser's name in the pipeline (for a bare module,
    its class name) to its :class:`GraphRunner`.
    """

    def __init__(self, forwards: dict[str, EnabledForward]) -> None:
        self._forwards = forwards
        self.runners = {name: forward.runner for name, forward in forwards.items()}

    @property
    def stats(self) -> Stats:
        """The sum over the runners."""
        return total(runner.stats for runner in self.runners.values())

    def seal(self) -> None:
        """Capture nothing from now on."""
        for runner in self.runners.values():
            runner.seal()

    def disable(self) -> None:
        """Put every module's ``forward`` back and give the graphs' memory back.

        The statistics stay readable. Safe to call twice.
        """
        for name, forward in self._forwards.items():
            now = forward.module.__dict__.get("forward")
            if now is forward:
                forward.restore()
            elif _wraps(now, forward):
                raise EnableError(
                    f"{name}.forward was wrapped by something else after enable(); take that off "
                    "first, then disable() can put the original back"
                )
            forward.runner.reset()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exception: object) -> None:
        self.disable()


def _wraps(function: Any, forward: EnabledForward) -> bool:
    seen: set[int] = set()
    while function is not None and id(function) not in seen:
        if function is forward:
            return True
        seen.add(id(function))
        function = getattr(function, "__wrapped__", None) or getattr(function, "func", None)
    return False


def enable(
    target: Any,
    *,
    breaks: str | Sequence[str] = "auto",
    max_graphs: int = 8,
    max_pool_bytes: int | None = None,
    backend: str = "auto",
    text_buckets: Sequence[int] = (),
    on_capture: Callable[[CaptureEvent], None] | None = None,
    on_miss: Callable[[str], None] | None = None,
    on_fallback: Callable[[str], None] | None = None,
) -> Session:
    """Put a :class:`GraphRunner` in front of every denoiser of a pipeline, or of a module.

    The modules stay the same objects; only their ``forward`` is exchanged. ``text_buckets`` are
    caption lengths, in tokens, to capture ahead at the first call; a caption is never padded to
    one. The other options, and what they raise, are those of :class:`GraphRunner`. Raises
    :class:`EnableError` for what cannot be captured faithfully: a module that is enabled already,
    compiled, offloaded, or under a cache hook; and where there is no denoiser.
    """
    modules = denoisers(target)
    for name, module in modules.items():
        reason = conflict(module)
        if reason is not None:
            raise EnableError(f"{name} ({type(module).__name__}) {reason}")
    forwards: dict[str, EnabledForward] = {}
    for name, module in modules.items():
        runner = GraphRunner(
            module,
            breaks,
            max_graphs=max_graphs,
            max_pool_bytes=max_pool_bytes,
            backend=backend,
            on_capture=on_capture,
            on_miss=on_miss,
            on_fallback=on_fallback,
            forward=module.forward,
            ahead=_ahead(name, module, text_buckets),
        )
        runner.name = name
        forwards[name] = EnabledForward(module, runner)
    for forward in forwards.values():
        forward.module.forward = forward
    return Session(forwards)


def disable(target: Any) -> None:
    """Take the runners off a pipeline or a module; :class:`EnableError` where there are none."""
    forwards = {
        name: forward
        for name, module in denoisers(target).items()
        if isinstance(forward := module.__dict__.get("forward"), EnabledForward)
    }
    if not forwards:
        raise EnableError(f"{type(target).__name__} is not enabled; call enable() on it first")
    Session(forwards).disable()


def denoisers(target: Any) -> dict[str, torch.nn.Module]:
    """The modules of ``target`` that run once a step, by name."""
    if isinstance(target, torch.nn.Module):
        return {type(target).__name__: target}
    components = getattr(target, "components", None)
    if not isinstance(components, dict):
        raise EnableError(
            f"a {type(target).__name__} is neither a module nor a diffusers pipeline; pass the "
            "pipeline or its transformer"
        )
    found: dict[str, torch.nn.Module] = {}
    for name, component in components.items():
        if not isinstance(component, torch.nn.Module):
            continue
        package = type(component).__module__
        if package.startswith(_DENOISER_PACKAGES) or name in _DENOISER_NAMES:
            found[name] = component
    if not found:
        raise EnableError(
            f"{type(target).__name__} has no denoiser among {', '.join(sorted(components))}; pass "
            "the module that runs once a step"
        )
    return found


def conflict(module: torch.nn.Module) -> str | None:
    """Why a graph of this module could not be faithful; ``None`` where it can."""
    if isinstance(module.__dict__.get("forward"), EnabledForward):
        return "is enabled already; call disable() on it first"
    if type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None:
        return "is compiled by torch.compile; enable the module it was made from"
    for path, submodule in module.named_modules():
        where = f"submodule {path}" if path else "it"
        hook = getattr(submodule, "_hf_hook", None)
        if hook is not None and _offloads(hook):
            return (
                f"is offloaded ({where} has accelerate's {type(hook).__name__}), so that its "
                "weights move between calls; turn offloading off"
            )
        registry = getattr(submodule, "_diffusers_hook", None)
        names = list(getattr(registry, "hooks", None) or ())
        if names:
            return (
                f"has diffusers' hook {names[0]!r} on {where}, which decides in Python at each "
                "call; remove it first"
            )
    return None


def _offloads(hook: Any) -> bool:
    inner: Iterable[Any] = getattr(hook, "hooks", None) or (hook,)
    return any(getattr(one, "offload", False) or "Offload" in type(one).__name__ for one in inner)


def _ahead(name: str, module: torch.nn.Module, buckets: Sequence[int]) -> Any:
    if not buckets:
        return None
    at_text_length = adapter_for(module).at_text_length
    if at_text_length is None:
        raise EnableError(
            f"text_buckets were given, but no adapter knows where {name} "
            f"({type(module).__name__}) takes its caption; leave them out"
        )

    def ahead(*args: Any, **kwargs: Any) -> Iterable[tuple[tuple[Any, ...], dict[str, Any]]]:
        return (at_text_length(args, kwargs, length) for length in buckets)

    return ahead
