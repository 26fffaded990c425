"""Texts that turn by other frequencies from a length on (LongRoPE): each sequence by its own length."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.checkpoints.checkpoint import CheckpointError
from common.hf import classes as hf_classes
from common.hf import models as hf_models
from llm_service.families.family import FAR
from llm_service.models.decoder import Decoder
from llm_service.models.hf.rotary import LongRotary
from testkit.hf_side import GREEDY, Served
from tools.models.prompts import Part, picture
from tools.models.recipes import RECIPES
from tools.models.reference import TOKENS, Reference
from tools.models.tiny import make_by

TURNS_AT = 640
"""A picture's rows are fewer, with which a text is tried."""


def phi3(**rope: Any) -> Any:
    """A configuration of heads of 16 numbers, that turns beyond 64 tokens."""
    factors = {"short_factor": [1.0, 1.2, 1.5, 2.0] * 2, "long_factor": [2.0, 3.0, 5.0, 9.0] * 2}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors, **rope}
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 4096}
    made = hf_classes.transformers().CONFIG_MAPPING["phi3"]
    return made(rope_parameters=rope, original_max_position_embeddings=64, **sizes)


def test_it_turns_each_sequence_as_transformers_turns_it_alone() -> None:
    config = phi3()
    assert (hf_models.longest_context(config), hf_models.long_rope_threshold(config)) == (4096, 64)
    rotary = hf_classes.transformers().models.phi3.modeling_phi3.Phi3RotaryEmbedding(config)
    like, short, long = torch.zeros(1), torch.arange(64)[None], torch.arange(100)[None]
    expected = [rotary(like, places) for places in (short, long)]
    found = LongRotary(rotary)(like, torch.cat([short, long + FAR], dim=1))
    for at in range(2):
        torch.testing.assert_close(found[at], torch.cat([each[at] for each in expected], dim=1))
    assert not torch.equal(expected[0][0], expected[1][0][:, :64])


def test_a_module_that_turns_otherwise_is_refused() -> None:
    class Doubled(hf_classes.transformers().models.phi3.modeling_phi3.Phi3RotaryEmbedding):  # type: ignore[misc]
        def forward(self, like: torch.Tensor, places: torch.Tensor) -> Any:
            return super().forward(like, 2 * places)

    with pytest.raises(CheckpointError, match="Doubled turns long sequences in a way that is not known here"):
        LongRotary(Doubled(phi3()))


@pytest.mark.soak
@pytest.mark.parametrize("by_hf", [False, True], ids=["our decoder", "transformers"])
def test_prompts_of_both_lengths_go_on_as_transformers_beside_each_other(tmp_path: Path, *, by_hf: bool) -> None:
    """In short steps, at once, and from the prefix cache, in which they share nothing; one that is short ends where it
    would turn."""
    recipe = RECIPES["phi4_multimodal"]

    def config(*given: Any) -> Any:
        made = recipe.config(*given)
        made.original_max_position_embeddings = TURNS_AT
        made.rope_parameters = {**made.rope_parameters, "original_max_position_embeddings": TURNS_AT}
        return made

    folder = make_by(replace(recipe, config=config), tmp_path)
    served, reference = Served.of(folder), Reference(folder)
    assert (served.found.long_rope_threshold, served.found.max_position) == (TURNS_AT, 8192)
    text = "Tell me about two red circles. "
    asked: dict[str, list[Part]] = {"short": [text * 5], "long": [text * 25], "last": [text * 19]}
    asked["last"][0] += "!" * (TURNS_AT - served_length(served, asked["last"]) - 4)
    prompts = [served.prompt(parts) for parts in asked.values()]
    assert [prompt.layout.max_length for prompt in prompts] == [TURNS_AT + 1, 0, TURNS_AT + 1]
    expected = [reference.tokens(reference.inputs(parts)) for parts in asked.values()]
    expected[2] = expected[2][:5]
    for options in ({"step_tokens": 40}, {}):
        engine = served.engine(by_hf=by_hf, prefix_cache=True, **options)
        assert isinstance(engine.decoder, Decoder) != by_hf
        for cached in (False, True):
            outcomes = engine.run(prompts, GREEDY, [0, 0, 0])
            assert [outcome.tokens for outcome in outcomes] == expected
            assert not cached or all(outcome.cached for outcome in outcomes)
    for first, shared in ((0, True), (1, False)):
        engine = served.engine(by_hf=by_hf, prefix_cache=True)
        engine.run([prompts[first]], GREEDY, [0])
        (outcome,) = engine.run([prompts[2]], GREEDY, [0])
        assert (outcome.tokens, bool(outcome.cached)) == (expected[2], shared)
    assert len(expected[1]) == TOKENS


def served_length(served: Served, parts: list[Part]) -> int:
    """Tokens of a prompt."""
    return len(served.prompt(parts).layout.ids)


def test_pictures_whose_places_are_fewer_than_their_rows_reach_less_far(tmp_path: Path) -> None:
    """transformers counts places, of which a picture on three axes has as many as its longer side has rows."""
    recipe, long_rope_threshold = RECIPES["paddleocr_vl"], 110

    def config(*given: Any) -> Any:
        made = recipe.config(*given)
        text = made.text_config
        factors = {"short_factor": [1.0, 1.2, 1.5, 2.0] * 2, "long_factor": [2.0, 3.0, 5.0, 9.0] * 2}
        rope = {**text.rope_parameters, "rope_type": "longrope", **factors}
        text.rope_parameters = {**rope, "original_max_position_embeddings": long_rope_threshold}
        return made

    folder = make_by(replace(recipe, config=config), tmp_path)
    served, reference = Served.of(folder), Reference(folder)
    many: list[Part] = [part for seed in range(4) for part in (picture(seed, 170, 110), "? ")]
    asked = [many, [*many, "!" * 45], [*many, "!" * 80], ["!" * 90]]
    prompts = [served.prompt(parts) for parts in asked]
    lengths = [len(prompt.layout.ids) for prompt in prompts]
    reaches = [int(np.frombuffer(prompt.layout.positions, np.int32).max()) % FAR + 1 for prompt in prompts]
    assert lengths[0] > long_rope_threshold >= reaches[1] > long_rope_threshold - TOKENS
    assert reaches[2] > long_rope_threshold
    expected = [reference.tokens(reference.inputs(parts)) for parts in asked]
    expected = [
        said if reach > long_rope_threshold else said[: long_rope_threshold + 1 - reach]
        for said, reach in zip(expected, reaches, strict=True)
    ]
    engine = served.engine(step_tokens=40)
    assert isinstance(engine.decoder, Decoder)
    assert [outcome.tokens for outcome in engine.run(prompts, GREEDY)] == expected
