"""enable and disable: what they change in a pipeline, and that nothing of it stays."""

from __future__ import annotations

import copy
import functools
import inspect
import io
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers", reason="the pipelines are diffusers'")

from bcg_core import GraphRunner, Session, disable, enable
from bcg_core.errors import EnableError
from suites.models.catalogue import entry

pytestmark = pytest.mark.bcg

STEPS = 4


def paint(pipe: Any, seed: int = 0, prompt: str = "a red circle", size: int = 64) -> Any:
    device = pipe.transformer.device
    generator = torch.Generator(device).manual_seed(seed)
    return pipe(
        prompt,
        height=size,
        width=size,
        num_inference_steps=STEPS,
        generator=generator,
        output_type="np",
    ).images


def test_same_picture_and_the_exact_number_of_replays(tiny_pipeline: Any, bcg_backend: str):
    pictures = [paint(tiny_pipeline, seed) for seed in range(3)]
    with enable(tiny_pipeline, backend=bcg_backend) as session:
        for seed, picture in enumerate(pictures):
            assert (paint(tiny_pipeline, seed) == picture).all()
        stats = session.stats
    assert stats.calls == 3 * STEPS
    assert (stats.captures, stats.replays, stats.eager_calls) == (1, 3 * STEPS - 1, 0)


def test_prompts_and_sizes_switched_back_and_forth(tiny_pipeline: Any, bcg_backend: str):
    requests = [("a red circle", 64), ("two words", 64), ("a red circle", 96), ("a", 64)] * 2
    expected = [paint(tiny_pipeline, 1, *request) for request in requests]
    with enable(tiny_pipeline, backend=bcg_backend) as session:
        for request, picture in zip(requests, expected, strict=True):
            assert (paint(tiny_pipeline, 1, *request) == picture).all()
        assert session.stats.eager_calls == 0
        assert session.stats.replays >= len(requests) * (STEPS - 1)


def test_module_looks_as_before_and_is_restored_exactly(tiny_pipeline: Any, bcg_backend: str):
    transformer = tiny_pipeline.transformer
    before = dict(transformer.__dict__)
    signature = inspect.signature(transformer.forward)
    kind, keys = type(transformer), list(transformer.state_dict())
    session = enable(tiny_pipeline, backend=bcg_backend)
    assert isinstance(session, Session)
    assert list(session.runners) == ["transformer"]
    assert tiny_pipeline.transformer is transformer
    assert type(transformer) is kind
    assert inspect.signature(transformer.forward) == signature
    assert transformer.dtype is not None
    assert list(transformer.state_dict()) == keys
    assert transformer.config["in_channels"] == before["_internal_dict"]["in_channels"]
    paint(tiny_pipeline)
    session.disable()
    assert "forward" not in transformer.__dict__
    assert transformer.__dict__.keys() == before.keys()
    assert transformer.forward.__func__ is kind.forward
    session.disable()


def test_own_forward_attribute_is_put_back(bcg_backend: str, bcg_device: torch.device):
    module = torch.nn.Linear(4, 4).to(bcg_device).requires_grad_(False)
    mine = lambda x: x * 2  # noqa: E731
    module.forward = mine
    x = torch.randn(2, 4, device=bcg_device)
    with enable(module, backend=bcg_backend) as session:
        assert torch.equal(module(x), x * 2)
        assert torch.equal(module(x + 1), (x + 1) * 2)
        assert session.stats.replays == 1
    assert module.forward is mine


def test_twice_is_an_error_that_says_so(tiny_pipeline: Any, bcg_backend: str):
    enable(tiny_pipeline, backend=bcg_backend)
    with pytest.raises(EnableError, match=r"transformer .* is enabled already; call disable\(\)"):
        enable(tiny_pipeline, backend=bcg_backend)
    disable(tiny_pipeline)
    with pytest.raises(EnableError, match="is not enabled; call enable"):
        disable(tiny_pipeline)


@pytest.mark.parametrize("wrap", [functools.partial, lambda f: functools.wraps(f)(lambda x: f(x))])
def test_forward_wrapped_since_is_not_thrown_away(wrap: Any):
    module = torch.nn.Linear(4, 4)
    session = enable(module, backend="simulated")
    ours = module.forward
    module.forward = wrapped = wrap(ours)
    with pytest.raises(EnableError, match=r"Linear.forward was wrapped .* take that off first"):
        session.disable()
    assert module.forward is wrapped
    module.forward = ours
    session.disable()
    assert "forward" not in module.__dict__


