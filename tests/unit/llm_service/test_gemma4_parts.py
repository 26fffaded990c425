"""Parts that Gemma 4's layers have, each against transformers' own module with the same weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from common.checkpoints.checkpoint import CheckpointError
from llm_service.layers.attention.backend import PagedChunk
from llm_service.layers.attention.torch_backend import TorchBackend
from llm_service.layers.cache_spec import PagedKV, SharedKV, cache_shapes
from llm_service.layers.decoder_layer import DecoderLayer
from llm_service.layers.embeddings.per_layer import PerLayerEmbeddings
from llm_service.layers.mixer import HandedOn
from llm_service.layers.moe.dense_hybrid import DenseHybridExperts
from llm_service.layers.norms import RMSNorm
from llm_service.layers.rotary.multimodal import MultimodalRotary
from llm_service.layers.tensor_parallel import ALONE, TensorGroup
from llm_service.model_config.attention import HeadShape
from llm_service.model_config.layer_shapes import LayerInputs
from llm_service.model_config.text import TextConfig
from llm_service.worker.adapters import shapes_of
from testkit import reference  # noqa: F401 - makes transformers importable beside a CPU torch
from tests.layer_cases import drawn, noise, read

from transformers.models.gemma4.modeling_gemma4 import (  # isort: skip
    Gemma4RMSNorm,
    Gemma4TextConfig,
    Gemma4TextDecoderLayer,
    Gemma4TextModel,
    Gemma4TextRotaryEmbedding,
)

CPU = torch.device("cpu")
HIDDEN, TOKENS, WORDS = 64, 40, 32
SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "vocab_size_per_layer_input": WORDS,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
INPUTS = SIZES | {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}
EQUAL = SIZES | {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
EXPERTS = EQUAL | {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 40}
FORMS = {"inputs": INPUTS, "keys as values": EQUAL, "experts": EXPERTS}


def ours(settings: dict[str, Any], **more: Any) -> TextConfig:
    return TextConfig.of({"model_type": "gemma4_text", "max_position_embeddings": 4096, **settings, **more})


def library(settings: dict[str, Any]) -> Gemma4TextConfig:
    made = Gemma4TextConfig(**settings)
    made._attn_implementation = "eager"
    return made


def scaled(layer: nn.Module) -> nn.Module:
    drawn(layer)
    layer.layer_scalar.fill_(0.7)
    return layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_a_norm_with_a_long_gain(dtype: torch.dtype) -> None:
    theirs = drawn(Gemma4RMSNorm(HIDDEN)).to(dtype)
    holder = nn.Module()
    holder.norm = RMSNorm(HIDDEN, 1e-6, dtype, long_gain=True)
    read(holder, nn.ModuleDict({"norm": theirs}))
    x = 3 * noise(5, HIDDEN).to(dtype)
    assert holder.norm.weight.dtype == torch.float32
    torch.testing.assert_close(holder.norm(x), theirs(x), rtol=1.2 * torch.finfo(dtype).eps, atol=1e-7)


@pytest.mark.parametrize("at", [0, 1, 2, 3])
@pytest.mark.parametrize("form", FORMS)
@torch.inference_mode()
def test_a_layer_gives_what_transformers_gives(form: str, at: int) -> None:
    """With a window and without; the last two of the form with inputs attend to what the two before have kept."""
    settings, shape = library(FORMS[form]), ours(FORMS[form])
    theirs = scaled(Gemma4TextDecoderLayer(settings, at))
    layer = DecoderLayer(shape.layer_kind(at), shape, ALONE, torch.float32)
    read(layer, theirs)
    x, positions = noise(TOKENS, HIDDEN), torch.arange(TOKENS)
    given = noise(TOKENS, 8, seed=5) if form == "inputs" else None
    kind = settings.layer_types[at]
    mask = torch.full((TOKENS, TOKENS), -torch.inf).triu(1)
    if kind == "sliding_attention":
        mask = mask + torch.full((TOKENS, TOKENS), -torch.inf).tril(-12)
    spec, kept = layer.mixer.cache_spec(), HandedOn()
    if isinstance(spec, SharedKV):
        spec = PagedKV(4, 2, 32 if kind == "full_attention" else 16, shape_kind(shape, at))
        both = noise(TOKENS, 2, spec.head_dim, seed=6), noise(TOKENS, 2, spec.head_dim, seed=7)
        kept.keys[shape.windows[at]] = both
    states = {kind: tuple(each.transpose(0, 1)[None] for each in kept.keys.get(shape.windows[at], ()))}
    angles = Gemma4TextRotaryEmbedding(settings)(x, positions[None], kind)
    expected = theirs(
        x[None].clone(), None if given is None else given[None], states, angles, mask[None, None], positions[None]
    )[0]
    (cache_shape,) = cache_shapes([spec], 3, 16).values()
    batch = TorchBackend(cache_shape, CPU).batch([PagedChunk(0, TOKENS, [2, 0, 1])])
    rotary = shape.window_rotary if layer.is_local else shape.rotary
    assert rotary is not None
    tables = MultimodalRotary.of(rotary, CPU).tables(positions.expand(3, -1), torch.float32)
    cache = cache_shape.new_cache(torch.float32, CPU)[0]
    found, rest = layer(x, None, tables, cache, batch, given=given, kept=kept)
    assert rest is None
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    few = torch.tensor([7, TOKENS - 1])
    part, _ = layer(x, None, tables, cache, batch, few, given=given, kept=kept)
    torch.testing.assert_close(part, found[few], rtol=1e-4, atol=1e-5)


def shape_kind(shape: TextConfig, at: int) -> Any:
    own = DecoderLayer(shape.layer_kind(at - 2), shape, ALONE, torch.float32).mixer.cache_spec()
    assert isinstance(own, PagedKV)
    return own.kind


@torch.inference_mode()
def test_ranks_share_experts_beside_a_dense_part() -> None:
    settings, shape = library(EXPERTS), ours(EXPERTS)
    theirs = scaled(Gemma4TextDecoderLayer(settings, 0))
    names = ("router", "experts", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2")
    parts = nn.ModuleDict({name: getattr(theirs, name) for name in (*names, "pre_feedforward_layernorm_2")})
    whole = DenseHybridExperts(shape, ALONE, torch.float32)
    read(whole, parts)
    x = noise(9, HIDDEN)
    weights, chosen = whole.router(x)
    _, expected, numbers = theirs.router(x)
    torch.testing.assert_close(weights, expected)
    assert torch.equal(chosen, numbers)
    for alone in (False, True):
        groups = [TensorGroup(rank, 2, expert_parallel=alone) for rank in range(2)]
        halves = [DenseHybridExperts(shape, group, torch.float32) for group in groups]
        for half in halves:
            read(half, parts)
        mixed = sum(half.mixture(x, weights, chosen) for half in halves)
        torch.testing.assert_close(mixed, theirs.experts(x, chosen, weights), rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_inputs_of_layers_are_looked_up_and_made_of_embeddings() -> None:
    theirs = drawn(Gemma4TextModel(library(INPUTS)))
    shape = ours(INPUTS)
    assert shape.layer_inputs == LayerInputs(8, 0, shape.vocab_size)
    made = PerLayerEmbeddings(shape.layer_inputs, shape, ALONE, torch.float32)
    names = ("embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm")
    read(made, nn.ModuleDict({name: getattr(theirs, name) for name in names}))
    ids, embedded = torch.tensor([3, 0, 31, 3]), noise(4, HIDDEN)
    expected = theirs.project_per_layer_inputs(embedded[None], theirs.get_per_layer_inputs(ids[None], None))[0]
    torch.testing.assert_close(made(embedded, ids), expected.transpose(0, 1), rtol=1e-5, atol=1e-5)


def test_heads_are_stated_by_name_or_layer_by_layer() -> None:
    by_name = ours(EQUAL)
    assert by_name.full_heads == HeadShape(1, 32, keys_as_values=True)
    stated = library(EQUAL).to_dict()
    assert set(stated["per_layer_config"]) == {"1", "3"}
    assert TextConfig.of(stated).full_heads == by_name.full_heads
    assert [by_name.head_shape(by_name.layer_kind(layer)).head_dim for layer in range(4)] == [16, 32, 16, 32]
    assert (by_name.rotary.dim, by_name.window_rotary and by_name.window_rotary.dim) == (32, 16)
    assert ours({**SIZES, "global_head_dim": 16}).full_heads is None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"per_layer_config": {"1": {"intermediate_size": 8}}}, "layers with intermediate_size of their own"),
        ({"per_layer_config": {"1": {"head_dim": 32}}}, "layers of one type with different heads"),
        ({"per_layer_config": {"1": {"v_head_dim": 32}}}, "layers of one type with different heads"),
        ({"per_layer_config": {"0": {"head_dim": 32}}}, "layers of one type with different heads"),
        ({"vocab_size_per_layer_input": 8}, "layers that have inputs for other tokens"),
    ],
)
def test_what_single_layers_have_otherwise_is_refused_by_name(change: dict[str, Any], why: str) -> None:
    with pytest.raises(CheckpointError, match=why):
        ours(INPUTS, **change)


def test_keys_that_no_layer_has_are_refused() -> None:
    shape = replace(ours(INPUTS), shared_layers=3)
    assert shape.layer_kind(2).keys_of == 0
    with pytest.raises(CheckpointError, match="no layer has the keys and values that others"):
        shape.layer_kind(3)


def test_adapters_may_change_the_gates_of_inputs_and_no_keys_that_are_not_there() -> None:
    shapes = shapes_of(ours(INPUTS))
    assert shapes["layers.2.per_layer_input_gate"] == (8, HIDDEN)
    assert shapes["layers.2.mlp.up_proj"] == (192, HIDDEN)
    assert "layers.1.self_attn.k_proj" in shapes
    assert "layers.2.self_attn.k_proj" not in shapes
