"""Latent attention: the layer against transformers' own with the same weights, and back ends over a cache of keys that
have their values in them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from common.checkpoints.checkpoint import CheckpointError
from llm_service.layers.attention.backend import PagedChunk
from llm_service.layers.attention.torch_backend import TorchBackend
from llm_service.layers.cache_spec import block_bytes, cache_shapes
from llm_service.layers.mla import chunks as latent_chunks
from llm_service.layers.mla.latent_attention import LatentAttention
from llm_service.layers.rotary.multimodal import MultimodalRotary
from llm_service.layers.rotary.tables import rotary_of
from llm_service.layers.tensor_parallel import ALONE, TensorGroup
from llm_service.model_config.latent import LatentHeads
from llm_service.model_config.text import TextConfig
from llm_service.worker.adapters import shapes_of
from testkit import reference  # noqa: F401 - makes transformers importable beside a CPU torch
from tests.layer_cases import drawn, noise, read

from transformers.models.deepseek_v3.modeling_deepseek_v3 import (  # isort: skip
    DeepseekV3Attention,
    DeepseekV3Config,
    DeepseekV3RotaryEmbedding,
)

from transformers.models.mistral4.modeling_mistral4 import (  # isort: skip
    Mistral4Attention,
    Mistral4Config,
    Mistral4RotaryEmbedding,
)

CPU = torch.device("cpu")
HIDDEN, HEADS, TOKENS = 48, 4, 40
SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": HIDDEN,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 16}
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "queries without a latent": {"q_lora_rank": None},
    "pairs apart": {"rope_interleave": False},
    "yarn": {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8}},
    "yarn without a scale of its own": {"rope_parameters": YARN},
}


def settings_of(form: str) -> DeepseekV3Config:
    made = DeepseekV3Config(**SIZES | FORMS[form], max_position_embeddings=128)
    made._attn_implementation = "eager"
    return made


def shape_of(form: str) -> TextConfig:
    return TextConfig.of(settings_of(form).to_dict())


def attended(layer: LatentAttention, shape: TextConfig, x: Tensor, cuts: list[tuple[int, int]]) -> Tensor:
    """What comes out of the heads, computed from cut to cut."""
    (cache_shape,) = cache_shapes([layer.cache_spec()], 3, 16).values()
    cache, backend = cache_shape.new_cache(torch.float32, CPU)[0], TorchBackend(cache_shape, CPU)
    rotary, found = rotary_of(shape.rotary, CPU), []
    for begin, end in cuts:
        tables = rotary.tables(torch.arange(begin, end).expand(3, -1), torch.float32)
        batch = backend.batch([PagedChunk(begin, end - begin, [2, 0, 1])])
        found.append(layer.mix(layer.project(x[begin:end], tables), cache, batch))
    return torch.cat(found)


@pytest.mark.parametrize("form", FORMS)
@torch.inference_mode()
def test_a_layer_gives_what_transformers_gives_at_once_in_chunks_and_of_ranks(form: str) -> None:
    settings, shape = settings_of(form), shape_of(form)
    theirs = drawn(DeepseekV3Attention(settings, 0))
    x = noise(TOKENS, HIDDEN)
    angles = DeepseekV3RotaryEmbedding(settings)(x, torch.arange(TOKENS)[None])
    mask = torch.full((TOKENS, TOKENS), -torch.inf).triu(1)[None, None]
    expected = theirs(x[None], angles, mask)[0][0]
    ranks = [TensorGroup(rank, 2) for rank in range(2)]
    for groups in ([ALONE], ranks):
        parts = []
        for group in groups:
            ours = LatentAttention(shape.layer_kind(0), shape, group, torch.float32)
            read(ours, theirs)
            whole, cut = (attended(ours, shape, x, cuts) for cuts in ([(0, TOKENS)], [(0, 29), (29, 30), (30, TOKENS)]))
            torch.testing.assert_close(cut, whole, rtol=1e-4, atol=1e-5)
            parts.append(ours.o(whole))
        torch.testing.assert_close(sum(parts), expected, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_queries_that_grow_with_their_places_are_those_of_transformers() -> None:
    """Mistral 4's, of which the first 16 are as they are."""
    rope = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5, "partial_rotary_factor": 0.4}
    settings = Mistral4Config(**SIZES | {"rope_parameters": rope}, max_position_embeddings=128)
    settings._attn_implementation = "eager"
    shape, places = TextConfig.of(settings.to_dict()), torch.arange(TOKENS)[None]
    theirs = drawn(Mistral4Attention(settings, 0))
    x, mask = noise(TOKENS, HIDDEN), torch.full((TOKENS, TOKENS), -torch.inf).triu(1)[None, None]
    expected = theirs(x[None], Mistral4RotaryEmbedding(settings)(x, places), mask, places)[0][0]
    ours = LatentAttention(shape.layer_kind(0), shape, ALONE, torch.float32)
    read(ours, theirs)
    torch.testing.assert_close(
        ours.o(attended(ours, shape, x, [(0, 29), (29, TOKENS)])), expected, rtol=1e-4, atol=1e-5
    )
    assert TextConfig.of(settings.to_dict(), 16).rotary.tempering is None


