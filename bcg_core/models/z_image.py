"""Z-Image: captured whole, at the caption length that the model itself gives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bcg_core.models.adapter import Adapter, changed

if TYPE_CHECKING:
    import torch

    from bcg_core.models.adapter import Arguments

_CAPTIONS = 2  # position of ``cap_feats`` in ``ZImageTransformer2DModel.forward``


def at_text_length(args: tuple[Any, ...], kwargs: dict[str, Any], length: int) -> Arguments:
    """The call with every caption ``length`` tokens long.

    Captions come as a list of tensors ``(tokens, features)``, one an image. Several images of one
    prompt share one tensor, and they share one here, since the signature tells the two apart.
    """
    made: dict[int, torch.Tensor] = {}

    def resized(captions: Any) -> Any:
        if captions is None:
            return None
        if isinstance(captions, (list, tuple)):
            return type(captions)([resized(caption) for caption in captions])
        if id(captions) not in made:
            made[id(captions)] = captions.new_ones((length, *captions.shape[1:]))
        return made[id(captions)]

    return changed((args, kwargs), _CAPTIONS, "cap_feats", resized)


ADAPTER = Adapter(
    "z-image",
    module_classes=("ZImageTransformer2DModel",),
    pipeline_classes=(
        "ZImagePipeline",
        "ZImageImg2ImgPipeline",
        "ZImageInpaintPipeline",
        "ZImageOmniPipeline",
        "ZImageControlNetPipeline",
        "ZImageControlNetInpaintPipeline",
    ),
    at_text_length=at_text_length,
    source=(
        "The transformer pads each caption to a multiple of 32 with a learned token and attends "
        "to it, so that padding a caption further changes the picture. Captured whole, bit-exact, "
        "on an H200 (diffusers 0.42.1, torch 2.11)."
    ),
)
