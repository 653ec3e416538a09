"""The built-in pipeline: a real ``ZImagePipeline``, tiny, with seeded weights, made in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from bcg_core.rng import preserved

if TYPE_CHECKING:
    from diffusers import ZImagePipeline
    from transformers import PreTrainedTokenizerFast

_CAPTION_DIM = 32
_SPECIAL_TOKENS = ("<|pad|>", "<|start|>", "<|end|>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|start|>{{ message['role'] }}:{{ message['content'] }}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant:{% endif %}"
)


def tiny_pipeline(
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> ZImagePipeline:
    """Build the pipeline from its configuration, offline, in about a second.

    The weights depend on ``seed`` alone: not on the device, and not on the global generators,
    which are left as they were. Height and width must be multiples of 16, at most 8192.
    """
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        ZImagePipeline,
        ZImageTransformer2DModel,
    )
    from transformers import Qwen3Config, Qwen3Model

    # The models' own initialisation draws from the global CPU generator.
    with preserved(), torch.device("cpu"):
        tokenizer = _byte_tokenizer()
        text_encoder = Qwen3Model(
            Qwen3Config(
                vocab_size=len(tokenizer),
                hidden_size=_CAPTION_DIM,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=2,
                head_dim=16,
                max_position_embeddings=512,
                pad_token_id=tokenizer.pad_token_id,
                bos_token_id=None,
                eos_token_id=tokenizer.eos_token_id,
            )
        )
        transformer = ZImageTransformer2DModel(
            in_channels=16,
            dim=32,
            n_layers=2,
            n_refiner_layers=1,
            n_heads=2,
            n_kv_heads=2,
            cap_feat_dim=_CAPTION_DIM,
            axes_dims=[8, 4, 4],
            axes_lens=[1024, 512, 512],
        )
        vae = AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=(8, 8, 16, 16),
            latent_channels=16,
            layers_per_block=1,
            norm_num_groups=4,
            scaling_factor=0.3611,
            shift_factor=0.1159,
            mid_block_add_attention=False,
            use_quant_conv=False,
            use_post_quant_conv=False,
        )
    generator = torch.Generator("cpu").manual_seed(seed)
    for model in (text_encoder, transformer, vae):
        _draw_weights(model, generator, dtype)
        model.eval().requires_grad_(False).to(device=device)
    return ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=transformer,
    )


def _draw_weights(model: torch.nn.Module, generator: torch.Generator, dtype: torch.dtype) -> None:
    """Unit gain through every layer, so that the picture is neither flat nor saturated.

    Buffers (the text encoder's rotary frequencies) keep their own type, as in a loaded model.
    """
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
        if parameter.ndim > 1:
            value = noise / parameter[0].numel() ** 0.5
        elif name.endswith("bias"):
            value = 0.1 * noise
        else:
            value = 1.0 + 0.1 * noise
        parameter.data = value.to(dtype)


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte of UTF-8, so that every prompt has one, and its length is easy to tell."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate((*_SPECIAL_TOKENS, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    pad, start, end = _SPECIAL_TOKENS
    options: dict[str, Any] = {"padding_side": "right", "model_max_length": 512}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        eos_token=end,
        additional_special_tokens=[start],
        chat_template=_CHAT_TEMPLATE,
        **options,
    )
