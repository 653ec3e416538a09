"""Tiny denoisers of diffusers with seeded weights, and inputs that change with a seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from bcg_core.rng import preserved

if TYPE_CHECKING:
    from collections.abc import Callable

    Inputs = dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """One configuration of a model.

    ``build(device="cpu", seed=0)`` returns the module: fp32, eval, without gradients. Its weights
    depend on the seed alone, and every parameter is random, so that no zero-initialised layer
    hides an input. ``inputs(seed, device="cpu")`` returns the keyword arguments of a call, of one
    signature for all seeds. Neither touches the global generators.
    """

    name: str
    make: Callable[[], torch.nn.Module]
    arguments: Callable[[Draw], Inputs]

    def build(self, device: str | torch.device = "cpu", seed: int = 0) -> torch.nn.Module:
        with preserved(), torch.device("cpu"):
            module = self.make()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.normal_(std=0.2, generator=generator)
        return module.eval().requires_grad_(False).to(device)

    def inputs(self, seed: int, device: str | torch.device = "cpu") -> Inputs:
        return self.arguments(Draw(seed, torch.device(device)))

    def __str__(self) -> str:
        return self.name


class Draw:
    """The random numbers of one call, the same on every device."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.device = device

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator).to(self.device)

    def uniform(self, *shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=self._generator).to(self.device)

    def integer(self, low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=self._generator))

    def tail_mask(self, batch: int, length: int) -> torch.Tensor:
        """Of each sample a head of its own length is active, never all of the first one."""
        lengths = [self.integer(1, length)] + [
            self.integer(1, length + 1) for _ in range(batch - 1)
        ]
        positions = torch.arange(length)
        return (positions < torch.tensor(lengths)[:, None]).to(self.device)


def _z_image() -> torch.nn.Module:
    from diffusers import ZImageTransformer2DModel

    return ZImageTransformer2DModel(
        all_patch_size=(2,),
        all_f_patch_size=(1,),
        in_channels=16,
        dim=32,
        n_layers=1,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=16,
        rope_theta=256.0,
        t_scale=1000.0,
        axes_dims=[8, 4, 4],
        axes_lens=[256, 32, 32],
    )


def _z_image_inputs(draw: Draw) -> Inputs:
    # Captions and pictures of lists, two samples whose captions differ in length.
    return {
        "x": [draw.normal(16, 1, 8, 8) for _ in range(2)],
        "t": draw.uniform(2),
        "cap_feats": [draw.normal(11, 16), draw.normal(40, 16)],
        "return_dict": False,
    }


def _qwen_image() -> torch.nn.Module:
    from diffusers import QwenImageTransformer2DModel

    return QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=3,
        joint_attention_dim=16,
        axes_dims_rope=(8, 4, 4),
    )


def _qwen_image_inputs(draw: Draw) -> Inputs:
    return {
        "hidden_states": draw.normal(2, 16, 16),
        "encoder_hidden_states": draw.normal(2, 7, 16),
        "timestep": draw.uniform(2),
        "img_shapes": [(1, 4, 4)] * 2,
        "return_dict": False,
    }


def _qwen_image_masked_inputs(draw: Draw) -> Inputs:
    return {**_qwen_image_inputs(draw), "encoder_hidden_states_mask": draw.tail_mask(2, 7)}


def _sd3(**more: Any) -> torch.nn.Module:
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel(
        sample_size=32,
        patch_size=1,
        in_channels=4,
        num_layers=4,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=64,
        out_channels=4,
        pos_embed_max_size=96,
        **more,
    )


def _sd35() -> torch.nn.Module:
    return _sd3(dual_attention_layers=(0,), qk_norm="rms_norm")


def _sd3_inputs(draw: Draw) -> Inputs:
    return {
        "hidden_states": draw.normal(2, 4, 8, 8),
        "encoder_hidden_states": draw.normal(2, 12, 32),
        "pooled_projections": draw.normal(2, 64),
        "timestep": draw.uniform(2) * 1000,
        "return_dict": False,
    }


def _flux(guidance_embeds: bool = False) -> torch.nn.Module:
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
        guidance_embeds=guidance_embeds,
    )


def _flux_guided() -> torch.nn.Module:
    return _flux(guidance_embeds=True)


def _flux_inputs(draw: Draw) -> Inputs:
    height = width = 4
    rows = torch.arange(height).repeat_interleave(width)
    columns = torch.arange(width).repeat(height)
    places = torch.stack([torch.zeros_like(rows), rows, columns], dim=1).float()
    # Another place in the picture with each seed: rotary tables follow from these values.
    places[:, 1:] += draw.integer(0, 8)
    return {
        "hidden_states": draw.normal(2, height * width, 4),
        "encoder_hidden_states": draw.normal(2, 12, 32),
        "pooled_projections": draw.normal(2, 32),
        "timestep": draw.uniform(2),
        "img_ids": places.to(draw.device),
        "txt_ids": torch.zeros(12, 3, device=draw.device),
        "return_dict": False,
    }


def _flux_guided_inputs(draw: Draw) -> Inputs:
    return {**_flux_inputs(draw), "guidance": 1 + 4 * draw.uniform(2)}


def _sana() -> torch.nn.Module:
    from diffusers import SanaTransformer2DModel

    return SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=4,
        num_attention_heads=4,
        num_cross_attention_heads=4,
        cross_attention_head_dim=4,
        cross_attention_dim=16,
        caption_channels=8,
        sample_size=32,
        patch_size=1,
    )


def _sana_inputs(draw: Draw) -> Inputs:
    return {
        "hidden_states": draw.normal(2, 4, 8, 8),
        "encoder_hidden_states": draw.normal(2, 8, 8),
        "timestep": draw.uniform(2) * 1000,
        "return_dict": False,
    }


CATALOGUE = (
    Entry("z_image", _z_image, _z_image_inputs),
    Entry("qwen_image", _qwen_image, _qwen_image_inputs),
    Entry("qwen_image_masked", _qwen_image, _qwen_image_masked_inputs),
    Entry("sd3", _sd3, _sd3_inputs),
    Entry("sd35", _sd35, _sd3_inputs),
    Entry("flux", _flux, _flux_inputs),
    Entry("flux_guided", _flux_guided, _flux_guided_inputs),
    Entry("sana", _sana, _sana_inputs),
)


def entry(name: str) -> Entry:
    """The configuration of that name."""
    return next(one for one in CATALOGUE if one.name == name)
