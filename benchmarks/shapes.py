"""The shape of Qwen3-VL-8B, and what its two halves must read and compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from common.media.item import Grid
from llm_service.models.config import TextConfig

TOWER: dict[str, Any] = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "out_hidden_size": 4096,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}
"""Its `vision_config`, as far as the tower reads it."""

MODEL: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "tie_word_embeddings": False,
    "text_config": {
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 5_000_000,
        "max_position_embeddings": 262_144,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
    },
}
"""config.json of Qwen3-VL-8B, as far as the decoder reads it."""


def tower_operations(shape: Mapping[str, Any], grids: Sequence[Grid]) -> float:
    """Multiplications and additions of one pass."""
    width, inner, out = shape["hidden_size"], shape["intermediate_size"], shape["out_hidden_size"]
    patches = sum(grid.patches for grid in grids)
    layer = 2 * patches * (4 * width * width + 2 * width * inner)
    attention = sum(4 * grid.t * (grid.h * grid.w) ** 2 * width for grid in grids)
    joined = 4 * width
    mergers = (1 + len(shape["deepstack_visual_indexes"])) * 2 * (patches // 4) * joined * (joined + out)
    total: float = shape["depth"] * (layer + attention) + mergers + 2 * patches * patch_numbers(shape) * width
    return total


def patch_numbers(shape: Mapping[str, Any]) -> int:
    """Numbers of one patch."""
    return 3 * int(shape["temporal_patch_size"]) * int(shape["patch_size"]) ** 2


def weight_bytes(config: TextConfig, element: int) -> int:
    """What a step reads of the weights: all matrices, the head among them, but not the embeddings."""
    before, after = _matrices(config)
    return element * (config.layers * (before + after) + config.vocab_size * config.hidden_size)


def cache_bytes(config: TextConfig, element: int, sequences: int, context: int) -> int:
    """Keys and values that a step of decoding reads."""
    return element * 2 * config.layers * config.kv_heads * config.head_dim * sequences * (context + 1)


def prefill_operations(config: TextConfig, tokens: int) -> float:
    """What a prefill must compute: behind its attention the last layer is wanted for one token alone."""
    before, after = _matrices(config)
    dense = tokens * (config.layers * before + (config.layers - 1) * after)
    seen = tokens * (tokens + 1) / 2
    attention = 2 * config.layers * config.heads * config.head_dim * seen
    return 2.0 * (dense + after + attention + config.vocab_size * config.hidden_size)


def _matrices(config: TextConfig) -> tuple[int, int]:
    """Weights of a layer, before its attention and after it."""
    heads = config.heads * config.head_dim
    before = config.hidden_size * (heads + 2 * config.kv_heads * config.head_dim)
    return before, heads * config.hidden_size + 3 * config.hidden_size * config.intermediate_size