def test_a_token_takes_one_latent_and_one_rotated_key_on_every_rank() -> None:
    shape = shape_of("plain")
    for group in (ALONE, TensorGroup(1, 2)):
        layer = LatentAttention(shape.layer_kind(0), shape, group, torch.float32)
        spec = layer.cache_spec()
        assert (spec.heads, spec.kv_heads, spec.head_dim) == (HEADS // group.size, 1, 24 + 8)
        assert block_bytes([spec, spec], 16, torch.float32) == 4 * 2 * 16 * (24 + 8)
        (made,) = cache_shapes([spec, spec], 3, 16).values()
        assert made.new_cache(torch.float32, CPU).shape == (2, 1, 4, 16, 1, 24 + 8)


def test_adapters_may_change_all_projections_but_those_that_queries_take_the_other_way_round() -> None:
    found = {name.removeprefix("layers.0.self_attn.") for name in shapes_of(shape_of("plain")) if "self_attn" in name}
    assert found == {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"}


@pytest.mark.parametrize("expands", [True, False])
@pytest.mark.parametrize(("dtype", "kept"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)])
@torch.inference_mode()
def test_latents_in_16_bits(
    dtype: torch.dtype, kept: torch.dtype, expands: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the cache, and weights as well."""
    shape = shape_of("plain")
    exact, layer = (LatentAttention(shape.layer_kind(0), shape, ALONE, each) for each in (torch.float32, dtype))
    drawn(exact)
    layer.load_state_dict(exact.state_dict())
    exact.load_state_dict(layer.state_dict())
    monkeypatch.setattr(LatentHeads, "expands", lambda *_: expands)
    (cache_shape,) = cache_shapes([layer.cache_spec()], 3, 16).values()
    query, key = 3 * noise(TOKENS, HEADS, 20), noise(TOKENS, 1, 32, seed=2)
    found = []
    for each, its, cache in ((exact, torch.float32, torch.float32), (layer, dtype, kept)):
        batch = TorchBackend(cache_shape, CPU).batch([PagedChunk(0, TOKENS, [2, 0, 1])])
        given = query.to(dtype).to(its), key.to(dtype).to(its)
        found.append(each.mix(given, cache_shape.new_cache(cache, CPU)[0], batch).float())
    torch.testing.assert_close(found[1], found[0], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("count", [1, 5, TOKENS])
@torch.inference_mode()
def test_queries_are_absorbed_or_keys_and_values_made_of_latents(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same comes out, of several chunks in any order, one of which is computed in stretches."""
    shape = shape_of("yarn")
    layer = LatentAttention(shape.layer_kind(0), shape, ALONE, torch.float32)
    drawn(layer)
    (cache_shape,) = cache_shapes([layer.cache_spec()], 9, 16).values()
    monkeypatch.setattr(latent_chunks, "_ROOM", 4 * 9 * (count + 20))
    chunks = [PagedChunk(20, count, [2, 0, 1, 8]), PagedChunk(3, 1, [3]), PagedChunk(0, count, [7, 5, 6])]
    cache = noise(*cache_shape.new_cache(torch.float32, CPU)[0].shape)
    rotary = MultimodalRotary.of(shape.rotary, CPU)
    tables = rotary.tables(torch.arange(2 * count + 1).expand(3, -1), torch.float32)
    inputs = layer.project(noise(2 * count + 1, HIDDEN), tables)
    found = []
    for expands in (True, False):
        monkeypatch.setattr(LatentHeads, "expands", lambda _, own, before, much=expands: much and own + before != 4)
        batch = TorchBackend(cache_shape, CPU).batch(chunks)
        found.append(layer.mix(inputs, cache.clone(), batch))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    mixed = TorchBackend(cache_shape, CPU).batch(chunks)
    attended = mixed.attend(layer.products.absorbed(inputs[0]), inputs[1], inputs[1][..., :24], cache.clone())
    torch.testing.assert_close(layer.products.values(attended.view(-1, HEADS, 24)), found[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("own", [{"v_head_dim": 99}, {"head_dim": 99}, {"num_key_value_heads": 1}])
def test_sizes_of_latents_and_heads_that_single_layers_have_are_refused(own: dict[str, int]) -> None:
    stated = settings_of("plain").to_dict() | {"per_layer_config": {"0": own}}
    with pytest.raises(CheckpointError, match="layers of one type with different heads"):
        TextConfig.of(stated)
