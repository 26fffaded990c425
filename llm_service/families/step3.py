"""The texts of Step 3.7, and of MiniMax M3, of which most layers choose by an index what they see."""

from __future__ import annotations

from dataclasses import replace

from llm_service.families.family import FULL, WINDOWED, Family, Mixer

STEP3_TEXT = Family(
    {},
    qk_norm=True,
    head_gates=True,
    zero_centred_norms=True,
    grouped_experts=True,
    ungated_shared=True,
    mixers=WINDOWED,
    text_defaults={"use_sliding_window": True},
    part_names={"moe.gate_proj.weight": "mlp.experts.gate_proj", "moe.up_proj.weight": "mlp.experts.up_proj"},
)
MINIMAX_M3_TEXT = replace(
    STEP3_TEXT,
    head_gates=False,
    fused_gates=True,
    mixers={FULL: Mixer.ATTENTION, "minimax_m3_sparse": Mixer.BLOCK_INDEXED_ATTENTION},
    text_defaults={},
    part_names={"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"},
)