def test_placed_breaks_are_taken_off_again(bcg_backend: str, bcg_device: torch.device):
    from diffusers.models import attention_dispatch
    from diffusers.models.transformers import transformer_qwenimage

    functions = (
        torch.nn.functional.scaled_dot_product_attention,
        attention_dispatch.dispatch_attention_fn,
        transformer_qwenimage.dispatch_attention_fn,
        transformer_qwenimage.compute_text_seq_len_from_mask,
    )
    model = entry("qwen_image_masked")
    module = model.build(bcg_device)
    with enable(module, breaks="attention", backend=bcg_backend) as session:
        module(**model.inputs(0, bcg_device))
        assert session.stats.breaks == 3
    assert functions == (
        torch.nn.functional.scaled_dot_product_attention,
        attention_dispatch.dispatch_attention_fn,
        transformer_qwenimage.dispatch_attention_fn,
        transformer_qwenimage.compute_text_seq_len_from_mask,
    )
    assert not any("forward" in m.__dict__ for m in module.modules())


def test_break_on_a_function_of_the_models_own_module(bcg_backend: str, bcg_device: Any):
    model = entry("flux")
    module = model.build(bcg_device)
    pattern = "diffusers.models.transformers.transformer_flux:_get_qkv_projections"
    runner = GraphRunner(module, breaks=[pattern], backend=bcg_backend)
    inputs = model.inputs(0, bcg_device)
    assert torch.equal(runner(**inputs)[0], module(**inputs)[0])
    assert runner.stats.breaks == 2
    inputs = model.inputs(1, bcg_device)
    assert torch.equal(runner(**inputs)[0], module(**inputs)[0])


def test_captions_are_captured_ahead_at_bucket_lengths(tiny_pipeline: Any, bcg_backend: str):
    expected = paint(tiny_pipeline, 2)
    with enable(tiny_pipeline, backend=bcg_backend, text_buckets=(64, 128)) as session:
        assert (paint(tiny_pipeline, 2) == expected).all()
        stats = session.stats
    assert stats.captures == 3
    assert stats.replays == STEPS - 1
    assert stats.calls == STEPS


def test_buckets_without_an_adapter_are_refused():
    with pytest.raises(EnableError, match="text_buckets were given, but no adapter"):
        enable(torch.nn.Linear(2, 2), text_buckets=[64])


def test_what_cannot_be_captured_faithfully_is_refused_by_name(tiny_pipeline: Any):
    class AlignDevicesHook:
        offload = True

    transformer = tiny_pipeline.transformer
    transformer.layers[0]._hf_hook = AlignDevicesHook()
    with pytest.raises(EnableError, match=r"offloaded \(submodule layers.0 .*AlignDevicesHook"):
        enable(tiny_pipeline)
    del transformer.layers[0]._hf_hook
    with pytest.raises(EnableError, match=r"is compiled by torch.compile"):
        enable(torch.compile(torch.nn.Linear(2, 2)))
    with pytest.raises(EnableError, match="neither a module nor a diffusers pipeline"):
        enable(object())


def test_cache_hook_is_refused_by_name():
    from diffusers import FirstBlockCacheConfig

    module = entry("flux").build()
    module.enable_cache(FirstBlockCacheConfig(threshold=0.1))
    with pytest.raises(EnableError, match=r"diffusers' hook '.*' on submodule"):
        enable(module)


def test_copy_and_saved_file_of_an_enabled_module_are_free_of_it(
    bcg_backend: str, bcg_device: torch.device
):
    module = torch.nn.Linear(4, 4).to(bcg_device).requires_grad_(False)
    x = torch.randn(2, 4, device=bcg_device)
    with enable(module, backend=bcg_backend):
        module(x)
        twin = copy.deepcopy(module)
        twin.weight.mul_(2)
        assert torch.equal(twin(x), torch.nn.functional.linear(x, twin.weight, twin.bias))
        file = io.BytesIO()
        torch.save(module, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded(x), module(x))


def test_hooks_of_the_module_run_at_every_call(bcg_backend: str, bcg_device: torch.device):
    module = torch.nn.Linear(4, 4).to(bcg_device).requires_grad_(False)
    seen = []
    handle = module.register_forward_hook(lambda *_: seen.append(1))
    x = torch.randn(2, 4, device=bcg_device)
    with enable(module, backend=bcg_backend) as session:
        for _ in range(3):
            module(x)
        assert session.stats.replays == 2
    assert len(seen) == 3
    handle.remove()


def test_forward_of_a_submodule_replaced_later_is_noticed(
    bcg_backend: str, bcg_device: torch.device
):
    module = torch.nn.Sequential(torch.nn.Linear(4, 4)).to(bcg_device).requires_grad_(False)
    x = torch.randn(2, 4, device=bcg_device)
    runner = GraphRunner(module, backend=bcg_backend)
    runner(x)
    module[0].forward = lambda x: x * 5
    assert torch.equal(runner(x), x * 5)
    assert runner.stats.misses["forward of 0 was replaced"] == 1


def test_random_state_after_the_pipeline_is_the_same(tiny_pipeline: Any, bcg_backend: str):
    torch.manual_seed(9)
    paint(tiny_pipeline, 3)
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.zeros(1)
    torch.manual_seed(9)
    with enable(tiny_pipeline, backend=bcg_backend):
        paint(tiny_pipeline, 3)
    assert torch.equal(torch.get_rng_state(), cpu)
    after = torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.zeros(1)
    assert torch.equal(after, cuda)
