"""Indexers of transformers' layers as ours: they say how a layer's tokens are scored, and ours keeps index keys in the
paged cache and chooses, for any number of sequences and chunks of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from common.checkpoints.checkpoint import CheckpointError
from llm_service.families.family import INDEXED
from llm_service.layers.sparse_attention.index import BlockIndex, Chosen, IndexQuery, PoolIndex, TokenIndex
from llm_service.models.hf.step import this_step

NO_MASK = torch.zeros(1, 1, 1, 1, dtype=torch.bool)
"""Takes the place of a mask that transformers' layers slice for their indexers; its content is not used."""


def take_indexers(text: nn.Module) -> dict[str, Any]:
    """Has a text's indexers score as transformers does and choose by our index. Returns further arguments of the text,
    if any. Raises CheckpointError for an unknown indexer."""
    parts: list[Any] = list(text.modules())
    for part in parts:
        if hasattr(part, _MAKES_MASK):
            setattr(part, _MAKES_MASK, _as_chosen)
    found = [part.indexer for part in parts if isinstance(getattr(part, "indexer", None), nn.Module)]
    for indexer in found:
        if (asks := _KNOWN.get(type(indexer).__name__)) is None:
            raise CheckpointError(f"a {type(indexer).__name__} chooses what its layer sees, and is not known here")
        indexer.forward = partial(asks, indexer)
    config: Any = text.config
    if INDEXED not in (getattr(config, "layer_types", None) or ()):
        return {}
    return {"attention_mask": {kind: NO_MASK if kind == INDEXED else None for kind in set(config.layer_types)}}


_MAKES_MASK = "build_attention_mask_from_topk"


def _as_chosen(topk_indices: tuple[Chosen, ...], **_: Any) -> tuple[Chosen, ...]:
    return topk_indices


def _of_hidden(
    indexer: Any, hidden: Tensor, rotary: tuple[Tensor, Tensor], _: Any, places: Tensor, **__: Any
) -> tuple[Chosen, ...]:
    """Mistral Large 4's, whose queries come from the layer's input and grow with their positions; hidden [1, n,
    hidden_size]."""
    queries = indexer.wq_b(indexer.q_input_norm(hidden)).view(*hidden.shape[:2], -1, indexer.head_dim)
    queries = indexer.softmax_scaling(queries, places, head_dim_first=False)
    return _chosen(indexer, hidden, queries, rotary if indexer.use_rope else None)


def _of_queries(
    indexer: Any, hidden: Tensor, made: Tensor, rotary: tuple[Tensor, Tensor], *_: Any, **__: Any
) -> tuple[Chosen, ...]:
    """dots3-note's, whose queries come from the latent of the attention's queries, [1, n, q_lora_rank]."""
    queries = indexer.wq_b(made).view(*hidden.shape[:2], -1, indexer.head_dim)
    return _chosen(indexer, hidden, queries, rotary)


def _of_last_numbers(
    indexer: Any, hidden: Tensor, made: Tensor, rotary: tuple[Tensor, Tensor], *_: Any, **__: Any
) -> tuple[Chosen, ...]:
    """Hunyuan V4's: likewise, but the last numbers of its heads are rotated, which come first here, and keys are normed
    in the type of the norm."""
    width = indexer.qk_rope_head_dim
    queries = indexer.wq_b(made).view(*hidden.shape[:2], -1, indexer.head_dim)
    normed = indexer.k_norm(indexer.wk(hidden).to(indexer.k_norm.weight.dtype)).to(hidden.dtype)
    return _scored(indexer, hidden, queries.roll(width, -1), normed.roll(width, -1), rotary)


def _of_pools(indexer: Any, hidden_states: Tensor, q_resid: Tensor, **_: Any) -> tuple[Chosen, ...]:
    """GLM-5 Next's: so many consecutive tokens share a key, and are chosen together."""
    if not indexer.index_kpool_always_select_tail:
        raise CheckpointError(f"a {type(indexer).__name__} leaves the last tokens out, which is not known here")
    hidden, width = hidden_states[0], indexer.head_dim
    index = PoolIndex(indexer.index_topk, indexer.index_kpool, indexer.index_kpool_compress_ape)
    queries = indexer.wq_b(q_resid[0]).view(len(hidden), -1, width)
    keys = torch.cat([indexer.k_norm(indexer.wk(hidden)), hidden @ indexer.index_kpool_compress_gate.t()], dim=-1)
    asked = IndexQuery(index, queries, _weights(indexer, hidden), keys, indexer.softmax_scale)
    return this_step().choose(indexer.layer_idx, asked)


