"""GLM-5 Next's text: Kimi Delta Attention, and latent attention without rotary positions to pools that an index
chooses, with hyper-connections between layers that are kept balanced."""

from __future__ import annotations

from llm_service.families.family import FULL, INDEXED, CheckpointNames, Family, Mixer, MoeRules, RopeRules

GLM5_TEXT = Family(
    {},
    rope=RopeRules(none=True),
    moe=MoeRules(grouped=True, ungated_shared=True),
    checkpoint=CheckpointNames(text_defaults={"full_attention_interval": 4}),
    mixers={
        "linear_attention": Mixer.KIMI_DELTA_ATTENTION,
        FULL: Mixer.POOLED_LATENT_ATTENTION,
        INDEXED: Mixer.POOLED_LATENT_ATTENTION,
    },
)
