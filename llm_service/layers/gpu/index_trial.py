"""Tries the kernels that score tokens by their index keys, once for each shape of these."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from llm_service.layers.attention.backend import PagedChunk
from llm_service.layers.attention.metadata import AttentionMetadata
from llm_service.layers.gpu.kernel_trial import gives
from llm_service.layers.sparse_attention.index import IndexKeys, IndexQuery, TokenIndex

_TOKENS, _BLOCKS = 4200, 70
"""Scores of a sequence: of tokens, or pools of them, and of blocks with a score for each head. So many that a program
takes several in turn."""
_KEPT_BLOCKS = 9
"""Of the cache, several times in a sequence."""
_APART = 0.02
"""How far scores may be from torch's, by their length."""

Score = Callable[[IndexQuery, Tensor, AttentionMetadata, int], Tensor]
"""`token_decodes.ScoreTokens`, or `block_decodes.ScoreBlocks`."""


@cache
@torch.inference_mode()
def gives_scores(kernel: Score, plain: Score, keys: IndexKeys) -> bool:
    """Whether a kernel scores two sequences, a long one and a short one, as torch does: a compiler may make wrong code
    of it. `keys` with weights have a score for all heads together."""
    pool, size, most = keys.pool, keys.block_size, _TOKENS if keys.weighs else _BLOCKS
    lengths = (most * pool + pool // 2, pool + 5)
    tables = [[at % _KEPT_BLOCKS for at in range(-(-length // size))] for length in lengths]
    chunks = [PagedChunk(length - 1, 1, table) for length, table in zip(lengths, tables, strict=True)]
    metadata = AttentionMetadata.of(chunks, size, keys.device)

    def noise(*sizes: int) -> Tensor:
        return torch.randn(sizes, device=keys.device)

    cached = noise(_KEPT_BLOCKS + 1, size, keys.kept).to(keys.dtype)
    query, weights = noise(2, keys.heads, keys.width).to(keys.dtype), noise(2, keys.heads)
    asked = IndexQuery(TokenIndex(1), query, weights if keys.weighs else None, cached[0, :2], keys.width**-0.5)

    def scored(by: Score) -> Tensor:
        found = by(asked, cached, metadata, pool)
        counts = [length // pool if keys.weighs else -(-length // pool) for length in lengths]
        return torch.cat([each[..., :count].flatten() for each, count in zip(found, counts, strict=True)])

    return gives("index scores", lambda: scored(kernel), scored(plain), _APART)
