"""Is a folder a text-to-image pipeline with safe weights? Told without importing diffusers."""

from __future__ import annotations

import ast
import importlib.util
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bcg_core.cli.option_error import OptionError

OPTION = "--model-path"
BUILTIN = "builtin:tiny"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_NEEDS_PICTURE = re.compile(
    "Img2Img|Image2Image|I2I|I2V|Image2Video|ImageTo|VideoTo|AudioTo|Inpaint|Paint|Edit|Control|"
    "Pix2Pix|Depth2Img|Variation|Upscale|Upsample|SuperResolution|Refiner|Adapter|Fill|Redux"
)
_OTHER_MEDIA = {
    "num_frames": "a video",
    "video_length": "a video",
    "audio_length_in_s": "sound",
    "audio_end_in_s": "sound",
}


@dataclass(frozen=True)
class ModelFolder:
    """A diffusers folder that passed the checks; sizes must be multiples of ``multiple``."""

    path: Path
    class_name: str
    multiple: int


def inspect_folder(path: Path) -> ModelFolder:
    """Read the folder's descriptions. :class:`OptionError` for anything but a safe pipeline."""
    try:
        there = path.exists()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise OptionError(
            OPTION, f"{path} cannot be read ({reason}); name another folder, or {BUILTIN}"
        ) from None
    if not there:
        raise OptionError(
            OPTION, f"{path} does not exist; name a diffusers folder on this disk, or {BUILTIN}"
        )
    if not path.is_dir():
        raise OptionError(OPTION, f"{path} is not a folder; name the folder of model_index.json")
    index_file = path / "model_index.json"
    if not index_file.exists():
        raise OptionError(OPTION, _no_pipeline(path))
    index = _read(index_file)
    class_name = index.get("_class_name")
    if not isinstance(class_name, str):
        raise OptionError(
            OPTION,
            f"{path} names a pipeline class of its own ({class_name!r}), and no code from a model "
            "folder is run; use a folder whose pipeline is part of diffusers",
        )
    _check_class(class_name)
    components = {name: value for name, value in index.items() if isinstance(value, list)}
    for name, value in components.items():
        _check_component(path / name, name, value)
    return ModelFolder(path, class_name, _multiple(path))


def _no_pipeline(path: Path) -> str:
    config = _read(path / "config.json") if (path / "config.json").is_file() else {}
    kinds = config.get("architectures") or [config.get("_class_name") or config.get("model_type")]
    if isinstance(kinds, list) and kinds and isinstance(kinds[0], str):
        return f"{path} holds a {kinds[0]}, not a pipeline; name a folder with a model_index.json"
    return f"{path} is no diffusers folder (no model_index.json); name one that has it"


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OptionError(
            OPTION, f"{file} cannot be read ({reason}); get the folder again, or name another"
        ) from None
    if not isinstance(content, dict):
        raise OptionError(OPTION, f"{file} is not a JSON object; get the folder again")
    return content


def _check_component(folder: Path, name: str, value: list[Any]) -> None:
    if len(value) == 2 and value[0] is None and value[1] is None:
        return  # an optional component that this pipeline does without
    if len(value) != 2 or not all(isinstance(part, str) for part in value):
        if all(isinstance(part, (int, float, str)) for part in value):
            return  # a setting of the pipeline, such as a list of numbers
        raise OptionError(
            OPTION,
            f"the component {name} in model_index.json is {value!r}, not a library and a "
            "class; get the folder again",
        )
    library, class_name = value
    if (folder / f"{library}.py").exists() or not _known_library(library):
        raise OptionError(
            OPTION,
            f"the component {name} is {library}.{class_name}, which is part of neither diffusers "
            "nor transformers, and no other code is run; use a folder without it",
        )
    if class_name.startswith("Auto") and _asks_for_code(folder):
        raise OptionError(
            OPTION,
            f"the component {name} wants Python code of its own (auto_map), and no code from a "
            "model folder is run; use a folder without it",
        )
    if not folder.is_dir():
        raise OptionError(
            OPTION, f"the component {name} is missing ({folder}); get the whole folder"
        )
    _check_weights(folder, name)


