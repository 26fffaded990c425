"""Attention of many queries by packed panels, of float32, of pairs of bfloat16 and of tiles of them, against the plain
formula in float64."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from common.cpu.jit import find
from common.hardware import multiplies_tiles
from llm_service.families.sight import Sight, SpanRule
from llm_service.layers.attention.backend import AttentionKind, CacheShape, PagedChunk
from llm_service.layers.cpu import numba_backend
from llm_service.layers.cpu.numba_backend import NumbaBackend
from llm_service.layers.cpu.prefill_attention import PrefillAttention, PrefillMetadata
from llm_service.layers.cpu.selection import computes_bfloat16, wide_vectors
from testkit.attention_cases import Case

pytestmark = pytest.mark.skipif(not wide_vectors(), reason="the processor has no AVX-512")
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
EXACT = {FLOAT32: 1e-5, BFLOAT16: 2e-2}


@pytest.fixture(params=["float32", "pairs", "tiles"])
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """Of the cache; in bfloat16 products are of pairs or of tiles."""
    if request.param == "float32":
        return FLOAT32
    choose(request.param, monkeypatch)
    return BFLOAT16


def choose(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has pairs or tiles be multiplied; skips what the processor cannot do."""
    if not computes_bfloat16():
        pytest.skip("the processor has no AVX512-BF16")
    if way == "tiles" and not multiplies_tiles():
        pytest.skip("the processor has no AMX")
    monkeypatch.setattr(numba_backend, "multiplies_tiles", lambda: way == "tiles")


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def attend(
    query: Tensor, keys: Tensor, values: Tensor, places: np.ndarray, metadata: PrefillMetadata, **options: int
) -> Tensor:
    kind = numba_backend.in_pairs() if keys.dtype == BFLOAT16 else PrefillAttention
    return kind(metadata, places, *keys.shape[1:], **options).attend(query, keys, values)


