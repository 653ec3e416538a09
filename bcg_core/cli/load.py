"""A pipeline on its device: built in or from disk, offloaded or compiled as asked."""

from __future__ import annotations

import logging
import os
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from bcg_core.cli.model_folder import OPTION
from bcg_core.cli.option_error import OptionError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from bcg_core.cli.request import Placement, Request


def resolve_device(asked: str, backend: str) -> torch.device:
    """``auto`` is the GPU where there is one, and the CPU for the simulation."""
    available = torch.cuda.is_available()
    if asked == "auto":
        if backend == "cuda" and not available:
            raise OptionError("--backend", "cuda, but torch sees no GPU; use --backend simulated")
        return torch.device("cuda" if available and backend != "simulated" else "cpu")
    device = torch.device(asked)
    if device.type == "cuda":
        if not available:
            raise OptionError("--device", f"{asked}, but torch sees no GPU; use --device cpu")
        count = torch.cuda.device_count()
        if device.index is not None and device.index >= count:
            raise OptionError(
                "--device", f"{asked} is not there; use cuda:0 to cuda:{count - 1}, or cpu"
            )
    return device


def check_device(placement: Placement, device: torch.device) -> None:
    """What ``--device auto`` left open: offloading needs a GPU."""
    for option, given in (
        ("--dit-layerwise-offload", placement.layerwise_offload),
        ("--dit-cpu-offload", placement.cpu_offload),
    ):
        if given and device.type == "cpu":
            raise OptionError(option, "true needs a GPU, and torch sees none; use false")


def load(placement: Placement, device: torch.device) -> Any:
    """The diffusers pipeline that ``placement`` describes, ready to be called."""
    _stay_offline()
    offloads = placement.cpu_offload or placement.layerwise_offload
    home = torch.device("cpu") if offloads else device
    if placement.model_folder is None:
        from bcg_core.models.tiny import tiny_pipeline

        pipe: Any = tiny_pipeline(home, _dtype(placement.dtype, torch.float32))
    else:
        default = torch.bfloat16 if device.type == "cuda" else torch.float32
        with _initialised_weights() as initialised:
            pipe = _from_folder(placement.model_folder, _dtype(placement.dtype, default))
        _check_weights(pipe, placement.model_folder, initialised)
        if not offloads:
            pipe.to(device)
    if placement.cpu_offload:
        pipe.enable_model_cpu_offload(device=device)
    elif placement.layerwise_offload:
        _offload_by_layer(pipe, device)
    if placement.compile:
        from bcg_core.pipeline import denoisers

        for module in denoisers(pipe).values():
            module.forward = torch.compile(module.forward)
    return pipe


def check_fits(pipe: Any, request: Request) -> None:
    """What only the loaded pipeline knows: its own size rule."""
    processor = getattr(getattr(pipe, "image_processor", None), "config", None)
    multiple = getattr(processor, "vae_scale_factor", 1)
    for option, value in (("--width", request.width), ("--height", request.height)):
        if value % multiple:
            raise OptionError(option, f"{value} is not divisible by {multiple}; use a multiple")


def _stay_offline() -> None:
    """Before diffusers is imported: nothing is looked up, and its own talk stays quiet."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()


def _dtype(name: str, default: torch.dtype) -> torch.dtype:
    known: dict[str, torch.dtype] = {
        "auto": default,
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
    }
    return known[name]


def _from_folder(folder: Path, dtype: torch.dtype) -> Any:
    from diffusers import DiffusionPipeline
    from diffusers.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        with warnings.catch_warnings():
            # The keyword's new name is not known to every diffusers that we support.
            warnings.filterwarnings("ignore", ".*torch_dtype.*", FutureWarning)
            return DiffusionPipeline.from_pretrained(
                str(folder), torch_dtype=dtype, use_safetensors=True, local_files_only=True
            )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # Whatever is wrong with a file of the folder is raised as it comes: OSError, ValueError,
        # safetensors' own class, KeyError.
        raise OptionError(
            OPTION,
            f"{folder} cannot be loaded ({type(error).__name__}: {error}); get the folder again, "
            "or name another",
        ) from error


@contextmanager
def _initialised_weights() -> Iterator[list[str]]:
    """What transformers logs of weights that no file holds: it makes them up."""
    told: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = record.getMessage()
            if "newly initialized" in text:
                rows = [line for line in text.splitlines() if "| MISSING" in line]
                told.extend(row.split("|")[0].strip() for row in rows or [text.splitlines()[0]])

    logger = logging.getLogger("transformers.modeling_utils")
    collector = Collector()
    level, propagates = logger.level, logger.propagate
    logger.addHandler(collector)
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    try:
        yield told
    finally:
        logger.removeHandler(collector)
        logger.setLevel(level)
        logger.propagate = propagates


def _check_weights(pipe: Any, folder: Path, initialised: list[str]) -> None:
    """Refuse a folder that lacks weights.

    diffusers leaves those without data, and transformers draws them at random; both say so in a
    log alone.
    """
    if initialised:
        raise OptionError(
            OPTION,
            f"{folder} lacks weights of a transformers model, such as {initialised[0]}; get the "
            "whole folder",
        )
    for name, component in pipe.components.items():
        if isinstance(component, torch.nn.Module):
            missing = [key for key, value in component.state_dict().items() if value.is_meta]
            if missing:
                raise OptionError(
                    OPTION,
                    f"{folder / name} lacks {len(missing)} weights, such as {missing[0]}; get the "
                    "whole folder",
                )


def _offload_by_layer(pipe: Any, device: torch.device) -> None:
    from bcg_core.pipeline import denoisers

    layered = denoisers(pipe)
    for name, component in pipe.components.items():
        if isinstance(component, torch.nn.Module) and name not in layered:
            component.to(device)
    for module in layered.values():
        module.enable_group_offload(device, torch.device("cpu"), offload_type="leaf_level")  # type: ignore[operator]
