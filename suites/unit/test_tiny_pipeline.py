"""The built-in pipeline is a real one, the same everywhere, and paints something."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from diffusers import ZImagePipeline
from torch.utils._python_dispatch import TorchDispatchMode

from bcg_core.models.tiny import tiny_pipeline

pytestmark = pytest.mark.bcg


def weights(pipe: Any) -> dict[str, torch.Tensor]:
    return {
        f"{part}.{name}": tensor.cpu()
        for part in ("text_encoder", "transformer", "vae")
        for name, tensor in getattr(pipe, part).state_dict().items()
    }


def paint(pipe: Any, prompt: str = "a red fox", **options: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(3)
    options = {"width": 128, "height": 96, "num_inference_steps": 2} | options
    return np.asarray(pipe(prompt, generator=generator, **options).images[0])


def test_it_is_a_real_pipeline_on_the_device(bcg_device: torch.device) -> None:
    pipe = tiny_pipeline(bcg_device)
    assert type(pipe) is ZImagePipeline
    for part in (pipe.text_encoder, pipe.transformer, pipe.vae):
        assert {p.device.type for p in part.parameters()} == {bcg_device.type}
        assert not part.training
    assert type(pipe.transformer).__name__ == "ZImageTransformer2DModel"
    assert type(pipe.text_encoder).__name__ == "Qwen3Model"


def test_weights_depend_on_the_seed_alone(bcg_device: torch.device) -> None:
    torch.manual_seed(1)
    first = weights(tiny_pipeline("cpu"))
    torch.manual_seed(2)
    again = weights(tiny_pipeline(bcg_device))
    other = weights(tiny_pipeline("cpu", seed=1))
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    drawn = [name for name in first if not torch.equal(first[name], other[name])]
    assert len(drawn) == len(first)


def test_building_leaves_the_global_generators_alone(bcg_device: torch.device) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    before_cuda = torch.cuda.get_rng_state() if bcg_device.type == "cuda" else None
    tiny_pipeline(bcg_device)
    assert torch.equal(before, torch.get_rng_state())
    if before_cuda is not None:
        assert torch.equal(before_cuda, torch.cuda.get_rng_state())


def test_the_picture_has_structure_and_follows_the_prompt(bcg_device: torch.device) -> None:
    pipe = tiny_pipeline(bcg_device)
    fox = paint(pipe)
    assert fox.shape == (96, 128, 3)
    assert (fox.std(axis=(0, 1)) > 10).all()
    assert ((fox == 0) | (fox == 255)).mean() < 0.2
    assert (paint(pipe, "ein Leuchtturm, 灯台") != fox).mean() > 0.5
    assert (paint(pipe, guidance_scale=0.0) != fox).mean() > 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_paints_too(bcg_device: torch.device, dtype: torch.dtype) -> None:
    pipe = tiny_pipeline(bcg_device, dtype)
    assert pipe.transformer.dtype == dtype
    # As in a model loaded at this precision, the rotary frequencies are not rounded.
    assert {b.dtype for b in pipe.text_encoder.buffers()} == {torch.float32}
    assert (paint(pipe).std(axis=(0, 1)) > 10).all()


def test_a_bytes_caption_has_one_token_a_byte() -> None:
    tokenizer = tiny_pipeline().tokenizer
    ids = tokenizer("Füße 灯").input_ids
    assert len(ids) == len("Füße 灯".encode())
    assert tokenizer.decode(ids) == "Füße 灯"


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.attentions = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.operations += 1
        self.attentions += "attention" in str(function)
        return function(*args, **(kwargs or {}))


def test_one_forward_is_small_but_has_every_kind_of_block() -> None:
    transformer = tiny_pipeline().transformer
    with torch.no_grad(), Counting() as counted:
        transformer([torch.randn(16, 1, 64, 64)], torch.tensor([0.5]), [torch.randn(40, 32)])
    assert counted.attentions == 4
    assert 400 < counted.operations < 700
