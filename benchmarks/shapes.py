"""The shape of Qwen3-VL-8B, and the bytes and arithmetic of its two halves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from common.media.item import Grid
from llm_service.model_config.text import TextConfig

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


EXPERTS: dict[str, Any] = {
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
"""What is otherwise in the `text_config` of Qwen3-VL-30B-A3B."""


TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rope_scaling": {"mrope_interleaved": True, "mrope_section": [4, 2, 2], "rope_type": "default"},
}
"""What makes a `text_config` small enough to try whether everything runs."""

TINY_TOWER: dict[str, Any] = {
    **TOWER,
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0],
}
"""The same of a tower."""


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


def weight_bytes(config: TextConfig, element: float, tokens: int = 1) -> float:
    """What a step reads of the weights: all matrices, the head among them, but not the embeddings; of experts as many
    as so many tokens should reach if each went its own way."""
    before, after = _matrices(config)
    if config.experts:
        reached = config.experts * (1 - (1 - config.experts_per_token / config.experts) ** tokens)
        after += (reached - config.experts_per_token) * _expert(config)
    return element * (config.layers * (before + after) + config.vocab_size * config.hidden_size)


def cache_bytes(config: TextConfig, element: int, chunks: Sequence[tuple[int, int]]) -> int:
    """Keys and values that a step reads for chunks of (context, count) tokens."""
    return element * 2 * config.layers * config.kv_heads * config.head_dim * sum(map(sum, chunks))


def step_operations(config: TextConfig, chunks: Sequence[tuple[int, int]]) -> float:
    """What a step must compute for chunks of (context, count) tokens: behind its attention the last layer is wanted for
    one token of each alone."""
    before, after = _matrices(config)
    tokens, drawn = sum(count for _, count in chunks), len(chunks)
    dense = tokens * (config.layers * before + (config.layers - 1) * after) + drawn * after
    seen = sum(context * count + count * (count + 1) / 2 for context, count in chunks)
    attention = 2 * config.layers * config.heads * config.head_dim * seen
    return 2.0 * (dense + attention + drawn * config.vocab_size * config.hidden_size)


def _matrices(config: TextConfig) -> tuple[float, float]:
    """Weights of a layer that a token goes through, before its attention and after it."""
    heads = config.heads * config.head_dim
    before = config.hidden_size * (heads + 2 * config.kv_heads * config.head_dim)
    if config.experts:
        inner = config.experts * config.hidden_size + config.experts_per_token * _expert(config)
    else:
        inner = 3 * config.hidden_size * config.intermediate_size
    return before, heads * config.hidden_size + inner


def _expert(config: TextConfig) -> int:
    return 3 * config.hidden_size * config.expert_size
