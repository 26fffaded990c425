"""Frequencies of rotary pairs that reach further than a model was trained for are the library's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from common.checkpoint import CheckpointError
from common.library_classes import library
from llm_service.layers.ops import MultimodalRotary
from llm_service.models.rotary_config import RotaryScaling

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
def test_frequencies_and_magnitude_are_the_library_s(kind: str) -> None:
    rope = SETTINGS[kind] | {"rope_theta": THETA}
    config = library().LlamaConfig(
        hidden_size=2 * DIM, num_attention_heads=2, max_position_embeddings=LONGEST, rope_parameters=dict(rope)
    )
    compute = library().modeling_rope_utils.ROPE_INIT_FUNCTIONS[rope["rope_type"]]
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


def test_scaling_that_depends_on_the_length_is_refused() -> None:
    with pytest.raises(CheckpointError, match="rotary scaling longrope is not supported"):
        RotaryScaling.of({"type": "longrope", "short_factor": [], "long_factor": []}, LONGEST)
