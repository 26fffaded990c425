"""Which tokens an index chooses, and attention to these: whatever the chunks, the company and the tiles."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from llm_service.families.sight import Sight
from llm_service.layers.attention import general_backend
from llm_service.layers.attention.backend import AttentionKind, CacheShape, PagedChunk
from llm_service.layers.attention.general_backend import AttentionRule, GeneralBackend, GeneralBatch
from llm_service.layers.cache_spec import IndexedCache, IndexedKV, PagedKV, SharedKV, block_bytes
from llm_service.layers.sparse_attention import index as index_keys
from llm_service.layers.sparse_attention.index import (
    BlockIndex,
    Chosen,
    IndexQuery,
    PoolIndex,
    TokenIndex,
    best,
    mask_of,
)
from llm_service.worker.caches import Caches

CPU = torch.device("cpu")
BLOCK, BLOCKS, HEADS, WIDTH, MOST = 4, 24, 3, 8, 6
TABLES = [[5, 1, 7, 0, 2, 9], [3, 8, 4, 6, 11, 10]]
SHAPE = CacheShape(1, BLOCKS, BLOCK, 4, 2, 16)


def whole_numbers(*shape: int, seed: int) -> Tensor:
    """Few different ones: sums of their products are exact in whatever order, and many are equal."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


@pytest.mark.parametrize("most", [1, 5, 40, 60])
def test_the_highest_are_found_and_of_equal_ones_the_first(most: int) -> None:
    scores, seen = whole_numbers(30, 50, seed=1), torch.arange(30) + 1
    expected = []
    for row, count in zip(scores, seen.tolist(), strict=True):
        order = sorted(range(count), key=lambda at, row=row: (-row[at], at))  # type: ignore[misc]
        expected.append(sorted(order[:most]) + [-1] * (min(most, 50) - min(most, count)))
    assert best(scores.clone(), seen, most).tolist() == expected


