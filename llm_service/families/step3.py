"""The texts of Step 3.7 and of MiniMax M3, in which most layers attend to tokens that an index chooses."""

from __future__ import annotations

from dataclasses import replace

from llm_service.families.family import (
    FULL,
    WINDOWED,
    AttentionRules,
    CheckpointNames,
    Family,
    Mixer,
    MoeRules,
    NormRules,
    OutputGate,
    QkNorm,
)

STEP3_TEXT = Family(
    {},
    attention=AttentionRules(qk_norm=QkNorm(), output_gate=OutputGate.PER_HEAD),
    norms=NormRules(zero_centred=True),
    moe=MoeRules(grouped=True, ungated_shared=True),
    checkpoint=CheckpointNames(
        text_defaults={"use_sliding_window": True},
        part_names={"moe.gate_proj.weight": "mlp.experts.gate_proj", "moe.up_proj.weight": "mlp.experts.up_proj"},
    ),
    mixers=WINDOWED,
)
MINIMAX_M3_TEXT = replace(
    STEP3_TEXT,
    attention=replace(STEP3_TEXT.attention, output_gate=OutputGate.NONE),
    mlp=replace(STEP3_TEXT.mlp, fused_gate_up=True),
    checkpoint=replace(
        STEP3_TEXT.checkpoint, text_defaults={}, part_names={"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    ),
    mixers={FULL: Mixer.ATTENTION, "minimax_m3_sparse": Mixer.BLOCK_INDEXED_ATTENTION},
)
