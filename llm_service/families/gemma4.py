"""Gemma 3n's text, whose layers compute one of several streams, and Gemma 4's: dense, with per-layer inputs, or with
experts; and the size without towers."""

from __future__ import annotations

from dataclasses import replace

from llm_service.families.family import (
    WINDOWED,
    AttentionRules,
    CheckpointNames,
    Family,
    FeedForwardKind,
    LayerRules,
    MoeRules,
    NormRules,
    QkNorm,
    VocabularyRules,
)
from llm_service.families.gemma3 import GEMMA3_TEXT

GEMMA3N_TEXT = Family(
    {},
    attention=AttentionRules(qk_norm=QkNorm(), value_norm=True),
    norms=NormRules(names=GEMMA3_TEXT.norms.names, float32_weights=True),
    vocabulary=VocabularyRules(media_by_token=True, scaled_embeddings=True),
    checkpoint=CheckpointNames(text_defaults={"query_pre_attn_scalar": 1, "use_sliding_window": True}),
    mixers=WINDOWED,
)
GEMMA4_TEXT = Family(
    {},
    attention=AttentionRules(qk_norm=QkNorm(), value_norm=True),
    norms=NormRules(names=GEMMA3_TEXT.norms.names, float32_weights=True),
    moe=MoeRules(kind=FeedForwardKind.BOTH),
    layers=LayerRules(scalars=True),
    vocabulary=VocabularyRules(scaled_embeddings=True),
    checkpoint=CheckpointNames(
        text_defaults={
            "vocab_size": 262_144,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 131_072,
            "query_pre_attn_scalar": 1,
            "use_sliding_window": True,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            "hidden_size_per_layer_input": 256,
            "vocab_size_per_layer_input": 262_144,
            "tie_word_embeddings": True,
        }
    ),
    mixers=WINDOWED,
)
GEMMA4_UNIFIED_TEXT = replace(
    GEMMA4_TEXT,
    checkpoint=replace(
        GEMMA4_TEXT.checkpoint,
        text_defaults={
            **GEMMA4_TEXT.checkpoint.text_defaults,
            "max_position_embeddings": 262_144,
            "sliding_window": 1024,
            "hidden_size_per_layer_input": 0,
        },
    ),
)
