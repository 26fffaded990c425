"""Texts whose heads share a latent: DeepSeek-V3's, which is Kimi K2.5's, Mistral Small 4's, dots3-note's, of which
some layers choose by an index what they see, and others have a window, and Mistral Large 4's, whose layers all choose
so, and may share what they choose, and latents."""

from __future__ import annotations

from dataclasses import replace

from llm_service.families.family import FULL, INDEXED, SLIDING, Family, Mixer

DEEPSEEK_V3_TEXT = Family(
    {},
    grouped_experts=True,
    ungated_shared=True,
    rotary_neighbours=True,
    latent_eps=1e-6,
    mixers={FULL: Mixer.LATENT_ATTENTION},
)
MISTRAL4_TEXT = replace(DEEPSEEK_V3_TEXT, grouped_experts=False)
DOTS3_TEXT = replace(
    DEEPSEEK_V3_TEXT,
    latent_eps=None,
    scaled_latents=True,
    normed_rotary_keys=True,
    head_gates=True,
    mixers={
        FULL: Mixer.LATENT_ATTENTION,
        SLIDING: Mixer.LATENT_ATTENTION,
        INDEXED: Mixer.INDEXED_LATENT_ATTENTION,
    },
    text_defaults={"use_sliding_window": True},
)
MISTRAL_LARGE4_TEXT = replace(
    DEEPSEEK_V3_TEXT,
    likely_experts=True,
    latent_eps=None,
    learned_positions=True,
    mixers={INDEXED: Mixer.INDEXED_LATENT_ATTENTION},
    part_names={"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"},
)