def _asks_for_code(folder: Path) -> bool:
    files = (folder / "config.json", folder / "tokenizer_config.json")
    return any("auto_map" in _read(file) for file in files if file.is_file())


def _check_weights(folder: Path, name: str) -> None:
    if not (folder / "config.json").is_file() or any(folder.glob("*.safetensors")):
        return
    pickled = sorted(file.name for file in folder.iterdir() if file.suffix in _PICKLED)
    if pickled:
        raise OptionError(
            OPTION,
            f"{name} has pickled weights only ({pickled[0]}), and unpickling can run any code; "
            "save it with save_pretrained(..., safe_serialization=True) and use that folder",
        )
    raise OptionError(OPTION, f"{name} has no *.safetensors weights; get the whole folder")


def _known_library(library: str) -> bool:
    if library in ("diffusers", "transformers"):
        return True
    pipelines = _diffusers() / "pipelines"
    return library.isidentifier() and (pipelines / library).is_dir()


def _diffusers() -> Path:
    spec = importlib.util.find_spec("diffusers")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("No module named 'diffusers'", name="diffusers")
    return Path(spec.origin).parent


def _check_class(class_name: str) -> None:
    if _NEEDS_PICTURE.search(class_name):
        raise OptionError(
            OPTION,
            f"a {class_name} starts from a picture, and this command has only a prompt; use a "
            "text-to-image pipeline",
        )
    parameters = _call_parameters(class_name)
    if parameters is None:
        raise OptionError(
            OPTION,
            f"{class_name} is not a pipeline of the installed diffusers; use a folder of another "
            "pipeline, or another diffusers",
        )
    for parameter, medium in _OTHER_MEDIA.items():
        if parameter in parameters:
            raise OptionError(
                OPTION, f"a {class_name} makes {medium}; use a text-to-image pipeline"
            )
    needed = [name for name, required in parameters.items() if required and name != "prompt"]
    if "prompt" not in parameters or needed:
        lacks = f"needs {', '.join(needed)}" if needed else "takes no prompt"
        raise OptionError(OPTION, f"a {class_name} {lacks}; use a text-to-image pipeline")


def _call_parameters(class_name: str) -> dict[str, bool] | None:
    """The parameters of the class's ``__call__`` and whether each is required."""
    head = f"class {class_name}("
    for file in sorted((_diffusers() / "pipelines").rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        if head not in text:
            continue
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and node.name == class_name:
                for method in node.body:
                    if isinstance(method, ast.FunctionDef) and method.name == "__call__":
                        return _parameters(method.args)
    return None


def _parameters(arguments: ast.arguments) -> dict[str, bool]:
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)][1:]
    required = len(names) - len(arguments.defaults)
    found = {name: index < required for index, name in enumerate(names)}
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found[argument.arg] = default is None
    return found


def _multiple(path: Path) -> int:
    """What width and height must be divisible by: the VAE's scale times the patch."""
    vae = _read(path / "vae" / "config.json") if (path / "vae" / "config.json").is_file() else {}
    scale = 8
    for key, offset in (
        ("block_out_channels", -1),
        ("encoder_block_out_channels", -1),
        ("temperal_downsample", 0),
    ):
        if isinstance(vae.get(key), list):
            scale = 2 ** (len(vae[key]) + offset)
            break
    config_file = path / "transformer" / "config.json"
    config = _read(config_file) if config_file.is_file() else {}
    patch = config.get("patch_size", config.get("all_patch_size", 1))
    sizes = patch if isinstance(patch, list) else [patch]
    return scale * math.lcm(*(size for size in sizes if isinstance(size, int) and size > 0), 1)
