"""Texts with multi-head latent attention: DeepSeek-V3's, which Kimi K2.5 has; Mistral Small 4's; dots3-note's, in which
some layers attend to tokens chosen by an index and others to a window; and Mistral Large 4's, in which all layers use
an index, and may share its choice, and latents."""

from __future__ import annotations

from dataclasses import replace

from llm_service.families.family import (
    FULL,
    INDEXED,
    SLIDING,
    Family,
    LatentRules,
    Mixer,
    MoeRules,
    OutputGate,
    RopeRules,
)

DEEPSEEK_V3_TEXT = Family(
    {},
    latent=LatentRules(norm_eps=1e-6),
    rope=RopeRules(interleaved=True),
    moe=MoeRules(grouped=True, ungated_shared=True),
    mixers={FULL: Mixer.LATENT_ATTENTION},
)
MISTRAL4_TEXT = replace(DEEPSEEK_V3_TEXT, moe=replace(DEEPSEEK_V3_TEXT.moe, grouped=False))
DOTS3_TEXT = replace(
    DEEPSEEK_V3_TEXT,
    attention=replace(DEEPSEEK_V3_TEXT.attention, output_gate=OutputGate.PER_HEAD),
    latent=replace(DEEPSEEK_V3_TEXT.latent, norm_eps=None, scaled=True, normed_rope_key=True),
    checkpoint=replace(DEEPSEEK_V3_TEXT.checkpoint, text_defaults={"use_sliding_window": True}),
    mixers={
        FULL: Mixer.LATENT_ATTENTION,
        SLIDING: Mixer.LATENT_ATTENTION,
        INDEXED: Mixer.INDEXED_LATENT_ATTENTION,
    },
)
MISTRAL_LARGE4_TEXT = replace(
    DEEPSEEK_V3_TEXT,
    latent=replace(DEEPSEEK_V3_TEXT.latent, norm_eps=None),
    rope=replace(DEEPSEEK_V3_TEXT.rope, learned=True),
    moe=replace(DEEPSEEK_V3_TEXT.moe, softmax_scores=True),
    checkpoint=replace(DEEPSEEK_V3_TEXT.checkpoint, part_names={"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}),
    mixers={INDEXED: Mixer.INDEXED_LATENT_ATTENTION},
)
