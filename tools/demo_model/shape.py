"""The size of the model: one frozen dataclass, and the Qwen3-VL configuration that it stands for."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class VisionShape:
    """The vision transformer. `levels` lists the layers after which a deepstack merger reads."""

    width: int = 160
    depth: int = 6
    heads: int = 5
    mlp: int = 512
    levels: tuple[int, ...] = (2, 4)
    patch: int = 16
    merge: int = 2
    temporal: int = 2
    position_side: int = 12
    theta: float = 10000.0


@dataclass(frozen=True, slots=True)
class TextShape:
    """The decoder. `sections` are the (time, height, width) shares of half a head, interleaved."""

    vocabulary: int = 768
    width: int = 192
    depth: int = 5
    heads: int = 4
    kv_heads: int = 2
    head: int = 64
    mlp: int = 512
    sections: tuple[int, int, int] = (12, 10, 10)
    theta: float = 10000.0
    positions: int = 8192
    epsilon: float = 1e-6


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Both parts."""

    vision: VisionShape = VisionShape()
    text: TextShape = TextShape()


def qwen_config(shape: ModelShape, special: dict[str, int]) -> dict[str, Any]:
    """The `config.json` of `shape` in the ordinary Qwen3-VL format.

    `special` maps Qwen's special tokens to their ids.
    """
    vision, text = shape.vision, shape.text
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "dtype": "float16",
        "image_token_id": special["<|image_pad|>"],
        "video_token_id": special["<|video_pad|>"],
        "vision_start_token_id": special["<|vision_start|>"],
        "vision_end_token_id": special["<|vision_end|>"],
        "tie_word_embeddings": True,
        "text_config": {
            "model_type": "qwen3_vl_text",
            "dtype": "float16",
            "vocab_size": text.vocabulary,
            "hidden_size": text.width,
            "intermediate_size": text.mlp,
            "num_hidden_layers": text.depth,
            "num_attention_heads": text.heads,
            "num_key_value_heads": text.kv_heads,
            "head_dim": text.head,
            "hidden_act": "silu",
            "max_position_embeddings": text.positions,
            "rms_norm_eps": text.epsilon,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": True,
            "initializer_range": 0.02,
            "use_cache": True,
            "bos_token_id": special["<|endoftext|>"],
            "eos_token_id": special["<|im_end|>"],
            "rope_theta": text.theta,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": text.theta,
                "mrope_interleaved": True,
                "mrope_section": list(text.sections),
            },
        },
        "vision_config": {
            "model_type": "qwen3_vl_vision",
            "depth": vision.depth,
            "hidden_size": vision.width,
            "hidden_act": "gelu_pytorch_tanh",
            "intermediate_size": vision.mlp,
            "num_heads": vision.heads,
            "in_channels": 3,
            "patch_size": vision.patch,
            "spatial_merge_size": vision.merge,
            "temporal_patch_size": vision.temporal,
            "out_hidden_size": text.width,
            "num_position_embeddings": vision.position_side**2,
            "deepstack_visual_indexes": list(vision.levels),
            "initializer_range": 0.02,
        },
    }