def of_tokens(number: int, begin: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
    """Index queries, weights and keys of a sequence's tokens."""
    query, weights = whole_numbers(22, HEADS, WIDTH, seed=number), whole_numbers(22, HEADS, seed=number + 10)
    return query[begin:end], weights[begin:end], whole_numbers(22, WIDTH, seed=number + 20)[begin:end]


def chosen_of(cuts: list[tuple[int, int]], numbers: tuple[int, ...], seen: int) -> list[list[int]]:
    """What each token of the sequence `seen` chooses, in chunks beside those of others."""
    index, found = torch.full((BLOCKS + 1, BLOCK, WIDTH), torch.nan), list[list[int]]()
    for begin, end in cuts:
        chunks = [PagedChunk(begin, end - begin, TABLES[number]) for number in numbers]
        parts = zip(*(of_tokens(number, begin, end) for number in numbers), strict=True)
        query, weights, key = (torch.cat(each) for each in parts)
        batch = GeneralBackend(SHAPE, CPU).batch(chunks)
        chosen = batch.choose(IndexQuery(TokenIndex(MOST), query, weights, key, 0.5), index)[numbers.index(seen)]
        rows = torch.full((end - begin, 1), -1) if chosen is None else chosen
        found += [[*range(begin + at + 1)] if chosen is None else row[row >= 0].tolist() for at, row in enumerate(rows)]
    return found


@pytest.mark.parametrize("room", [1, index_keys.ROOM])
def test_what_is_chosen_depends_on_no_chunks_and_no_company(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = chosen_of([(0, 22)], (0,), 0)
    assert [len(row) for row in at_once] == [min(MOST, at + 1) for at in range(22)]
    assert any(row != [*range(at + 1)][-MOST:] for at, row in enumerate(at_once))
    monkeypatch.setattr(index_keys, "ROOM", room)
    assert chosen_of([(0, 22)], (0,), 0) == at_once
    assert chosen_of([(0, 5), (5, 13), (13, 14), (14, 22)], (1, 0), 0) == at_once
    assert chosen_of([(at, at + 1) for at in range(22)], (0, 1), 0) == at_once


def test_what_is_chosen_is_what_scores_say() -> None:
    query, weights, keys = of_tokens(0, 0, 22)
    products = torch.einsum("qhw,kw->qhk", query, keys).mul(0.5).relu()
    scores = torch.einsum("qh,qhk->qk", weights, products)
    for at, row in enumerate(chosen_of([(0, 22)], (0,), 0)):
        order = sorted(range(at + 1), key=lambda key, at=at: (-scores[at, key], key))  # type: ignore[misc]
        assert row == sorted(order[:MOST])


POOL = 3


def pools_chosen(cuts: list[tuple[int, int]]) -> list[list[int]]:
    """What each token of a sequence chooses by pools, beside another sequence."""
    index, found = torch.full((BLOCKS + 1, BLOCK, 2 * WIDTH), torch.nan), list[list[int]]()
    query, weights, keys = of_tokens(0, 0, 22)
    gates, by = 1000.0 * whole_numbers(22, WIDTH, seed=40), PoolIndex(2 * POOL, POOL, 250.0 * PLACES)
    for begin, end in cuts:
        here = slice(begin, end)
        chunks = [PagedChunk(begin, end - begin, table) for table in TABLES]
        kept = torch.cat([keys[here], gates[here]], dim=1)
        given = [torch.cat([each, each.flip(0)]) for each in (query[here], weights[here], kept)]
        chosen = GeneralBackend(SHAPE, CPU).batch(chunks).choose(IndexQuery(by, *given, 0.5), index)[0]
        if chosen is None:
            found += [[*range(at + 1)] for at in range(begin, end)]
        else:
            found += [sorted(row[row >= 0].tolist()) for row in chosen]
    return found


PLACES = whole_numbers(POOL, WIDTH, seed=41)


def test_pools_are_chosen_whole_and_what_is_behind_them_is_seen_anyway() -> None:
    """Gates are so far apart that a pool's key is one token's, or halves of two, number by number: sums are exact."""
    query, weights, keys = of_tokens(0, 0, 22)
    gates = (1000.0 * whole_numbers(22, WIDTH, seed=40))[:21].view(-1, POOL, WIDTH) + 250.0 * PLACES
    pooled = (gates.softmax(1) * keys[:21].view(-1, POOL, WIDTH)).sum(1)
    scores = torch.einsum("qh,qhk->qk", weights, torch.einsum("qhw,kw->qhk", query, pooled).mul(0.5).relu())
    at_once = pools_chosen([(0, 22)])
    for at, row in enumerate(at_once):
        whole = (at + 1) // POOL
        order = sorted(range(whole), key=lambda pool, at=at: (-scores[at, pool], pool))[:2]  # type: ignore[misc]
        tokens = [pool * POOL + each for pool in sorted(order) for each in range(POOL)]
        assert row == [*tokens, *range(whole * POOL, at + 1)]
    assert pools_chosen([(0, 4), (4, 5), (5, 9), (9, 20), (20, 22)]) == at_once
    assert pools_chosen([(at, at + 1) for at in range(22)]) == at_once


def blocks_chosen(cuts: list[tuple[int, int]]) -> list[list[list[int]]]:
    """What each head of each token chooses in blocks of three, two at most."""
    index, found = torch.full((BLOCKS + 1, BLOCK, WIDTH), torch.nan), list[list[list[int]]]()
    query, _, keys = of_tokens(0, 0, 22)
    for begin, end in cuts:
        here, chunk = slice(begin, end), PagedChunk(begin, end - begin, TABLES[0])
        asked = IndexQuery(BlockIndex(2, 3, 1), query[here], None, keys[here])
        chosen = GeneralBackend(SHAPE, CPU).batch([chunk]).choose(asked, index)[0]
        if chosen is None:
            found += [[[*range(at + 1)]] * HEADS for at in range(begin, end)]
        else:
            found += [[row[row >= 0].tolist() for row in each] for each in chosen]
    return found


def test_each_head_chooses_the_last_block_and_others_by_their_best_token() -> None:
    query, _, keys = of_tokens(0, 0, 22)
    scores = torch.einsum("qhw,kw->qhk", query, keys)
    at_once = blocks_chosen([(0, 22)])
    for at, heads in enumerate(at_once):
        others = {block: range(3 * block, 3 * block + 3) for block in range(at // 3)}
        for head, row in enumerate(heads):
            highest = [-float(scores[at, head, [*tokens]].max()) for tokens in others.values()]
            other = [*others[highest.index(min(highest))]] if others else []
            assert row == [*other, *range(at // 3 * 3, at + 1)]
    assert len({str(head) for head in at_once[-1]}) > 1
    assert blocks_chosen([(0, 4), (4, 5), (5, 9), (9, 20), (20, 22)]) == at_once


@pytest.mark.parametrize("room", [1, general_backend.ROOM])
@pytest.mark.parametrize(("count", "group", "apart"), [(1, 2, True), (7, 2, True), (1, 2, False), (7, 8, False)])
def test_those_alone_are_attended_to(
    count: int, group: int, apart: bool, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gathered for one token, and where many heads share a key, else masked."""
    monkeypatch.setattr(general_backend, "ROOM", room)
    monkeypatch.setattr(general_backend, "_COPIED", 22)
    total, heads, noise = 22, 2 * group, torch.Generator().manual_seed(3)
    cache = CacheShape(1, BLOCKS, BLOCK, heads, 2, 16).new_cache(torch.float32, CPU)[0].fill_(torch.nan)
    query = torch.randn(total, heads, 12, generator=noise)
    key, value = torch.randn(total, 2, 12, generator=noise), torch.randn(total, 2, 16, generator=noise)
    found, expected = attended(cache, query, key, value, count, choices=2 if apart else 1)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("count", [1, 7])
def test_chosen_latents_are_keys_and_values(count: int) -> None:
    noise = torch.Generator().manual_seed(5)
    cache = CacheShape(1, BLOCKS, BLOCK, 8, 1, 16, values_in_keys=12).new_cache(torch.float32, CPU)[0].fill_(torch.nan)
    query, key = torch.randn(22, 8, 16, generator=noise), torch.randn(22, 1, 16, generator=noise)
    found, expected = attended(cache, query, key, key[..., :12], count)
    torch.testing.assert_close(found, expected)


def attended(
    cache: Tensor, query: Tensor, key: Tensor, value: Tensor, count: int, choices: int = 1
) -> tuple[Tensor, Tensor]:
    """What the last `count` tokens of a sequence see of those that are chosen for them, by us and by torch; by so many
    choices, each for as many heads."""
    total, scale, noise = len(query), 0.3, torch.Generator().manual_seed(4)
    seen = torch.arange(total) + 1
    chosen = torch.stack([best(torch.randn(total, total, generator=noise), seen, MOST) for _ in range(choices)], dim=1)
    chosen[-1, 0, -1] = -1  # fewer than there is room for
    whole = [each.transpose(0, 1) for each in (query, key, value)]
    mask = mask_of(chosen.transpose(0, 1), total).repeat_interleave(query.shape[1] // choices, 0)
    expected = functional.scaled_dot_product_attention(*whole, attn_mask=mask, scale=scale, enable_gqa=True)
    chosen = chosen[:, 0] if choices == 1 else chosen

    def attend(begin: int, end: int, given: Chosen) -> Tensor:
        batch = GeneralBackend(SHAPE, CPU).batch([PagedChunk(begin, end - begin, TABLES[0])])
        rule = AttentionRule(AttentionKind(scale=scale), chosen=(given,))
        return batch.attend(query[begin:end], key[begin:end], value[begin:end], cache, rule)

    attend(0, total - count, None)
    found = attend(total - count, total, chosen[total - count :])
    return found.view(count, query.shape[1], -1), expected.transpose(0, 1)[total - count :]


def test_index_keys_lie_in_the_blocks_of_keys_and_values() -> None:
    """Layers with an index and without have one back end, and so one batch."""
    plain = PagedKV(4, 2, 16, AttentionKind(Sight(window=9)))
    specs = [IndexedKV(plain, WIDTH), plain, IndexedKV(plain, 12), SharedKV(0), IndexedKV(SharedKV(2), 10)]
    assert block_bytes(specs, BLOCK, torch.float32) == 4 * BLOCK * (3 * 2 * 2 * 16 + WIDTH + 12 + 10)
    mixers: Any = [SimpleNamespace(cache_spec=lambda spec=spec: spec) for spec in specs]
    made: Any = lambda shape: GeneralBackend(shape, CPU)  # noqa: E731
    caches = Caches(mixers, BLOCKS, BLOCK, torch.float32, CPU, attention=made)
    assert len(caches.paged) == 1
    first, second, third, shares, shares_and_has_own = caches.layers
    assert isinstance(first, IndexedCache)
    assert isinstance(third, IndexedCache)
    assert (first.index.shape, third.index.shape) == ((BLOCKS + 1, BLOCK, WIDTH), (BLOCKS + 1, BLOCK, 12))
    assert isinstance(second, Tensor)
    assert first.kv.data_ptr() != third.kv.data_ptr()
    assert shares is first.kv
    assert isinstance(shares_and_has_own, IndexedCache)
    assert shares_and_has_own.kv is third.kv
    assert shares_and_has_own.index.shape == (BLOCKS + 1, BLOCK, 10)
    batches: list[GeneralBatch] = caches.batches([PagedChunk(0, 9, TABLES[0])])
    assert all(batch is batches[0] for batch in batches)
