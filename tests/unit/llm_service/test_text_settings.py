"""What configurations of texts state in words of their own."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from common.checkpoints.checkpoint import CheckpointError
from llm_service.layers.decoder_layer import DecoderLayer
from llm_service.layers.norms import LayerNorm, Unnormed
from llm_service.layers.rotary.multimodal import MultimodalRotary
from llm_service.layers.tensor_parallel import ALONE
from llm_service.model_config.text import TextConfig
from llm_service.models.decoder import Decoder

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rope_theta": 1e4,
}
MULTIPLIERS = {"embedding_multiplier": 12.0, "residual_multiplier": 0.25, "attention_multiplier": 0.1}


def text(kind: str, **more: Any) -> TextConfig:
    return TextConfig.of({"model_type": kind, **SIZES, **more})


def test_logits_are_multiplied_or_divided_as_the_family_has_it() -> None:
    assert text("granite", logits_scaling=8.0).logit_scale == 0.125
    assert text("hyperclovax", logits_scaling=8.0).logit_scale == 8.0
    assert text("cohere_compass_text", logit_scale=0.5).logit_scale == 0.5
    assert text("cohere_compass_text", logit_scale=None).logit_scale == 1.0
    assert text("cohere2", logit_scale=0.5).logit_scale == 1.0


def test_what_is_added_is_multiplied_where_it_is_added_to() -> None:
    config = text("granite", rms_norm_eps=1e-6, **MULTIPLIERS)
    assert (config.entry_scale, config.residual_eps, config.attention_scale) == (48.0, 1.6e-5, 0.1)
    layer = Decoder(config, ALONE, torch.float32, CPU).layers[0]
    assert isinstance(layer, DecoderLayer)
    assert [norm.eps for norm in (layer.mixer_in_norm, layer.mlp_in_norm) if isinstance(norm, nn.Module)] == [
        1.6e-5
    ] * 2


@pytest.mark.parametrize("name", ["embedding_multiplier", "residual_multiplier", "logits_scaling"])
def test_a_multiplier_below_0_is_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match=f"a {name} below 0 is not supported"):
        text("granite", **{name: -1.0})


def test_layers_without_a_window_turn_no_pair_where_others_have_one() -> None:
    places = torch.arange(3, 9).expand(3, -1)

    def cosines(kind: str, **more: Any) -> torch.Tensor:
        return MultimodalRotary.of(text(kind, **more).rotary, CPU).tables(places, torch.float32)[0]

    assert (cosines("exaone4", sliding_window=8, sliding_window_pattern=4) == 1).all()
    assert (cosines("exaone4", sliding_window=None) != 1).any()
    types = [*["sliding_attention"] * 3, "full_attention"]
    assert (cosines("exaone4", sliding_window=8, sliding_window_pattern="LLLG", layer_types=types) == 1).all()


@pytest.mark.parametrize(
    ("window", "local", "rotated", "known"),
    [(4, 3, 3, True), (4, 0, 0, True), (4, 0, 1, False), (None, 3, 3, False), (None, 0, 4, True)],
)
def test_layers_that_are_rotated_are_those_that_the_configuration_says(
    window: int | None, local: int, rotated: int, *, known: bool
) -> None:
    """The first so many have a window, or are rotated. A trial, which has fewer layers, may not tell."""
    types = ["sliding_attention"] * local + ["full_attention"] * (4 - local)
    bases = [1e4] * rotated + [0.0] * (4 - rotated)
    given: dict[str, Any] = {"sliding_window": window, "layer_types": types}
    if known:
        assert text("muse_glimmer_text", **given, layer_rope_theta=bases).layers == 4
    else:
        with pytest.raises(CheckpointError, match="rotary positions of layers without a window"):
            text("muse_glimmer_text", **given, layer_rope_theta=bases)


def test_layers_with_a_window_are_every_so_manieth_or_as_letters_say() -> None:
    for pattern in (4, "LLLG"):
        assert text("exaone4", sliding_window=8, sliding_window_pattern=pattern).windows == (8, 8, 8, 0)
    assert text("exaone4", sliding_window=8, sliding_window_pattern="GL").windows == (0, 8, 0, 8)
    assert text("exaone4", sliding_window=None, sliding_window_pattern="LLLG").windows == ()
    for pattern in ("LLXG", -1):
        with pytest.raises(CheckpointError, match=f"a pattern of layers with a window of '{pattern}' is not supported"):
            text("exaone4", sliding_window=8, sliding_window_pattern=pattern)


def test_norms_are_those_that_the_family_has() -> None:
    behind = Decoder(text("exaone4", sliding_window=8), ALONE, torch.float32, CPU).layers[0]
    assert [type(behind.mixer_in_norm), type(behind.mlp_in_norm)] == [Unnormed, Unnormed]
    beside = Decoder(text("cohere2", sliding_window=8), ALONE, torch.float32, CPU)
    assert [type(beside.layers[0].mixer_in_norm), type(beside.norm)] == [LayerNorm, LayerNorm]


def test_experts_that_are_chosen_within_groups_by_their_probabilities_are_refused() -> None:
    experts = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "routed_scaling_factor": 2.0,
    }
    kinds = ["dense", "sparse", "sparse", "sparse"]
    config = text("deepseek_ocr2_text", **experts, n_shared_experts=2, mlp_layer_types=kinds, topk_method="greedy")
    assert (config.expert_scale, config.shared_expert_size, config.dense_layers) == (2.0, 32, {0})
    with pytest.raises(CheckpointError, match="experts that are chosen as group_limited_greedy says"):
        text("deepseek_ocr2_text", **experts, topk_method="group_limited_greedy")


@pytest.mark.parametrize(("kind", "activation"), [("llama", "relu2"), ("cosmos3_edge_text", "silu")])
def test_what_opens_gates_is_not_what_parts_without_them_have(kind: str, activation: str) -> None:
    with pytest.raises(CheckpointError, match=f"activation {activation} is not supported"):
        text(kind, hidden_act=activation)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"hidden_size": None}, "config.json has a setting that is of another kind than it has to be: int"),
        ({"rope_parameters": "yarn"}, "config.json has a setting that is of another kind than it has to be: 'str'"),
        ({"indexer_compress_ratio": 0}, "an index that keeps 9 tokens in stretches of 0 is not supported"),
        ({"ngram_size": 1}, "n-grams of fewer than two tokens, or of sizes below 1, are not supported"),
        ({"heads_per_ngram": 0}, "n-grams of fewer than two tokens, or of sizes below 1, are not supported"),
    ],
)
def test_what_is_no_number_or_no_size_is_refused_in_a_sentence(settings: dict[str, Any], why: str) -> None:
    index = {f"indexer_{name}": 1 for name in ("n_heads", "kv_heads", "head_dim")}
    index |= {"indexer_budget": 9, "indexer_compress_ratio": 3, "num_experts": 2, "moe_intermediate_size": 8}
    grams = {"ple_layer_ids": [1], "eos_token_id": 1, "layer_types": ["full_attention"] * 4}
    with pytest.raises(CheckpointError, match=re.escape(why)):
        text("qwen4_exp_text", **{**index, **grams, **settings})


def test_scores_have_the_cap_that_is_stated_or_usual() -> None:
    assert text("gemma2").attention_cap == 50.0
    assert text("gemma2", attn_logit_softcapping=None).attention_cap is None
    assert text("gemma3_text").attention_cap is None
    windows = text("gemma2", sliding_window=16, num_hidden_layers=3).windows
    assert windows == (16, 0, 16)


def test_latent_attention_with_a_cap_is_refused() -> None:
    sizes = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    with pytest.raises(CheckpointError, match="soft caps of scores are not supported in latent attention"):
        text("deepseek_v3", attn_logit_softcapping=50.0, **sizes)
