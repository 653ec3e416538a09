"""Qwen-Image: with a text mask, one helper is a break that works from the mask's metadata.

``compute_text_seq_len_from_mask`` makes a tensor from a Python number, a host copy that a capture
refuses. The break makes the same three results from what it finds in the mask of this very call,
so that a new prompt at an old address never meets the metadata of an old one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from bcg_core.models.adapter import Adapter, changed
from bcg_core.placement import PlacedBreak

if TYPE_CHECKING:
    from bcg_core.models.adapter import Arguments

_TEXT = 1  # position of ``encoder_hidden_states`` in ``QwenImageTransformer2DModel.forward``


@dataclass(frozen=True)
class DynamicVarlenMaskMeta:
    """A mask whose rows have different lengths, or holes.

    ``cu_seqlens``: ``(batch + 1,)`` int32, where each row's tokens begin among all valid ones.
    ``max_seqlen``: tokens of the longest row. ``indices``: positions of the valid tokens in the
    flattened ``(batch * length,)`` mask, int64.
    """

    cu_seqlens: torch.Tensor
    max_seqlen: int
    indices: torch.Tensor


MaskMeta = Mapping[str, int] | DynamicVarlenMaskMeta | None


def attention_mask_meta(mask: torch.Tensor | None) -> MaskMeta:
    """What a text mask ``(batch, length)`` says, read from its content.

    ``None``: no mask, or one without padding. ``{"local_pad": n}``: every row ends in the same
    ``n`` padding tokens and has no other. :class:`DynamicVarlenMaskMeta`: anything else.
    """
    if mask is None:
        return None
    valid = mask.to(torch.bool)
    batch, length = valid.shape
    counts = valid.sum(dim=1)
    shortest, longest = int(counts.min()), int(counts.max())
    if shortest == length:
        return None
    if shortest == longest and bool(valid[:, :shortest].all()):
        return {"local_pad": length - shortest}
    starts = torch.zeros(batch + 1, dtype=torch.int32, device=mask.device)
    starts[1:] = counts.cumsum(0)
    return DynamicVarlenMaskMeta(starts, longest, valid.flatten().nonzero().flatten())


def _attn_mask_meta_local_pad(meta: MaskMeta) -> int:
    """Padding tokens at the tail of every row: read from a plain mapping only.

    Variable-length metadata has no common tail; taking its numbers for one cuts valid tokens off.
    """
    return int(meta.get("local_pad", 0)) if isinstance(meta, Mapping) else 0


def text_lengths(
    encoder_hidden_states: torch.Tensor, encoder_hidden_states_mask: torch.Tensor
) -> tuple[int, torch.Tensor, torch.Tensor]:
    """What ``compute_text_seq_len_from_mask`` returns, bit for bit.

    Of a text ``(batch, length, features)`` and its mask ``(batch, length)``: the length of the text
    for the rotary embedding, tokens up to the last valid one a row (``(batch,)`` int64; the full
    length for a row without any), and the mask as bool. ``ValueError`` for a mask of another shape.
    """
    batch, length = encoder_hidden_states.shape[:2]
    if encoder_hidden_states_mask.shape[:2] != (batch, length):
        raise ValueError(
            f"encoder_hidden_states_mask has shape {tuple(encoder_hidden_states_mask.shape)}, "
            f"expected {(batch, length)} like encoder_hidden_states"
        )
    device = encoder_hidden_states.device
    meta = attention_mask_meta(encoder_hidden_states_mask)
    positions = torch.arange(1, length + 1, device=device)
    valid = (positions <= length - _attn_mask_meta_local_pad(meta)).repeat(batch, 1)
    if isinstance(meta, DynamicVarlenMaskMeta):
        listed = torch.zeros_like(valid)
        listed.view(-1)[meta.indices] = True
        valid &= listed
    last = torch.where(valid, positions, 0).amax(dim=1)
    return length, torch.where(last > 0, last, length), valid


def _has_mask(encoder_hidden_states: Any, encoder_hidden_states_mask: Any = None) -> bool:
    return encoder_hidden_states_mask is not None


def at_text_length(args: tuple[Any, ...], kwargs: dict[str, Any], length: int) -> Arguments:
    """The call with a text, and a mask if there is one, of ``length`` tokens.

    The text is ``(batch, tokens, features)``, the mask ``(batch, tokens)``.
    """

    def resized(text: torch.Tensor) -> torch.Tensor:
        return text.new_ones((text.shape[0], length, *text.shape[2:]))

    arguments = changed((args, kwargs), _TEXT, "encoder_hidden_states", resized)
    return changed(arguments, _TEXT + 1, "encoder_hidden_states_mask", resized)


ADAPTER = Adapter(
    "qwen-image",
    module_classes=("QwenImageTransformer2DModel",),
    pipeline_classes=(
        "QwenImagePipeline",
        "QwenImageImg2ImgPipeline",
        "QwenImageInpaintPipeline",
        "QwenImageEditPipeline",
        "QwenImageEditInpaintPipeline",
        "QwenImageEditPlusPipeline",
        "QwenImageLayeredPipeline",
        "QwenImageControlNetPipeline",
        "QwenImageControlNetInpaintPipeline",
    ),
    breaks=(
        PlacedBreak(
            "diffusers.models.transformers.transformer_qwenimage:compute_text_seq_len_from_mask",
            replacement=text_lengths,
            when=_has_mask,
        ),
    ),
    at_text_length=at_text_length,
    source=(
        "diffusers 0.42.1, transformer_qwenimage.py line 169: torch.as_tensor of a Python number; "
        "refused by a capture on an H200 with a text mask, captured whole without one."
    ),
)
