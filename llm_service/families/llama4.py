"""Llama 4's text: layers that attend within chunks, and some without rotary positions that attend across; experts in
all layers, or in every second one."""

from __future__ import annotations

from llm_service.families.family import CHUNKED, FULL, Family, FeedForwardKind, Mixer

LLAMA4_TEXT = Family(
    {},
    qk_norm=True,
    plain_head_norms=True,
    local_head_norms=True,
    rotary_neighbours=True,
    rotary_in_windows=True,
    sparse=FeedForwardKind.SCALED_EXPERTS,
    experts_inputs_first=True,
    ungated_shared=True,
    mixers={FULL: Mixer.TEMPERED_ATTENTION, CHUNKED: Mixer.ATTENTION},
    text_defaults={"n_shared_experts": 1, "rms_norm_eps": 1e-5},
    part_names={
        "feed_forward.shared_expert": "mlp.shared_experts",
        "feed_forward.router": "mlp.gate",
        "feed_forward": "mlp",
    },
)
