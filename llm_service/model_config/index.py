"""What layers choose by an index to attend to, as config.json states it: stretches of tokens, tokens, or blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from common.checkpoint import CheckpointError
from llm_service.families.family import FULL, INDEXED, Mixer


@dataclass(frozen=True, slots=True)
class IndexShape:
    """How a layer's index chooses what a token attends to: keys of `head_dim` numbers, one for each `stretch` tokens,
    are scored by so many `heads` of queries, and the tokens of the best `kept` stretches are seen, with those behind
    the last whole one."""

    heads: int
    head_dim: int
    stretch: int
    kept: int

    @classmethod
    def of(cls, text: Mapping[str, Any]) -> IndexShape:
        """Raises CheckpointError where keys have several heads, or the budget is no whole number of stretches."""
        if int(text["indexer_kv_heads"]) != 1:
            raise CheckpointError("an index with several heads of keys is not supported")
        budget, stretch = int(text["indexer_budget"]), int(text["indexer_compress_ratio"])
        if not 0 < stretch <= budget or budget % stretch:
            raise CheckpointError(f"an index that keeps {budget} tokens in stretches of {stretch} is not supported")
        return cls(int(text["indexer_n_heads"]), int(text["indexer_head_dim"]), stretch, budget // stretch)


@dataclass(frozen=True, slots=True)
class TokenIndexShape:
    """How a layer's index chooses what a token attends to: each token has a key of `head_dim` numbers, which is scored
    by so many `heads` of queries, and the `most` with the highest scores are seen. With a `pool` so many tokens, from a
    sequence's first one on, have one key together, and are seen together, as `PoolIndex` has it."""

    heads: int
    head_dim: int
    most: int
    pool: int = 0

    @classmethod
    def of(cls, text: Mapping[str, Any]) -> TokenIndexShape:
        """Raises KeyError where a size is missing."""
        return cls(int(text["index_n_heads"]), int(text["index_head_dim"]), int(text["index_topk"]))

    @classmethod
    def of_pools(cls, text: Mapping[str, Any]) -> TokenIndexShape:
        """Raises CheckpointError where the tokens behind the last whole pool are not seen anyway, or what is seen is no
        whole number of pools, and KeyError where a size is missing."""
        if not text.get("index_kpool_always_select_tail", True):
            raise CheckpointError("an index that leaves the last tokens out is not supported")
        made = replace(cls.of(text), pool=int(text["index_kpool"]))
        if made.pool < 1 or made.most % made.pool:
            raise CheckpointError(f"an index that keeps {made.most} tokens in pools of {made.pool} is not supported")
        return made


@dataclass(frozen=True, slots=True)
class BlockIndexShape:
    """How a layer's index chooses what a token attends to: each token has a key of `head_dim` numbers, which is scored
    by a head of queries for each head of keys and values. Blocks of `size` tokens are seen there, as `BlockIndex` has
    it: the `local` ones that end with a token's own, and those with the highest scores, `most` in all."""

    head_dim: int
    size: int
    most: int
    local: int

    @classmethod
    def of(cls, text: Mapping[str, Any], kv_heads: int) -> BlockIndexShape:
        """Raises CheckpointError where it has other heads than keys have, or more local blocks than blocks, and
        KeyError where a size is missing."""
        if int(text["index_n_heads"]) != kv_heads:
            raise CheckpointError("an index of blocks with other heads than keys have is not supported")
        most, local = int(text["index_topk_blocks"]), int(text["index_local_blocks"])
        if local > most:
            raise CheckpointError(f"an index that keeps {most} blocks, and {local} local ones, is not supported")
        return cls(int(text["index_head_dim"]), int(text["index_block_size"]), most, local)


def shared_choices(text: Mapping[str, Any], types: Sequence[str]) -> frozenset[int]:
    """Of layers of these types those that see what the last one before them chose. Raises CheckpointError where none
    chooses before one, or one that attends to nothing chosen is between them.

    >>> sorted(shared_choices({"indexer_types": ["full", "shared", "shared", "shared"]}, [INDEXED] * 3 + ["other"]))
    [1, 2]
    """
    found, chosen = set[int](), False
    for layer, (mode, kind) in enumerate(zip(text.get("indexer_types") or (), types, strict=False)):
        if kind not in (FULL, INDEXED):
            chosen = False
        elif mode == "full":
            chosen = True
        elif mode != "shared":
            raise CheckpointError(f"an index of the kind {mode} is not supported")
        elif not chosen:
            raise CheckpointError("a layer that sees what an earlier one chose comes before all that choose")
        else:
            found.add(layer)
    return frozenset(found)


def token_index_of(text: Mapping[str, Any], mixers: Sequence[Mixer]) -> TokenIndexShape | None:
    """Of a text with these mixers, None where none has one. Raises KeyError as these."""
    if Mixer.POOLED_LATENT_ATTENTION in mixers:
        return TokenIndexShape.of_pools(text)
    return TokenIndexShape.of(text) if Mixer.INDEXED_LATENT_ATTENTION in mixers else None
