"""Llama 4's text: layers that attend within chunks, and some without rotary positions that attend across; experts in
all layers, or in every second one."""

from __future__ import annotations

from llm_service.families.family import (
    CHUNKED,
    FULL,
    AttentionRules,
    CheckpointNames,
    Family,
    FeedForwardKind,
    Mixer,
    MoeRules,
    QkNorm,
    RopeRules,
)

LLAMA4_TEXT = Family(
    {},
    attention=AttentionRules(qk_norm=QkNorm(weights=False, local_only=True)),
    rope=RopeRules(interleaved=True, local_only=True),
    moe=MoeRules(kind=FeedForwardKind.SCALED_EXPERTS, inputs_first=True, ungated_shared=True),
    checkpoint=CheckpointNames(
        text_defaults={"n_shared_experts": 1, "rms_norm_eps": 1e-5},
        part_names={
            "feed_forward.shared_expert": "mlp.shared_experts",
            "feed_forward.router": "mlp.gate",
            "feed_forward": "mlp",
        },
    ),
    mixers={FULL: Mixer.TEMPERED_ATTENTION, CHUNKED: Mixer.ATTENTION},
)
