"""A layer's fused kernels give what its separate ones give, to the bit, of any number of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from common.cpu.jit import find, threads_used, use_threads
from llm_service.families.family import FeedForwardKind, LayerKind, LayerNorms, Mixer, OutputGate
from llm_service.layers.cpu import layer_kernel, layer_products, selection
from llm_service.layers.cpu.layer import FewRows, FusedLayer, finalize
from llm_service.layers.cpu.panels import PanelWeight
from llm_service.layers.decoder_layer import DecoderLayer, make_layer
from llm_service.layers.linear.parallel import PackedLinear
from llm_service.layers.linear.weight_dtype import W8A8, Rounded
from llm_service.layers.tensor_parallel import ALONE
from llm_service.model_config.feed_forward import Activation
from llm_service.model_config.text import TextConfig
from llm_service.models.decoder import kernels_of
from tests.layer_cases import FAMILY, HEAD, HEADS, config, drawn, noise
from tests.tiles import TILES, VECTORS, multiply_by

pytestmark = pytest.mark.skipif(not selection.fused_vectors(), reason="this processor lacks AVX2")

PLAIN = replace(FAMILY, attention=replace(FAMILY.attention, output_gate=OutputGate.NONE))
FOUR_NORMS = LayerNorms("input_layernorm", "post", "pre", "behind")
KINDS = {
    "plain": replace(config(), family=PLAIN, intermediate_size=64),
    "gates of heads": replace(config(), intermediate_size=128),
    "biases": replace(
        config(),
        family=replace(
            PLAIN, attention=replace(PLAIN.attention, bias=True), layers=replace(PLAIN.layers, output_biases=True)
        ),
        intermediate_size=640,
    ),
    "four norms, gelu": replace(
        config(),
        family=replace(PLAIN, norms=replace(PLAIN.norms, names=FOUR_NORMS)),
        activation=Activation.GELU,
        hidden_size=200,
        intermediate_size=64,
    ),
    "no norms": replace(
        config(),
        family=replace(PLAIN, norms=replace(PLAIN.norms, names=LayerNorms("", ""))),
        qk_norm=False,
        hidden_size=1100,
        intermediate_size=704,
    ),
}
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))


FORMS = ("tiles", "pairs", "quads", "float32", "bfloat16", "float16", "int8")
"""By tiles and by vectors; float32 as numbers are stored."""
ALIKE = "quads", "bfloat16", "float16", "int8"
"""Kernels for these, which take seconds to compile, are what those for the others are, but for a panel's products
(`test_panels`, `test_quad_panels`)."""
each_form = pytest.mark.parametrize(
    "form", [pytest.param(each, marks=pytest.mark.soak if each in ALIKE else ()) for each in FORMS]
)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., DecoderLayer]:
    """Makes a layer whose weights lie in panels of a form; skips where the processor has no such."""

    def made(kind: TextConfig, form: str) -> DecoderLayer:
        if form in ("tiles", "pairs"):
            if not selection.computes_bfloat16():
                pytest.skip("this processor lacks AVX512-BF16")
            multiply_by(TILES if form == "tiles" else VECTORS, monkeypatch)
        if form == "quads":
            if not selection.computes_bytes():
                pytest.skip("this processor lacks AVX512-VNNI")
            multiply_by(VECTORS, monkeypatch)
        if form == "int8" and not selection.wide_vectors():
            pytest.skip("int8 lies in other panels here")
        return layer_of(kind, form)

    return made


def layer_of(kind: TextConfig, form: str) -> DecoderLayer:
    """Finalized."""
    layer = make_layer(LayerKind(Mixer.ATTENTION, FeedForwardKind.DENSE), kind, ALONE, torch.float32)
    assert isinstance(layer, DecoderLayer)
    drawn(layer)
    for part in layer.modules():
        if isinstance(part, PackedLinear):
            if form in ("bfloat16", "float16"):
                part.weight.copy_(part.weight.to(getattr(torch, form)))
            short = {"quads": W8A8, "int8": "int8"}
            part.finalize(rounded=Rounded.of(short.get(form, ""), bfloat16=form in ("tiles", "pairs")))
    finalize(layer, kind.activation)
    return layer


def given(kind: TextConfig, rows: int) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Two times rows, what the mixer gives, and angles."""
    x, more = (noise(rows, kind.hidden_size, seed=seed) for seed in (2, 3))
    angles = noise(rows, 1, HEAD // 4, seed=4)
    return x, more, noise(rows, HEADS * HEAD, seed=5), (angles.cos(), angles.sin())


def halves(layer: Any, kind: TextConfig, rows: int) -> list[Tensor]:
    """All that both halves of a layer give."""
    x, more, mixed, rotary = given(kind, rows)
    (alone, inputs), (total, others) = (layer.before(x, residual, rotary) for residual in (None, more))
    return [alone, *inputs, total, *others, *layer.after(more, mixed)]


@each_form
@each_kind
@torch.inference_mode()
def test_both_kernels_give_what_separate_ones_give_to_the_bit(
    kind: TextConfig, form: str, make: Callable[..., DecoderLayer]
) -> None:
    layer = make(kind, form)
    assert isinstance(layer.arrays, FusedLayer)
    few_rows = FewRows.of(layer)
    assert few_rows is not None
    for rows in (1, 2, 5, 6, 7, 15, 16, 17, 24, 25, 33, 100, 600):
        for ours, theirs in zip(halves(layer, kind, rows), halves(few_rows, kind, rows), strict=True):
            assert torch.equal(ours, theirs), rows


@each_form
@torch.inference_mode()
def test_what_is_given_stays_as_it_is(form: str, make: Callable[..., DecoderLayer]) -> None:
    kind = KINDS["plain"]
    layer, (x, more, mixed, rotary) = make(kind, form), given(kind, 20)
    copies = x.clone(), more.clone(), mixed.clone()
    layer.before(x, more, rotary)
    layer.before(x, None, rotary)
    layer.after(more, mixed)
    assert all(map(torch.equal, (x, more, mixed), copies))


@each_form
@torch.inference_mode()
def test_rows_are_the_same_with_any_number_of_threads_and_beyond_what_is_computed_at_once(
    form: str, make: Callable[..., DecoderLayer]
) -> None:
    kind, rows = KINDS["plain"], layer_products.TILES.at_once + 70
    layer = make(kind, form)
    alone, last = halves(layer, kind, 40), given(kind, rows)
    before = threads_used()
    try:
        for threads in {1, before}:
            use_threads(threads)
            for mine, whole in zip(halves(layer, kind, rows), alone, strict=True):
                assert mine.shape[1:] == whole.shape[1:]
            _, more, mixed, _ = last
            cut = slice(rows - 72, None)
            here = layer.after(more[cut], mixed[cut])
            assert all(torch.equal(all_[cut], part) for all_, part in zip(layer.after(more, mixed), here, strict=True))
    finally:
        use_threads(before)


@torch.inference_mode()
def test_arrays_that_do_not_lie_together_are_taken() -> None:
    kind = KINDS["plain"]
    layer, (x, more, mixed, rotary) = layer_of(kind, "float32"), given(kind, 9)
    apart = [torch.cat([each, each], dim=1)[:, : each.shape[1]] for each in (x, more, mixed)]
    for ours, theirs in zip(layer.after(apart[1], apart[2]), layer.after(more, mixed), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(layer.before(*apart[:2], rotary)[0], layer.before(x, more, rotary)[0])


@torch.inference_mode()
def test_adapters_that_add_to_rows_have_separate_kernels_compute() -> None:
    kind = KINDS["plain"]
    layer = layer_of(kind, "float32")
    plain = halves(layer, kind, 3)
    for name in ("mixer.qkv", "mixer.o", "mlp.gate_up", "mlp.down"):
        linear = layer.get_submodule(name)
        assert isinstance(linear, PackedLinear)
        for active in (True, False):
            linear.adapters = Adds(active=active)
            same = [torch.equal(*both) for both in zip(halves(layer, kind, 3), plain, strict=True)]
            assert all(same) is not active
        linear.adapters = None


class Adds:
    """Adds 1 to each number of a product."""

    def __init__(self, *, active: bool) -> None:
        self.active = active

    def add(self, _x: Tensor, out: Tensor) -> Tensor:
        return out.add_(1.0)

    def add_arrays(self, _x: np.ndarray, out: np.ndarray) -> None:
        out += 1.0


@each_form
def test_their_kernels_are_among_those_that_a_start_compiles(form: str, make: Callable[..., DecoderLayer]) -> None:
    kernels = kernels_of(make(KINDS["plain"], form))
    of_layers = {name for name in kernels if name.startswith(layer_kernel.__name__)}
    assert len(of_layers) == 2
    for name in of_layers:
        find(name)


@pytest.mark.parametrize("inner", [96, 32, 63])
def test_a_panel_of_gates_and_values_is_left_to_separate_kernels(inner: int) -> None:
    layer = layer_of(replace(KINDS["plain"], intermediate_size=inner), "float32")
    assert isinstance(layer.arrays, FewRows)


def test_weights_of_several_types_are_left_to_separate_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = PanelWeight.of
    monkeypatch.setattr(
        PanelWeight, "of", lambda weight: kept(weight.bfloat16().float() if len(weight) == 64 else weight)
    )
    assert isinstance(layer_of(KINDS["plain"], "float32").arrays, FewRows)
