"""The texts of LFM2 and LFM3: gated short convolutions, attention in some layers, LFM3 with windows in others."""

from __future__ import annotations

from dataclasses import replace

from llm_service.families.family import (
    FULL,
    WINDOWED,
    AttentionRules,
    CheckpointNames,
    Family,
    LayerNorms,
    Mixer,
    NormRules,
    OutputGate,
    QkNorm,
)

_FEED_FORWARD = {
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
}

LFM2 = Family(
    {},
    attention=AttentionRules(qk_norm=QkNorm()),
    norms=NormRules(names=LayerNorms("operator_norm", "ffn_norm")),
    checkpoint=CheckpointNames(
        text_defaults={
            "norm_eps": 1e-5,
            "conv_L_cache": 3,
            "block_auto_adjust_ff_dim": True,
            "max_position_embeddings": 128_000,
            "rope_theta": 1e6,
            "tie_word_embeddings": True,
        },
        part_names={
            **_FEED_FORWARD,
            "self_attn.out_proj": "self_attn.o_proj",
            "self_attn.q_layernorm": "self_attn.q_norm",
            "self_attn.k_layernorm": "self_attn.k_norm",
            "embedding_norm": "norm",
        },
    ),
    mixers={FULL: Mixer.ATTENTION, "conv": Mixer.SHORT_CONVOLUTION},
)
LFM3 = replace(
    LFM2,
    attention=replace(LFM2.attention, output_gate=OutputGate.PER_HEAD),
    norms=replace(LFM2.norms, names=LayerNorms("operator_norm", "ffn_norm", "post_operator_norm", "post_ffn_norm")),
    checkpoint=replace(
        LFM2.checkpoint,
        text_defaults={
            "norm_eps": 1e-5,
            "head_dim": 128,
            "conv_L_cache": 7,
            "max_position_embeddings": 128_000,
            "use_sliding_window": True,
            "sliding_window": 256,
            "tie_word_embeddings": True,
        },
        part_names={**_FEED_FORWARD, "embedding_norm": "norm"},
    ),
    mixers={**WINDOWED, "conv": Mixer.SHORT_CONVOLUTION},
)
