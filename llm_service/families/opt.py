"""OPT, BLIP-2's text: places are learned and added to what enters, norms and products have biases, and a ReLU is
between the two products of a feed-forward part."""

from __future__ import annotations

from llm_service.families.family import Family, LayerNorms

OPT_TEXT = Family(
    {},
    attention_bias=True,
    output_biases=True,
    norms=LayerNorms("self_attn_layer_norm", "norm"),
    layer_norms=True,
    norm_biases=True,
    unrotated=True,
    learned_places=True,
    ungated=True,
    text_defaults={"layer_norm_eps": 1e-5, "activation_function": "relu"},
    part_names={
        "self_attn.out_proj": "self_attn.o_proj",
        "fc1": "mlp.up_proj",
        "fc2": "mlp.down_proj",
        "final_layer_norm": "norm",
    },
)
