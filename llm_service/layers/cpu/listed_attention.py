"""Attention of tokens to lists of positions, on a CPU, by the kernels for decoding."""

from __future__ import annotations

from torch import Tensor

from llm_service.layers.attention.backend import AttentionKind
from llm_service.layers.cpu.decode_attention import Decodes, decode


def attend(query: Tensor, cache: Tensor, table: Tensor, lengths: Tensor, scale: float, *, unit: int) -> Tensor:
    """Queries float32 [m, heads, dim] → [m, heads, dim]; cache [2, blocks, block_size, kv_heads, dim], whose blocks are
    made of units of `unit` tokens; table int32 [m, w], the units that each query sees, and lengths int32 [m], the
    tokens in them. The cache is not changed: the kernels write a token's own key and value at the end of its list, so
    they are given those that are there."""
    keys, values = cache.unflatten(2, (-1, unit)).flatten(1, 2)  # each [units, unit, kv_heads, dim]
    last = lengths.long() - 1
    units = table.gather(1, (last // unit).unsqueeze(1)).squeeze(1).long()
    key, value = (each[units, last % unit].float() for each in (keys, values))
    return decode(query, key, value, keys, values, Decodes.of(table, lengths), AttentionKind(scale=scale))
