"""The texts of Gemma, Gemma 2 (PaliGemma's) and Gemma 3, which several kinds of models have."""

from __future__ import annotations

from llm_service.families.family import (
    WINDOWED,
    AttentionRules,
    CheckpointNames,
    Family,
    LayerNorms,
    NormRules,
    QkNorm,
    VocabularyRules,
)

_FOUR_NORMS = LayerNorms(
    feed_forward_in="pre_feedforward_layernorm",
    mixer_out="post_attention_layernorm",
    feed_forward_out="post_feedforward_layernorm",
)

GEMMA_TEXT = Family(
    {},
    norms=NormRules(zero_centred=True),
    vocabulary=VocabularyRules(scaled_embeddings=True),
    checkpoint=CheckpointNames(
        text_defaults={
            "vocab_size": 256_000,
            "num_attention_heads": 16,
            "head_dim": 256,
            "hidden_act": "gelu_pytorch_tanh",
            "max_position_embeddings": 8192,
            "rope_theta": 1e4,
            "tie_word_embeddings": True,
        }
    ),
)
GEMMA2_TEXT = Family(
    {},
    norms=NormRules(names=_FOUR_NORMS, zero_centred=True),
    vocabulary=VocabularyRules(scaled_embeddings=True),
    checkpoint=CheckpointNames(
        text_defaults={
            "vocab_size": 256_000,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 8192,
            "query_pre_attn_scalar": 256,
            "use_sliding_window": True,
            "sliding_window_pattern": 2,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "rope_theta": 1e4,
            "tie_word_embeddings": True,
        }
    ),
    mixers=WINDOWED,
)
GEMMA3_TEXT = Family(
    {},
    attention=AttentionRules(qk_norm=QkNorm()),
    norms=NormRules(names=_FOUR_NORMS, zero_centred=True),
    vocabulary=VocabularyRules(scaled_embeddings=True),
    checkpoint=CheckpointNames(
        text_defaults={
            "vocab_size": 262_208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 131_072,
            "query_pre_attn_scalar": 256,
            "use_sliding_window": True,
            "sliding_window_pattern": 6,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "tie_word_embeddings": True,
        }
    ),
    mixers=WINDOWED,
)
