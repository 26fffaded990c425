"""Rules of attention that transformers' layers do not pass on to it, because they apply them by masks and positions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from llm_service.families.family import CHUNKED, OF_ANSWERS
from llm_service.model_config.rotary import Tempering


def chunk_of(module: Any) -> int:
    """Tokens of the chunks within which a layer attends; 0: no chunks."""
    kinds = getattr(module.config, "layer_types", None) or ()
    chunked = module.layer_idx < len(kinds) and kinds[module.layer_idx] == CHUNKED
    return int(module.config.attention_chunk_size) if chunked else 0


def answer_window_of(module: Any) -> int:
    """Tokens of an answer that a token of it sees besides all of the prompt; 0: all."""
    kinds = getattr(module.config, "layer_types", None) or ()
    forgets = module.layer_idx < len(kinds) and kinds[module.layer_idx] == OF_ANSWERS
    return int(module.config.sliding_window) if forgets else 0


def take_tempering(text: nn.Module) -> Iterator[tuple[int, Tempering]]:
    """Disables the scaling of queries by position in a text's layers, since they would count from the first token of a
    batch. Yields the layers' numbers and their tempering."""
    part: Any
    for part in text.modules():
        if getattr(part, "attn_temperature_tuning", False):
            part.attn_temperature_tuning = False
            if not part.use_rope:
                yield part.layer_idx, Tempering(float(part.floor_scale), float(part.attn_scale))
