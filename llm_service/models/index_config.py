"""What layers choose by an index to attend to, as config.json states it: stretches of tokens, tokens, or blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.checkpoint import CheckpointError


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
    by so many `heads` of queries, and the `most` with the highest scores are seen."""

    heads: int
    head_dim: int
    most: int

    @classmethod
    def of(cls, text: Mapping[str, Any]) -> TokenIndexShape:
        """Raises KeyError where a size is missing."""
        return cls(int(text["index_n_heads"]), int(text["index_head_dim"]), int(text["index_topk"]))


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


def shared_choices(text: Mapping[str, Any]) -> frozenset[int]:
    """Layers that see what the last one before them chose. Raises CheckpointError where none chooses before one."""
    kinds = text.get("indexer_types") or ()
    found = frozenset(layer for layer, kind in enumerate(kinds) if kind == "shared")
    first = next((layer for layer, kind in enumerate(kinds) if kind == "full"), len(kinds))
    if found and min(found) < first:
        raise CheckpointError("a layer that sees what an earlier one chose comes before all that choose")
    return found
