"""OPT, BLIP-2's text: learned positions are added to the input, norms and products have biases, and feed-forward parts
use ReLU."""

from __future__ import annotations

from llm_service.families.family import (
    AttentionRules,
    CheckpointNames,
    Family,
    LayerNorms,
    LayerRules,
    MlpRules,
    NormRules,
    RopeRules,
    VocabularyRules,
)

OPT_TEXT = Family(
    {},
    attention=AttentionRules(bias=True),
    norms=NormRules(names=LayerNorms("self_attn_layer_norm", "norm"), layer_norm=True, biases=True),
    rope=RopeRules(none=True),
    mlp=MlpRules(ungated=True),
    layers=LayerRules(output_biases=True),
    vocabulary=VocabularyRules(position_embeddings=True),
    checkpoint=CheckpointNames(
        text_defaults={"layer_norm_eps": 1e-5, "activation_function": "relu"},
        part_names={
            "self_attn.out_proj": "self_attn.o_proj",
            "fc1": "mlp.up_proj",
            "fc2": "mlp.down_proj",
            "final_layer_norm": "norm",
        },
    ),
)
