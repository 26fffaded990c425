"""GLM-5 Next's text by our decoder: Kimi Delta Attention, and latent attention to pools that an index chooses. All
that is for models of ours is in test_indexed_texts."""

from __future__ import annotations

from typing import Any

import pytest

from common.checkpoints.checkpoint import CheckpointError
from llm_service.families.sight import SpanRule
from llm_service.models.trial import try_ours_of
from tools.models.drawn_prompts import drawn_prompt
from tools.models.tiny import config_of_recipe

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of transformers' processor
KIND = "glm5_next"


@pytest.mark.parametrize(
    "changed",
    [
        {"indexer_types": ["full"] * 5},
        {"layer_types": ["indexed_attention"] * 5, "indexer_types": ["full", "shared"] * 2 + ["full"]},
        {"layer_types": ["linear_attention"] * 4 + ["indexed_attention"], "indexer_types": ["full"] * 5},
        {"linear_lower_bound": None},
        {"hc_mult": 1},
        {"mlp_layer_types": ["dense"] * 5},
    ],
    ids=["each chooses", "no states", "one that chooses", "no bound", "one stream", "no experts"],
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
