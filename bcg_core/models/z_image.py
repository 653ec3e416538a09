"""Z-Image: captured whole, at the caption length that the model itself gives."""

from __future__ import annotations

from typing import Any

from bcg_core.models.adapter import Adapter

_CAPTIONS = 2  # position of ``cap_feats`` in ``ZImageTransformer2DModel.forward``


def at_text_length(
    args: tuple[Any, ...], kwargs: dict[str, Any], length: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call with every caption ``length`` tokens long.

    Captions come as a list of tensors ``(tokens, features)``, one an image.
    """
    if "cap_feats" in kwargs:
        kwargs = {**kwargs, "cap_feats": _resized(kwargs["cap_feats"], length)}
    else:
        captions = _resized(args[_CAPTIONS], length)
        args = (*args[:_CAPTIONS], captions, *args[_CAPTIONS + 1 :])
    return args, kwargs


def _resized(captions: Any, length: int) -> Any:
    if isinstance(captions, (list, tuple)):
        return type(captions)([_resized(caption, length) for caption in captions])
    return captions.new_zeros((length, *captions.shape[1:]))


ADAPTER = Adapter(
    "z-image",
    module_classes=("ZImageTransformer2DModel",),
    pipeline_classes=("ZImagePipeline", "ZImageImg2ImgPipeline"),
    at_text_length=at_text_length,
    source=(
        "The transformer pads each caption to a multiple of 32 with a learned token and attends "
        "to it, so that padding a caption further changes the picture. Captured whole, bit-exact, "
        "on an H200 (diffusers 0.42.1, torch 2.11)."
    ),
)
