"""Qwen-Image's text mask: its metadata, and the break that works from it."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import torch

from bcg_core import BreakableCUDAGraph, BreakableCUDAGraphCapture, GraphRunner
from bcg_core.models import qwen_image
from bcg_core.models.qwen_image import (
    DynamicVarlenMaskMeta,
    _attn_mask_meta_local_pad,
    attention_mask_meta,
    text_lengths,
)
from bcg_core.placement import placed
from suites.models.catalogue import entry

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.bcg

WRONG_PADS: dict[str, Callable[[Any], int]] = {
    "always 0": lambda meta: 0,
    "one too many": lambda meta: _attn_mask_meta_local_pad(meta) + 1,
    "one too few": lambda meta: max(0, _attn_mask_meta_local_pad(meta) - 1),
    "from any metadata": lambda meta: (
        meta.max_seqlen
        if isinstance(meta, DynamicVarlenMaskMeta)
        else _attn_mask_meta_local_pad(meta)
    ),
}


def mask(*rows: str) -> torch.Tensor:
    """A bool mask from strings such as ``"xxx--"``."""
    return torch.tensor([[c == "x" for c in row] for row in rows])


def varlen(*rows: str) -> DynamicVarlenMaskMeta:
    meta = attention_mask_meta(mask(*rows))
    assert isinstance(meta, DynamicVarlenMaskMeta)
    return meta


def every_mask(batch: int, length: int) -> list[torch.Tensor]:
    bits = product([False, True], repeat=batch * length)
    return [torch.tensor(one).view(batch, length) for one in bits]


def diffusers_lengths(text: torch.Tensor, given: torch.Tensor) -> Any:
    from diffusers.models.transformers import transformer_qwenimage

    return transformer_qwenimage.compute_text_seq_len_from_mask(text, given)


def assert_as_diffusers(given: torch.Tensor) -> None:
    text = torch.empty(*given.shape, 3)
    for name, ours, theirs in zip(
        ("text length", "lengths", "mask"),
        text_lengths(text, given),
        diffusers_lengths(text, given),
    ):
        assert type(ours) is type(theirs), name
        if isinstance(theirs, torch.Tensor):
            assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), (name, given)
            assert torch.equal(ours, theirs), (name, given)
        else:
            assert ours == theirs, name


def test_qwen_dynamic_varlen_meta_is_not_tail_pad_meta():
    meta = DynamicVarlenMaskMeta(
        cu_seqlens=torch.tensor([0, 3, 5], dtype=torch.int32),
        max_seqlen=3,
        indices=torch.tensor([0, 1, 2, 5, 6]),
    )
    assert _attn_mask_meta_local_pad(meta) == 0
    assert _attn_mask_meta_local_pad(None) == 0
    assert _attn_mask_meta_local_pad({}) == 0
    assert _attn_mask_meta_local_pad({"local_pad": 7}) == 7


def test_metadata_of_no_mask_and_of_no_padding_is_none():
    assert attention_mask_meta(None) is None
    assert attention_mask_meta(mask("xxx", "xxx")) is None


@pytest.mark.parametrize(
    ("rows", "pad"), [(("xx--", "xx--"), 2), (("xxx-",), 1), (("---", "---"), 3)]
)
def test_metadata_of_one_tail_in_every_sample_is_its_length(rows: tuple[str, ...], pad: int):
    assert attention_mask_meta(mask(*rows)) == {"local_pad": pad}


def test_metadata_of_different_lengths_lists_the_active_positions():
    meta = varlen("xxx-", "x---", "----")
    assert meta.cu_seqlens.tolist() == [0, 3, 4, 4]
    assert meta.cu_seqlens.dtype == torch.int32
    assert meta.max_seqlen == 3
    assert meta.indices.tolist() == [0, 1, 2, 4]


@pytest.mark.parametrize("rows", [("x-x",), ("-xx", "-xx"), ("xx-", "x-x")])
def test_metadata_of_holes_is_varlen(rows: tuple[str, ...]):
    assert varlen(*rows).max_seqlen == 2


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.int32, torch.float32])
def test_the_break_returns_what_diffusers_returns_for_every_mask(dtype: torch.dtype):
    pytest.importorskip("diffusers")
    for given in every_mask(2, 3) + every_mask(1, 5):
        assert_as_diffusers(given.to(dtype))


def test_values_other_than_one_are_active():
    pytest.importorskip("diffusers")
    given = torch.tensor([[0.5, -3.0, float("nan"), 0.0], [1e-30, 0.0, 0.0, -0.0]])
    assert_as_diffusers(given)


def test_a_mask_of_another_shape_is_refused_with_both_shapes():
    with pytest.raises(ValueError, match=r"\(2, 3\).*\(2, 4\)"):
        text_lengths(torch.empty(2, 4, 3), torch.ones(2, 3))


@pytest.mark.parametrize("wrong", WRONG_PADS.values(), ids=WRONG_PADS)
def test_a_wrong_pad_is_found(wrong: Callable[[Any], int], monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("diffusers")
    monkeypatch.setattr(qwen_image, "_attn_mask_meta_local_pad", wrong)
    with pytest.raises(AssertionError, match=r"mask|lengths"):
        test_the_break_returns_what_diffusers_returns_for_every_mask(torch.bool)


def replays(backend: str, device: torch.device) -> None:
    """Masks of all three kinds through one captured graph; fails where a replay is not eager."""
    model = entry("qwen_image_masked")
    module = model.build(device)
    runner = GraphRunner(module, backend=backend)
    rows = [("xxxxxx-", "xxxxxx-"), ("xxxxxxx", "xxxxxxx"), ("xx-----", "xx-----")]
    rows += [("xxxxx--", "xxx----"), ("x-x-x-x", "-xxxxxx"), ("-------", "xxxxxxx")]
    for seed, strings in enumerate(rows):
        inputs = model.inputs(seed, device)
        inputs["encoder_hidden_states_mask"] = mask(*strings).to(device)
        with torch.no_grad():
            (expected,) = module(**inputs)
            (result,) = runner(**inputs)
        assert torch.equal(expected, result), f"mask {strings}"
    assert runner.stats.captures == 1
    assert runner.stats.replays == len(rows) - 1
    assert runner.break_names()[0].startswith("text_lengths ")


def test_masks_of_every_kind_go_through_one_graph(bcg_backend: str, bcg_device: torch.device):
    pytest.importorskip("diffusers")
    replays(bcg_backend, bcg_device)


@pytest.mark.parametrize("wrong", WRONG_PADS.values(), ids=WRONG_PADS)
def test_a_wrong_pad_is_found_on_the_captured_path(
    wrong: Callable[[Any], int], monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("diffusers")
    monkeypatch.setattr(qwen_image, "_attn_mask_meta_local_pad", wrong)
    with pytest.raises(AssertionError, match="mask"):
        replays("simulated", torch.device("cpu"))


def test_metadata_is_made_anew_from_a_mask_at_an_old_address(
    bcg_backend: str, bcg_device: torch.device
):
    pytest.importorskip("diffusers")
    from diffusers.models.transformers import transformer_qwenimage

    given = mask("xxx--", "xxx--").to(bcg_device)
    text = torch.empty(2, 5, 3, device=bcg_device)
    graph = BreakableCUDAGraph()
    with (
        placed(None, qwen_image.ADAPTER.breaks),
        torch.no_grad(),
        BreakableCUDAGraphCapture(graph, backend=bcg_backend),
    ):
        _, lengths, active = transformer_qwenimage.compute_text_seq_len_from_mask(text, given)
        double = lengths * 2
    assert graph.breaks == 1
    for prompt in (mask("x----", "x----"), mask("xxxxx", "xxxxx"), mask("x-x--", "-----")):
        given.copy_(prompt)
        graph.replay()
        _, expected, _ = diffusers_lengths(text, given)
        assert torch.equal(lengths, expected)
        assert torch.equal(double, expected * 2)
        assert torch.equal(active, given)


def test_without_a_mask_there_is_no_break(bcg_backend: str, bcg_device: torch.device):
    pytest.importorskip("diffusers")
    model = entry("qwen_image")
    runner = GraphRunner(model.build(bcg_device), backend=bcg_backend)
    with torch.no_grad():
        assert runner.capture(**model.inputs(0, bcg_device))
    assert (runner.stats.segments, runner.stats.breaks) == (1, 0)


def test_a_call_of_another_text_length_is_made_for_capturing_ahead(bcg_backend: str):
    pytest.importorskip("diffusers")
    model = entry("qwen_image_masked")
    device = "cuda" if bcg_backend == "cuda" else "cpu"
    module = model.build(device)
    inputs = model.inputs(0, device)
    for args, kwargs in (
        ((), inputs),
        ((inputs["hidden_states"], inputs["encoder_hidden_states"]), {}),
    ):
        more_args, more = qwen_image.at_text_length(args, kwargs, 9)
        text = more_args[1] if args else more["encoder_hidden_states"]
        assert text.shape == (2, 9, 16)
    args, kwargs = qwen_image.at_text_length((), inputs, 9)
    assert kwargs["encoder_hidden_states_mask"].shape == (2, 9)
    assert kwargs["hidden_states"] is inputs["hidden_states"]
    assert inputs["encoder_hidden_states"].shape == (2, 7, 16)
    runner = GraphRunner(module, backend=bcg_backend)
    longer = {**inputs, "encoder_hidden_states": torch.randn(2, 9, 16, device=device)}
    longer["encoder_hidden_states_mask"] = mask("xxxxxxx--", "xxx------").to(device)
    with torch.no_grad():
        assert runner.capture(*args, **kwargs)
        (expected,) = module(**longer)
        (result,) = runner(**longer)
    assert runner.stats.replays == 1
    assert torch.equal(expected, result)
