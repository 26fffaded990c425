"""Nemotron-H's text: each layer is Mamba-2, attention without rotary positions, or a feed-forward part alone."""

from __future__ import annotations

from llm_service.families.family import (
    EXPERTS_ALONE,
    FULL,
    MLP_ALONE,
    CheckpointNames,
    Family,
    LayerRules,
    Mixer,
    MlpRules,
    MoeRules,
    NormRules,
    RopeRules,
)

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_FEED_FORWARD = (
    *("up_proj", "down_proj", "gate", "experts", "shared_experts"),
    *("fc1_latent_proj", "fc2_latent_proj"),
)

NEMOTRON_H = Family(
    {},
    norms=NormRules(float32_weights=True),
    rope=RopeRules(none=True),
    mlp=MlpRules(ungated=True),
    moe=MoeRules(grouped=True, ungated_shared=True),
    layers=LayerRules(single_parts=True),
    checkpoint=CheckpointNames(
        text_defaults={"mlp_hidden_act": "relu2", "layer_norm_epsilon": 1e-5},
        part_names={
            **{f"mixer.{name}": f"self_attn.{name}" for name in _ATTENTION},
            **{f"mixer.{name}": f"mlp.{name}" for name in _FEED_FORWARD},
            "norm_f": "norm",
        },
    ),
    mixers={
        FULL: Mixer.ATTENTION,
        "linear_attention": Mixer.MAMBA2,
        MLP_ALONE: Mixer.NONE,
        EXPERTS_ALONE: Mixer.NONE,
    },
)
