"""Which tokens a layer attends to, where it chooses them by an index (DeepSeek-V3.2): small heads score all tokens
before one by their index keys, and it sees those with the highest scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

ROOM = 64 << 20
"""Bytes of what is computed for queries and all tokens before them, at once."""


class Index(Protocol):
    """How a layer chooses, by what is kept of tokens."""

    @property
    def reach(self) -> int:
        """A token with no more than so many up to itself sees all of them."""
        ...

    def complete(self, kept: Tensor, slots: Tensor, count: int) -> None:
        """Makes what more is kept of the last `count` tokens of a sequence, whose keys were written: kept [·,
        index_dim], of which its tokens have these slots, int64 [total]."""
        ...

    def candidates(self, kept: Tensor, slots: Tensor) -> Tensor:
        """Keys of the same sequence that are scored, [m, width]."""
        ...

    def choose(self, scores: Tensor, places: Tensor) -> Tensor:
        """float32 [n, m], and where the tokens are in their sequence, int64 [n] → the places that each sees, int64
        [n, k], -1 where there are no more, and none behind its own. `scores` may be written to."""
        ...


@dataclass(frozen=True, slots=True)
class TokenIndex:
    """Each token is scored, and the best `most` are chosen."""

    most: int

    @property
    def reach(self) -> int:
        """See `Index`."""
        return self.most

    def complete(self, kept: Tensor, slots: Tensor, count: int) -> None:
        """See `Index`: nothing."""

    def candidates(self, kept: Tensor, slots: Tensor) -> Tensor:
        """See `Index`: all keys."""
        return kept[slots]

    def choose(self, scores: Tensor, places: Tensor) -> Tensor:
        """See `Index`."""
        return best(scores, places + 1, self.most)


@dataclass(frozen=True, slots=True)
class PoolIndex:
    """Tokens are scored in pools, `pool` of them each from a sequence's first one on, and as many pools are chosen as
    have `most` tokens; those behind the last whole pool are seen anyway. A pool's key is the sum of its tokens' keys by
    shares: the softmax, over the pool, of gates that are kept behind the keys, and of `places` [pool, width]. It is
    made once, with the pool's last token, and kept in the place of that one's key, which nothing else asks for."""

    most: int
    pool: int
    places: Tensor

    @property
    def reach(self) -> int:
        """See `Index`."""
        return self.most

    def complete(self, kept: Tensor, slots: Tensor, count: int) -> None:
        """See `Index`: keys of the pools that these tokens are the last of."""
        first, behind = (len(slots) - count) // self.pool, len(slots) // self.pool
        if first < behind:
            own = slots[first * self.pool : behind * self.pool].view(-1, self.pool)
            kept[own[:, -1], : kept.shape[-1] // 2] = self.keys(kept[own])

    def keys(self, tokens: Tensor) -> Tensor:
        """What is kept of the tokens of pools, [m, pool, index_dim], all of them as they were → keys of the pools, [m,
        width]."""
        keys, gates = tokens.chunk(2, dim=-1)
        shares = (gates.float() + self.places.float()).softmax(1).to(keys.dtype)
        return (shares * keys).sum(1)

    def candidates(self, kept: Tensor, slots: Tensor) -> Tensor:
        """See `Index`: one for each whole pool."""
        return kept[slots[self.pool - 1 :: self.pool], : kept.shape[-1] // 2]

    def choose(self, scores: Tensor, places: Tensor) -> Tensor:
        """See `Index`."""
        pools = (places + 1) // self.pool
        chosen = best(scores, pools, self.most // self.pool).unsqueeze(-1)
        within = torch.arange(self.pool, device=scores.device)
        whole = torch.where(chosen < 0, -1, chosen * self.pool + within).flatten(1)
        rest = (pools * self.pool).unsqueeze(1) + within[:-1]
        return torch.cat([whole, torch.where(rest > places.unsqueeze(1), -1, rest)], dim=1)


@dataclass(frozen=True, slots=True)
class BlockIndex:
    """Tokens are scored, and seen in blocks of `size` each from a sequence's first one on: the `local` blocks that end
    with a token's own, and of the others those with the highest scores, `most` blocks in all."""

    most: int
    size: int
    local: int

    @property
    def reach(self) -> int:
        """See `Index`."""
        return self.most * self.size

    def complete(self, kept: Tensor, slots: Tensor, count: int) -> None:
        """See `Index`: nothing."""

    def candidates(self, kept: Tensor, slots: Tensor) -> Tensor:
        """See `Index`: all keys."""
        return kept[slots]

    def choose(self, scores: Tensor, places: Tensor) -> Tensor:
        """See `Index`.

        >>> index, scores = BlockIndex(2, 2, 1), torch.tensor([[9.0, 0.0, 1.0, 2.0, 3.0, 8.0]])
        >>> index.choose(scores.clone(), torch.tensor([4])).tolist(), index.choose(scores, torch.tensor([5])).tolist()
        ([[0, 1, 4, -1]], [[0, 1, 4, 5]])
        """
        behind = torch.arange(scores.shape[1], device=scores.device) > places.unsqueeze(1)
        tokens = functional.pad(
            scores.masked_fill_(behind, -torch.inf), (0, -scores.shape[1] % self.size), value=-torch.inf
        )
        return self.choose_blocks(tokens.unflatten(1, (-1, self.size)).amax(2), places)

    def choose_blocks(self, blocks: Tensor, places: Tensor) -> Tensor:
        """The same by the highest score of each block, float32 [n, blocks], which may be written to."""
        own = places.unsqueeze(1) // self.size
        near = own - torch.arange(self.local, device=blocks.device)
        blocks.scatter_(1, near.clamp(min=0), torch.inf)
        chosen = best(blocks, places // self.size + 1, self.most).unsqueeze(2)
        every = chosen * self.size + torch.arange(self.size, device=blocks.device)
        return torch.where((chosen < 0) | (every > places[:, None, None]), -1, every).flatten(1)


@dataclass(frozen=True, slots=True)
class IndexQuery:
    """What the tokens of a batch are scored with: `query` [n, heads, width], and how much each head counts, `weights`
    float32 [n, heads]; and what is kept of them, `key` [n, index_dim]. Products of queries and keys are multiplied by
    `scale`, and count where they are above 0. Without weights each head chooses by itself, by products as they are, for
    as many heads of keys and values."""

    index: Index
    query: Tensor
    weights: Tensor | None
    key: Tensor
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class IndexKeys:
    """What scores are computed from: queries of so many `heads` of `width`, and a paged cache of keys, in which a token
    has `kept` numbers and a block `block_size` tokens, both in `dtype`. `pool` consecutive tokens share a score, of all
    heads together if it `weighs` these."""

    heads: int
    width: int
    kept: int
    block_size: int
    dtype: torch.dtype
    device: torch.device
    pool: int = 1
    weighs: bool = True


Chosen = Tensor | None
"""The places that tokens of one sequence see, int64 [n, k], or [n, kv_heads, k] where each head sees others; -1 where
there are no more. None: all up to their own."""


def keep(asked: IndexQuery, here: slice, slots: Tensor, cache: Tensor) -> None:
    """Writes the index keys of a chunk at `here` in a batch, whose sequence's tokens are in these slots, int64 [context
    + count], to the cache, [blocks + 1, block_size, index_dim]."""
    keys, count = cache.flatten(0, 1), here.stop - here.start
    keys[slots[len(slots) - count :]] = asked.key[here].to(keys.dtype)
    asked.index.complete(keys, slots, count)


def choose(asked: IndexQuery, here: slice, slots: Tensor, cache: Tensor) -> Chosen:
    """What such a chunk sees, whose keys are in the cache. Scores are computed for so many tokens at a time as there is
    `ROOM` for."""
    keys = cache.flatten(0, 1)
    count, total = here.stop - here.start, len(slots)
    if total <= asked.index.reach:
        return None
    candidates = asked.index.candidates(keys, slots)
    rows = max(1, ROOM // (4 * asked.query.shape[1] * max(1, len(candidates))))
    places = torch.arange(total - count, total, device=slots.device)
    parts = []
    for begin in range(0, count, rows):
        own = slice(here.start + begin, here.start + min(begin + rows, count))
        query, seen = asked.query[own], places[begin : begin + rows]
        if asked.weights is None:
            heads = query.shape[1]
            scores = query.float().flatten(0, 1) @ candidates.float().t()
            parts.append(asked.index.choose(scores, seen.repeat_interleave(heads)).unflatten(0, (-1, heads)))
            continue
        parts.append(asked.index.choose(score(query, asked.weights[own], candidates, asked.scale), seen))
    return torch.cat(parts)


def score(query: Tensor, weights: Tensor, keys: Tensor, scale: float) -> Tensor:
    """query [n, heads, width], weights float32 [n, heads], keys [m, width] → float32 [n, m]."""
    products = query.float().flatten(0, 1) @ keys.float().t()
    products = products.mul_(scale).relu_().view(*query.shape[:2], -1)
    return (weights.unsqueeze(1) @ products).squeeze(1)


def best(scores: Tensor, seen: Tensor, most: int) -> Tensor:
    """Of the first `seen` numbers of each row, int64 [n], the `most` highest: where they are, ascending, int64 [n,
    min(most, m)]; -1 where a row has no more. Of equal ones the first are taken. `scores` [n, m] is written to.

    >>> best(torch.tensor([[3.0, 1.0, 2.0, 9.0], [0.0, 5.0, 0.0, 0.0]]), torch.tensor([3, 4]), 2).tolist()
    [[0, 2], [0, 1]]
    >>> best(torch.tensor([[3.0, 1.0, 2.0]]), torch.tensor([1]), 2).tolist()
    [[0, -1]]
    """
    count = min(most, scores.shape[1])
    places = torch.arange(scores.shape[1], device=scores.device)
    there = places < seen.unsqueeze(1)
    scores.masked_fill_(~there, -torch.inf)
    least = scores.topk(count, dim=1).values[:, -1:]
    above, level = scores > least, (scores == least) & there
    taken = above | (level & (level.cumsum(1) <= count - above.sum(1, keepdim=True)))
    to = torch.where(taken, taken.cumsum(1) - 1, count)  # behind the end, where those go that are not
    found = torch.full((len(scores), count + 1), -1, dtype=torch.int64, device=scores.device)
    return found.scatter_(1, to, places.expand_as(to))[:, :count]


def mask_of(chosen: Tensor, total: int) -> Tensor:
    """int64 […, k] → bool […, total]: which places are chosen.

    >>> mask_of(torch.tensor([[0, 2], [1, -1]]), 3).int().tolist()
    [[1, 0, 1], [0, 1, 0]]
    """
    mask = torch.zeros(*chosen.shape[:-1], total + 1, dtype=torch.bool, device=chosen.device)
    return mask.scatter_(-1, torch.where(chosen < 0, total, chosen), value=True)[..., :total]
