"""Frequencies of rotary pairs that reach further than a model was trained for are those of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from common.checkpoints.checkpoint import CheckpointError
from common.hf.classes import transformers
from llm_service.families.family import FAR
from llm_service.layers.rotary.multimodal import MultimodalRotary
from llm_service.layers.rotary.tables import rotary_of
from llm_service.model_config.rotary import RotaryScaling
from llm_service.model_config.text import TextConfig

CPU = torch.device("cpu")
THETA, DIM, LONGEST = 500_000.0, 128, 131_072
LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
SETTINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": LLAMA3 | {"factor": 8.0},
    "llama3, another factor": LLAMA3 | {"factor": 32.0, "high_freq_factor": 2.0},
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.3},
    "yarn": YARN,
    "yarn that says by how much": YARN | {"attention_factor": 0.7},
    "yarn with two magnitudes": YARN | {"factor": 16.0, "mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn with one of two magnitudes": YARN | {"mscale": 0.8},
    "yarn with other bounds": YARN | {"beta_fast": 16.0, "beta_slow": 4.0, "truncate": False},
}


def rotary(scaling: RotaryScaling | None) -> MultimodalRotary:
    return MultimodalRotary(DIM, THETA, (DIM // 2, 0, 0), interleaved=False, device=CPU, scaling=scaling)


@pytest.mark.parametrize("kind", SETTINGS)
def test_frequencies_and_magnitude_are_those_of_transformers(kind: str) -> None:
    rope = SETTINGS[kind] | {"rope_theta": THETA}
    config = transformers().LlamaConfig(
        hidden_size=2 * DIM, num_attention_heads=2, max_position_embeddings=LONGEST, rope_parameters=dict(rope)
    )
    compute = transformers().modeling_rope_utils.ROPE_INIT_FUNCTIONS[rope["rope_type"]]
    frequencies, magnitude = compute(config, CPU)
    scaling = RotaryScaling.of(rope, LONGEST)
    assert scaling is not None
    assert scaling.magnitude == pytest.approx(magnitude)
    ours = rotary(scaling)
    torch.testing.assert_close(ours._frequencies, frequencies, rtol=1e-5, atol=0)
    assert not torch.allclose(frequencies, rotary(None)._frequencies)
    positions = torch.tensor([0, 1, 700]).expand(3, -1)
    cosine, sine = ours.tables(positions, torch.float32)
    turns = torch.outer(positions[0].float(), frequencies).repeat(1, 2).unsqueeze(1)
    torch.testing.assert_close(cosine, turns.cos() * magnitude, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(sine, turns.sin() * magnitude, rtol=1e-3, atol=1e-3)


def test_what_is_not_scaled_has_none() -> None:
    assert RotaryScaling.of({"rope_type": "default"}, LONGEST) is None
    assert RotaryScaling.of({"type": "mrope", "mrope_section": [16, 24, 24]}, LONGEST) is None
    assert RotaryScaling.of({"type": "dynamic", "factor": 2.0}, LONGEST) is None


@pytest.mark.parametrize("more", [{}, {"factor": 8.0}, {"attention_factor": 1.3}])
def test_sequences_turn_by_their_length_as_transformers_turns_each_alone(more: dict[str, float]) -> None:
    factors = {"short_factor": [1.0, 1.2, 1.5, 2.0] * 2, "long_factor": [2.0, 3.0, 5.0, 9.0] * 2}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.5, **factors, **more}
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 4096}
    config = transformers().CONFIG_MAPPING["phi3"](rope_parameters=rope, original_max_position_embeddings=64, **sizes)
    theirs, like = transformers().models.phi3.modeling_phi3.Phi3RotaryEmbedding(config), torch.zeros(1)
    text = TextConfig.of(config.to_dict())
    assert text.rotary.dim == 16
    short, long = torch.arange(64), torch.arange(100)
    expected = [theirs(like, places[None]) for places in (short, long)]
    found = rotary_of(text.rotary, CPU).tables(torch.cat([short, long + FAR]).expand(3, -1), torch.float32)
    for ours, both in zip(found, zip(*expected, strict=True), strict=True):
        torch.testing.assert_close(ours[:, 0], torch.cat([each[0] for each in both]))
    assert not torch.equal(expected[0][0][0], expected[1][0][0, :64])


def test_it_is_refused_where_places_do_not_tell_it() -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    rope |= {"original_max_position_embeddings": 64}
    text = {"model_type": "llama", "vocab_size": 9, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
    text |= {"intermediate_size": 96, "rope_parameters": rope}
    assert TextConfig.of(text).rotary.scaling is not None
    with pytest.raises(CheckpointError, match="factors of longrope are not as many as pairs that are rotated"):
        TextConfig.of({**text, "rope_parameters": {**rope, "long_factor": [2.0]}})
    with pytest.raises(CheckpointError, match="rotary scaling longrope is not supported here"):
        TextConfig.of({**text, "model_type": "qwen2_vl"})