def cached(count: int, heads: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values."""
    return noise(count, heads, dim, seed=2).to(dtype), noise(count, heads, dim, seed=3).to(dtype)


def plain(
    query: Tensor, keys: Tensor, values: Tensor, places: np.ndarray, queries: list[int], known: list[int]
) -> Tensor:
    """Segment by segment, float64."""
    group, out = query.shape[1] // keys.shape[1], []
    ends = zip(itertools.accumulate(queries), itertools.accumulate(known), strict=True)
    for (last, end), count, seen in zip(ends, queries, known, strict=True):
        here = torch.from_numpy(places[end - seen : end])
        q = query[last - count : last].double().transpose(0, 1)
        k, v = (each[here].double().repeat_interleave(group, 1).transpose(0, 1) for each in (keys, values))
        scores = q @ k.transpose(1, 2) / query.shape[2] ** 0.5
        scores = scores.masked_fill(~torch.ones(count, seen, dtype=torch.bool).tril(seen - count), -torch.inf)
        out.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(out)


@pytest.mark.parametrize(
    "kind",
    [
        AttentionKind(Sight(window=100)),
        AttentionKind(Sight(window=3)),
        AttentionKind(scale=0.3),
        AttentionKind(Sight(chunk=96)),
        AttentionKind(Sight(window=100), scale=0.3, softcap=2.0),
    ],
)
def test_chunks_of_layers_of_any_kind_give_the_same_bits_as_the_whole(kind: AttentionKind, dtype: torch.dtype) -> None:
    """Through the back end, which leaves out what no query of a chunk sees; the first stretches are hidden from some
    queries of a tile."""
    shape = CacheShape(1, 50, 16, 4, 2, 64, kind)
    qkv, backend = noise(700, 8, 64, seed=1), NumbaBackend(shape, dtype, packs=True)
    blocks, cache = np.random.default_rng(4).permutation(50).tolist(), noise(2, 51, 16, 2, 64, seed=2).to(dtype)
    query, key, value = qkv.split([4, 2, 2], dim=1)
    case = Case(shape, [PagedChunk(0, 700, blocks)], cache.unsqueeze(0), qkv)
    case.check(backend)
    whole = backend.batch(case.chunks).attend(query, key, value, cache)
    for size in (16, 100, 333):
        for first in range(0, 700, size):
            part = slice(first, min(700, first + size))
            chunk = PagedChunk(first, part.stop - first, blocks)
            out = backend.batch([chunk]).attend(query[part], key[part], value[part], cache)
            if chunk.count > 1:
                assert torch.equal(out, whole[part])


@pytest.mark.parametrize("rule", [SpanRule.EVERYWHERE, SpanRule.BEYOND_WINDOWS])
@pytest.mark.parametrize("window", [0, 5, 300])
def test_queries_of_a_span_see_its_end(window: int, dtype: torch.dtype, rule: SpanRule) -> None:
    shape = CacheShape(1, 50, 16, 4, 2, 64, AttentionKind(Sight(window, spans=rule)))
    case = Case.random(shape, (1, 1, 300, 20), torch.float32, 1)
    case.chunks[2] = PagedChunk(270, 300, list(range(36)))
    case.chunks[3] = PagedChunk(16, 20, list(range(36, 39)))
    case.chunks[:2] = [PagedChunk(17, 1, [40, 41]), PagedChunk(3, 1, [42])]
    case.cache = case.cache.to(dtype)
    case.check(NumbaBackend(shape, dtype, packs=True), [(10, 290), (305, 320)])


@pytest.mark.parametrize("context", [0, 270])
def test_queries_of_joined_spans_see_all_of_these(context: int, dtype: torch.dtype) -> None:
    shape = CacheShape(1, 50, 16, 4, 2, 64, AttentionKind(Sight(spans=SpanRule.ALL_MEDIA)))
    case = Case.random(shape, (1, 300, 20), torch.float32, 1)
    case.chunks = [
        PagedChunk(17, 1, [40, 41]),
        PagedChunk(context, 300, list(range(36))),
        PagedChunk(16, 20, [37, 38, 39]),
    ]
    case.cache = case.cache.to(dtype)
    case.check(NumbaBackend(shape, dtype, packs=True), [(9, 90), (95, 96), (200, 290), (305, 310), (312, 320)])


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (2, 2, 128), (3, 1, 72), (6, 3, 16)])
@pytest.mark.parametrize(
    ("queries", "known"),
    [([1], [1]), ([7], [7]), ([65], [65]), ([300], [300]), ([24], [257]), ([3, 50, 1, 24], [3, 600, 64, 100])],
)
def test_every_query_sees_its_keys(
    queries: list[int], known: list[int], heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> None:
    query, slots = noise(sum(queries), heads, dim, seed=1), sum(known) + 40
    keys, values = cached(slots, kv_heads, dim, dtype)
    places = np.random.default_rng(4).permutation(slots)[: sum(known)]
    out = attend(query, keys, values, places, PrefillMetadata.of(queries, known))
    expected = plain(query, keys, values, places, queries, known)
    torch.testing.assert_close(out.double(), expected, rtol=EXACT[dtype], atol=EXACT[dtype])


def test_a_query_s_result_is_the_same_to_the_bit_in_any_chunk(dtype: torch.dtype) -> None:
    query, (keys, values) = noise(500, 4, 64, seed=1), cached(500, 2, 64, dtype)
    places = np.arange(500)
    whole = attend(query, keys, values, places, PrefillMetadata.of([500], [500]))
    for size in (1, 16, 100, 333):
        for first in range(0, 500, size):
            end = min(500, first + size)
            chunk = attend(query[first:end], keys, values, places[:end], PrefillMetadata.of([end - first], [end]))
            assert torch.equal(chunk, whole[first:end])


def test_scores_of_any_size_are_weighed() -> None:
    """The highest comes last, in a stretch of its own, or a score is far below all others."""
    keys, values = noise(600, 1, 16, seed=2), noise(600, 1, 16, seed=3)
    for size in (1e-6, 30.0, 1e4):
        query = noise(40, 2, 16, seed=1) * size
        keys[560] = query[0, 0]
        out = attend(query, keys, values, np.arange(600), PrefillMetadata.of([40], [600]))
        expected = plain(query, keys, values, np.arange(600), [40], [600])
        torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)


def test_what_is_not_a_number_reaches_those_alone_that_see_it(dtype: torch.dtype) -> None:
    query, (keys, values) = noise(80, 2, 64, seed=1), cached(80, 1, 64, dtype)
    keys[50, 0, 3] = torch.nan
    out = attend(query, keys, values, np.arange(80), PrefillMetadata.of([80], [80]))
    assert not out[:50].isnan().any()
    assert out[50:].isnan().all()


@pytest.mark.parametrize("dim", [16, 24, 72])
def test_what_is_written_to_a_cache_is_rounded_to_its_type(dim: int, dtype: torch.dtype) -> None:
    keys, values = cached(60, 2, dim, dtype)
    expected, beside = (keys.clone(), values.clone()), noise(20, 5, dim, seed=5)
    places, key, value = torch.randperm(60)[:20], beside[:, :2], beside[:, 3:]
    kind = numba_backend.in_pairs() if dtype == BFLOAT16 else PrefillAttention
    kind(PrefillMetadata.of([20], [20]), np.arange(20), 2, dim).write(places, key, value, keys, values)
    for written, given in zip(expected, (key, value), strict=True):
        written[places] = given.to(dtype)
    assert keys.equal(expected[0])
    assert values.equal(expected[1])


def test_heads_take_turns_where_not_all_of_them_have_room(dtype: torch.dtype) -> None:
    query, (keys, values) = noise(90, 6, 32, seed=1), cached(90, 3, 32, dtype)
    metadata = PrefillMetadata.of([90], [90])
    at_once = attend(query, keys, values, np.arange(90), metadata)
    for room in (1, 2 * 2 * 64 * (32 + 64) * 4):
        assert torch.equal(attend(query, keys, values, np.arange(90), metadata, room=room), at_once)


def test_the_kernels_are_compiled_once_for_queries_of_any_layout(dtype: torch.dtype) -> None:
    keys, values = cached(80, 2, 16, dtype)
    kind = numba_backend.in_pairs() if dtype == BFLOAT16 else PrefillAttention
    wide, kernels = noise(5, 9, 16, seed=1), [find(name).kernel for name in kind.kernels]
    compiled = []
    for query in (wide[:, :4], wide[:1, :4], wide[:, 2:6], noise(3, 4, 16, seed=1)):
        attend(query, keys, values, np.arange(80), PrefillMetadata.of([len(query)], [80]))
        compiled.append([len(kernel.signatures) for kernel in kernels])
    assert compiled == compiled[:1] * 4


@pytest.mark.parametrize("way", ["pairs", "tiles"])
def test_in_bfloat16_a_prompt_is_no_further_off_than_by_torch(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choose(way, monkeypatch)
    query, (keys, values) = noise(400, 4, 72, seed=1), cached(400, 4, 72, BFLOAT16)
    ours = attend(query, keys, values, np.arange(400), PrefillMetadata.of([400], [400]))
    exact = plain(query, keys, values, np.arange(400), [400], [400])
    given = (each.bfloat16().transpose(0, 1).unsqueeze(0) for each in (query, keys, values))
    theirs = torch.nn.functional.scaled_dot_product_attention(*given, is_causal=True).squeeze(0).transpose(0, 1)
    assert (ours - exact).pow(2).mean() <= (theirs - exact).pow(2).mean()
