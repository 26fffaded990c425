"""Hunyuan V4's text by our decoder: latent attention to the tokens that an index chooses, with sinks and gates, over
several streams. All that is for models of ours is in test_indexed_texts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from common.checkpoints.checkpoint import CheckpointError
from llm_service.families.gates import CutGates
from llm_service.families.sight import SpanRule
from llm_service.layers.mla import chunks as latent_chunks
from llm_service.layers.mla.latent_attention import HeadSinks, LatentAttention
from llm_service.layers.mla.sparse import SparseLatentAttention
from llm_service.layers.residual.gated_hyper_connections import StreamGates
from llm_service.layers.sparse_attention.token_indexer import OrderedLayerNorm
from llm_service.models.trial import try_ours_of
from tools.models.drawn_prompts import drawn_prompt
from tools.models.tiny import config_of_recipe

KIND = "hy_v4_vl"


YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
    "mrope_section": [2, 1, 1],
}


@pytest.mark.parametrize(
    "changed",
    [
        {"indexer_types": ["full"] * 5, "hc_mult": 1},
        {"mlp_layer_types": ["dense"] * 5, "hc_magnitude": 1.0, "hc_eps": 0.05},
        {"n_group": 2, "topk_group": 1, "n_routed_experts": 8, "n_shared_experts": 2, "rms_norm_eps": 0.01},
        {"rope_parameters": YARN},
    ],
    ids=["each chooses, one stream", "no experts", "groups of experts", "scaled places"],
)
def test_other_settings_give_transformers_logits(changed: dict[str, Any]) -> None:
    config: Any = config_of_recipe(KIND)
    config.text_config = type(config.text_config)(**config.text_config.to_dict() | changed)
    assert try_ours_of(config, drawn_prompt).spans is SpanRule.NOWHERE


def test_biases_of_latents_are_those_of_transformers() -> None:
    config: Any = config_of_recipe(KIND)
    config.text_config = type(config.text_config)(**config.text_config.to_dict() | {"attention_bias": True})
    with pytest.raises(CheckpointError, match="biases"):
        try_ours_of(config, drawn_prompt)


def test_the_published_configuration_is_tried_as_it_is() -> None:
    """Shrunk, and of fewer words; all its other defaults are known."""
    config: Any = config_of_recipe(KIND)
    text = config.text_config
    config.text_config = type(text)(vocab_size=text.vocab_size, pad_token_id=text.pad_token_id)
    assert try_ours_of(config, drawn_prompt).spans is SpanRule.NOWHERE


def _first_choice(part: SparseLatentAttention, asked: Any, cache: Tensor, index: Any, handed: Any) -> list[Tensor]:
    if part.index is None:
        return list(handed.choice)
    made = index.choose(part.index.query(*asked), cache)
    handed.choice = handed.choice or made
    return list(made)


def _unscaled(gates: StreamGates, every: Tensor) -> tuple[Tensor, ...]:
    made = nn.functional.linear(every, gates.weight) * gates.scale.repeat_interleave(gates._count) + gates.base
    return made.sigmoid().split(gates._count, dim=1)


WRONG: dict[str, tuple[Any, str, Any]] = {
    "no sinks": (HeadSinks, "_place", lambda sinks, _: sinks.scores.fill_(-torch.inf)),
    "no sinks where keys are made anew": (latent_chunks, "softmax_with_sinks", lambda scores, _: scores.softmax(-1)),
    "no gates": (LatentAttention, "opened", lambda part, attended, _: attended),
    "another layer's choice": (SparseLatentAttention, "_choice", _first_choice),
    "streams that are not normed": (StreamGates, "forward", _unscaled),
    "experts whose gates are not cut": (CutGates, "opened", lambda _, gate, up, sigmoid: gate * sigmoid(gate) * up),
    "keys of an index that are not normed": (OrderedLayerNorm, "forward", lambda _, x: x),
}
ALIKE = (
    *("no sinks where keys are made anew", "no gates", "another layer's choice", "streams that are not normed"),
    *("experts whose gates are not cut", "keys of an index that are not normed"),
)
"""The trial tells these as it does the others."""


@pytest.mark.usefixtures("references_once")
@pytest.mark.parametrize(
    "wrong", [pytest.param(each, marks=pytest.mark.soak if each in ALIKE else ()) for each in WRONG]
)
def test_layers_that_compute_otherwise_are_told(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*WRONG[wrong])
    with pytest.raises(CheckpointError, match="the logits of our decoder are not transformers'"):
        try_ours_of(config_of_recipe(KIND), drawn_prompt)


@pytest.mark.usefixtures("references_once")
def test_layers_that_compute_as_they_should_pass_beside_the_same_references() -> None:
    assert try_ours_of(config_of_recipe(KIND), drawn_prompt).spans is SpanRule.NOWHERE
