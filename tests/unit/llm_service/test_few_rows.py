"""A layer's arrays for few rows give what its modules give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from common.checkpoints.checkpoint import Checkpoint
from common.cpu.linear import Linear
from llm_service.layers.cpu import panels
from llm_service.layers.cpu.layer import FewRows
from llm_service.layers.cpu.panels import PanelWeight
from llm_service.layers.decoder_layer import DecoderLayer
from llm_service.layers.tensor_parallel import TensorGroup
from llm_service.models.decoder import Decoder
from llm_service.models.loader import load_decoder
from testkit.checkpoints import Family
from tests import row_cases

DENSE: tuple[Family, ...] = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")


def loaded(folder: Path, dtype: torch.dtype = torch.float32, **options: str) -> Decoder:
    return load_decoder(Checkpoint(folder), dtype, torch.device("cpu"), **options)


def first_layer(decoder: Decoder) -> DecoderLayer:
    layer = decoder.layers[0]
    assert isinstance(layer, DecoderLayer)
    return layer


def swapped(layer: DecoderLayer) -> bool:
    return {"before", "after"} <= vars(layer).keys()


@pytest.mark.parametrize("rows", [1, 3, 32])
@pytest.mark.parametrize("family", DENSE)
@torch.inference_mode()
def test_both_halves_give_what_the_modules_give(
    family: Family, rows: int, checkpoints: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = loaded(checkpoints(family))
    layer, config = first_layer(decoder), decoder.config
    if not swapped(layer):
        pytest.skip("oneDNN lays weights out otherwise here")
    noise = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, config.hidden_size, generator=noise)
    attended = torch.randn(rows, config.heads * config.head_dim, generator=noise)
    rotary = decoder.rotary.tables(torch.arange(rows).expand(3, -1), torch.float32)
    more = torch.randn(rows, config.hidden_size, generator=noise)
    for residual in (None, more):
        kept = x.clone(), attended.clone(), more.clone()
        (total, inputs), after = layer.before(x, residual, rotary), layer.after(x, attended)
        assert torch.equal(torch.stack([x, more]), torch.stack([kept[0], kept[2]]))
        assert torch.equal(attended, kept[1])
        whole, whole_inputs = DecoderLayer.before(layer, x, residual, rotary)
        expected = (whole, *whole_inputs, *DecoderLayer.after(layer, x, attended))
        for ours, modules in zip((total, *inputs, *after), expected, strict=True):
            torch.testing.assert_close(ours, modules, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("part", ["mixer", "mlp"])
def test_a_part_that_may_compute_otherwise_is_left_alone(part: str, checkpoints: Callable[..., Path]) -> None:
    layer = first_layer(loaded(checkpoints("qwen3_vl")))
    if FewRows.of(layer) is None:
        pytest.skip("oneDNN lays weights out otherwise here")
    kind = type(getattr(layer, part))
    getattr(layer, part).__class__ = type("Other", (kind,), {})
    assert FewRows.of(layer) is None


@pytest.mark.parametrize("family", DENSE)
def test_decoders_give_the_same_tokens_without_them(
    family: Family, checkpoints: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoints(family)
    with_them = row_cases.greedy_tokens(folder)
    monkeypatch.setattr(FewRows, "of", lambda _: None)
    assert row_cases.greedy_tokens(folder) == with_them


@pytest.mark.parametrize(
    ("family", "weights"),
    [
        pytest.param(family, weights, marks=() if (first + second) % 2 == 0 else pytest.mark.soak)
        for first, family in enumerate((*DENSE, "qwen3_vl_moe"))
        for second, weights in enumerate(("", "int8"))
    ],
)
def test_decoders_give_the_same_tokens_on_processors_without_panels(
    family: Family, weights: str, checkpoints: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoints(family, dtype=torch.bfloat16)
    with_them = row_cases.greedy_tokens(folder, weights)
    monkeypatch.setattr(panels, "wide_vectors", lambda: False)
    monkeypatch.setattr(panels, "fused_vectors", lambda: False)
    decoder = loaded(folder, weight_dtype=weights)
    assert not any(isinstance(part.laid_out, PanelWeight) for part in decoder.modules() if isinstance(part, Linear))
    assert row_cases.greedy_tokens(folder, weights) == with_them


def test_other_layers_have_none(checkpoints: Callable[..., Path]) -> None:
    assert not swapped(first_layer(loaded(checkpoints("qwen3_vl_moe"))))
    assert not swapped(first_layer(loaded(checkpoints("qwen3_vl"), torch.float16, weight_dtype="int8")))
    shared = load_decoder(Checkpoint(checkpoints("qwen3_vl")), torch.float32, torch.device("cpu"), TensorGroup(0, 2))
    assert not swapped(first_layer(shared))