def _of_heads(indexer: Any, hidden: Tensor, rotary: tuple[Tensor, Tensor], *_: Any) -> tuple[Chosen, ...]:
    """MiniMax M3's, each of whose heads chooses blocks of tokens for one head of keys and values."""
    if indexer.num_heads != indexer.config.num_key_value_heads:
        raise CheckpointError(f"a {type(indexer).__name__} has other heads than keys have")
    if indexer.local_blocks > indexer.topk_blocks:
        raise CheckpointError(f"a {type(indexer).__name__} has more local blocks than blocks")
    tokens, (cosine, sine) = hidden[0], (each[0, :, None, : indexer.head_dim] for each in rotary)
    heads = indexer.q_norm(indexer.q_proj(tokens).unflatten(1, (-1, indexer.head_dim)))
    keys = indexer.k_norm(indexer.k_proj(tokens).unsqueeze(1))
    heads, keys = (_halves_rotated(each, cosine, sine) for each in (heads, keys))
    index = BlockIndex(indexer.topk_blocks, indexer.block_size, indexer.local_blocks)
    return this_step().choose(indexer.layer_idx, IndexQuery(index, heads, None, keys[:, 0]))


def _halves_rotated(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """heads [n, heads, width] with their first numbers rotated; pairs are formed from the two halves of these, with
    cosine and sine [n, 1, rotated]."""
    many = cosine.shape[-1]
    first, second = heads[..., :many].chunk(2, dim=-1)
    other = torch.cat([-second, first], dim=-1)
    return torch.cat([heads[..., :many] * cosine + other * sine, heads[..., many:]], dim=-1)


def _chosen(indexer: Any, hidden: Tensor, queries: Tensor, rotary: tuple[Tensor, Tensor] | None) -> tuple[Chosen, ...]:
    """Of queries [1, n, heads, width] and one key for each token, both rotated in their first numbers by `rotary`."""
    return _scored(indexer, hidden, queries, indexer.k_norm(indexer.wk(hidden)), rotary)


def _scored(
    indexer: Any, hidden: Tensor, queries: Tensor, keys: Tensor, rotary: tuple[Tensor, Tensor] | None
) -> tuple[Chosen, ...]:
    """The same of keys [1, n, width] that are normed."""
    keys = keys.unsqueeze(2)
    if rotary is not None:
        queries, keys = (_rotated(each, *rotary) for each in (queries, keys))
    asked = IndexQuery(
        TokenIndex(indexer.index_topk), queries[0], _weights(indexer, hidden)[0], keys[0, :, 0], indexer.softmax_scale
    )
    return this_step().choose(indexer.layer_idx, asked)


def _weights(indexer: Any, hidden: Tensor) -> Tensor:
    """How much each head counts, float32 […, n, heads]."""
    given = hidden.to(getattr(indexer.weights_proj, "weight", hidden).dtype)  # may be kept in float32
    weights: Tensor = indexer.weights_proj(given).float() * indexer.n_heads**-0.5
    return weights


def _rotated(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """heads [1, n, heads, width] with their first numbers rotated; adjacent numbers are pairs, with cosine and sine [1,
    n, rotated], whose first half counts. In the result the first numbers of all pairs precede the second ones."""
    many, half = cosine.shape[-1], cosine.shape[-1] // 2
    first, second = heads[..., 0:many:2], heads[..., 1:many:2]
    cosine, sine = cosine[..., :half].unsqueeze(2), sine[..., :half].unsqueeze(2)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine, heads[..., many:]], dim=-1)


_KNOWN: dict[str, Callable[..., tuple[Chosen, ...]]] = {
    "MistralLarge4TextIndexer": _of_hidden,
    "Dots3NoteTextIndexer": _of_queries,
    "HYV4VLIndexer": _of_last_numbers,
    "Glm5NextTextIndexer": _of_pools,
    "MiniMaxM3VLIndexer": _of_heads,
}
