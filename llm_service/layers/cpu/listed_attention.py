"""Attention on a CPU of tokens to lists of what each sees, by the kernels for decoding."""

from __future__ import annotations

from torch import Tensor

from llm_service.layers.attention.backend import AttentionKind
from llm_service.layers.cpu.decode_attention import Decodes, decode


def attend(query: Tensor, cache: Tensor, table: Tensor, lengths: Tensor, scale: float, *, unit: int) -> Tensor:
    """Queries float32 [m, heads, dim]; cache [2, blocks, block_size, kv_heads, dim], in which `unit` tokens, of which
    blocks are made, lie together; table int32 [m, w] of such units, and lengths int32 [m], the tokens in them → [m,
    heads, dim]. Nothing in the cache changes: the kernels write a token's own keys and values where the list ends, so
    they are given what is there."""
    keys, values = cache.unflatten(2, (-1, unit)).flatten(1, 2)  # each [units, unit, kv_heads, dim]
    last = lengths.long() - 1
    units = table.gather(1, (last // unit).unsqueeze(1)).squeeze(1).long()
    key, value = (each[units, last % unit].float() for each in (keys, values))
    return decode(query, key, value, keys, values, Decodes.of(table, lengths), AttentionKind(scale=scale))
