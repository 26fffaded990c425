"""dots3-note's text by our decoder: latent attention to what an index chooses, and in windows. All that is for
models of ours is in test_indexed_texts."""

from __future__ import annotations

from typing import Any

import pytest

from common.checkpoints.checkpoint import CheckpointError
from llm_service.families.sight import SpanRule
from llm_service.model_config.text import TextConfig
from llm_service.models.trial import try_ours_of
from tools.models.drawn_prompts import drawn_prompt
from tools.models.tiny import config_of_recipe

KIND = "dots3_note"


@pytest.mark.parametrize(
    "kinds",
    [
        ["full_attention", "full_attention", "sliding_attention", "sliding_attention"],
        ["full_attention", "indexed_attention", "sliding_attention", "indexed_attention"],
    ],
    ids=["without an index", "layers of all kinds"],
)
def test_layers_of_other_kinds_give_transformers_logits(kinds: list[str]) -> None:
    config: Any = config_of_recipe(KIND)
    stated = config.text_config.to_dict()
    windowed = stated["per_layer_config"]["2"]
    apart = {layer: windowed for layer, kind in enumerate(kinds) if kind == "sliding_attention"}
    del stated["rope_parameters"]
    config.text_config = type(config.text_config)(**stated | {"layer_types": kinds, "per_layer_config": apart})
    assert try_ours_of(config, drawn_prompt).spans is SpanRule.NOWHERE


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"num_key_value_heads": 1}, "layers whose latents are for 1 heads of keys and 2 of queries do not fit"),
        ({"head_dim": 24}, "layers whose heads have 24 numbers do not fit latents for 20"),
    ],
)
def test_heads_of_layers_with_a_window_that_do_not_fit_their_latents_are_refused(
    changed: dict[str, int], why: str
) -> None:
    stated: dict[str, Any] = config_of_recipe(KIND).text_config.to_dict()
    TextConfig.of(stated)
    for own in stated["per_layer_config"].values():
        own.update(changed)
    with pytest.raises(CheckpointError, match=why):
        TextConfig.of(stated)
