"""What an index chooses to attend to, as config.json states it: stretches of tokens, tokens, or blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from common.checkpoints.checkpoint import CheckpointError
from llm_service.families.family import FULL, INDEXED, Mixer


@dataclass(frozen=True, slots=True)
class IndexShape:
    """How a layer's index chooses tokens to attend to: `heads` of queries score keys of `head_dim` numbers, one for
    each `stretch` of tokens. The tokens of the best `kept` stretches are seen, and those behind the last complete
    one."""

    heads: int
    head_dim: int
    stretch: int
    kept: int

    @classmethod
    def of(cls, text: Mapping[str, Any]) -> IndexShape:
        """Reads the settings. Raises CheckpointError if keys have several heads, or the budget is not a multiple of a
        stretch."""
        if int(text["indexer_kv_heads"]) != 1:
            raise CheckpointError("an index with several heads of keys is not supported")
        budget, stretch = int(text["indexer_budget"]), int(text["indexer_compress_ratio"])
        if not 0 < stretch <= budget or budget % stretch:
            raise CheckpointError(f"an index that keeps {budget} tokens in stretches of {stretch} is not supported")
        return cls(int(text["indexer_n_heads"]), int(text["indexer_head_dim"]), stretch, budget // stretch)


@dataclass(frozen=True, slots=True)
class TokenIndexShape:
    """How a layer's index chooses tokens to attend to: `heads` of queries score each token's key of `head_dim` numbers,
    and the `most` tokens with the highest scores are seen. With a `pool`, so many consecutive tokens share a key and
    are seen together (`PoolIndex`)."""

    heads: int
    head_dim: int
    most: int
    pool: int = 0

    @classmethod
    def of(cls, text: Mapping[str, Any]) -> TokenIndexShape:
        """Reads the settings. Raises KeyError if a size is missing."""
        return cls(int(text["index_n_heads"]), int(text["index_head_dim"]), int(text["index_topk"]))

    @classmethod
    def of_pools(cls, text: Mapping[str, Any]) -> TokenIndexShape:
        """Reads the settings of pools. Raises CheckpointError if the tokens behind the last complete pool are not
        always seen, or the budget is not a multiple of a pool, and KeyError if a size is missing."""
        if not text.get("index_kpool_always_select_tail", True):
            raise CheckpointError("an index that leaves the last tokens out is not supported")
        made = replace(cls.of(text), pool=int(text["index_kpool"]))
        if made.pool < 1 or made.most % made.pool:
            raise CheckpointError(f"an index that keeps {made.most} tokens in pools of {made.pool} is not supported")
        return made


@dataclass(frozen=True, slots=True)
class BlockIndexShape:
    """How a layer's index chooses tokens to attend to: each token has a key of `head_dim` numbers, scored by one head
    of queries for each head of keys and values. For each of these, blocks of `size` tokens are seen (`BlockIndex`): the
    `local` blocks that end with the token's own, and those with the highest scores, `most` in all."""

    head_dim: int
    size: int
    most: int
    local: int

    @classmethod
    def of(cls, text: Mapping[str, Any], kv_heads: int) -> BlockIndexShape:
        """Reads the settings. Raises CheckpointError if it has other heads than keys have, or more local blocks than
        blocks, and KeyError if a size is missing."""
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
    """The index of a text with these mixers; None if none of them has one. Raises KeyError if a size is missing."""
    if Mixer.POOLED_LATENT_ATTENTION in mixers:
        return TokenIndexShape.of_pools(text)
    return TokenIndexShape.of(text) if Mixer.INDEXED_LATENT_ATTENTION in mixers else None
