"""Contexts in parts and chunks in tiles, as Triton's kernels of attention take them, padding included."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_service.families.sight import Sight
from llm_service.layers.attention import kernel_backend
from llm_service.layers.attention import metadata as attention_metadata
from llm_service.layers.attention.backend import AttentionKind, PagedChunk
from llm_service.layers.attention.choose import choose
from llm_service.layers.attention.metadata import AttentionMetadata, Tiling, WorkList, WorkNumbers
from testkit.attention_cases import CPU, Case, shape_of
from testkit.plain_attention import paged_attention


@pytest.mark.parametrize(
    ("answered", "parts", "counts"),
    [
        pytest.param(answered, parts, counts, marks=() if (first + second + third) % 2 == 0 else pytest.mark.soak)
        for first, answered in enumerate((0, 12, 150, 290))
        for second, parts in enumerate((2, 5))
        for third, counts in enumerate(((1, 1, 1), (20, 1, 30)))
    ],
)
def test_parts_of_a_context_before_a_window_count_for_nothing(
    counts: tuple[int, ...], parts: int, answered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do those between a prompt and the window of an answer of so many tokens, 0: the window is for all."""
    monkeypatch.setattr(attention_metadata, "_LEAST", 16)
    monkeypatch.setattr(attention_metadata, "_MULTIPLE", 16)
    monkeypatch.setattr(kernel_backend, "COMBINED", 2)
    shape = replace(shape_of(), kind=AttentionKind(Sight(answer_window=21) if answered else Sight(window=21)))
    backend: Any = choose("triton", shape, torch.float32, CPU)
    backend.tiling = replace(backend.tiling, parts=parts)
    case = Case.random(shape, counts, torch.float32, 5)
    case.chunks[0] = PagedChunk(399 - counts[0], counts[0], list(range(75, 100)), answered=answered)
    case.chunks[1] = PagedChunk(200, 1, list(range(13)), answered=answered // 2)
    case.chunks[2] = PagedChunk(70, counts[2], list(range(13, 20)), answered=answered // 10)
    metadata = backend.batch(case.chunks).metadata
    assert len(metadata.decode_work.split) + len(metadata.tile_work.split) > 0
    case.check(backend)


@pytest.mark.parametrize("parts", [1, 2, 5, 40])
def test_parts_of_long_contexts_are_put_together(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside sequences of one part, and, of so many that they are joined in several rounds."""
    monkeypatch.setattr(attention_metadata, "_LEAST", 64)
    monkeypatch.setattr(kernel_backend, "COMBINED", 2)
    shape = shape_of()
    backend: Any = choose("triton", shape, torch.float32, CPU)
    backend.tiling = replace(backend.tiling, parts=parts)
    case = Case.random(shape, (1, 1, 1, 1, 1), torch.float32, 5)
    case.chunks[0] = PagedChunk(399, 1, list(range(75, 100)))
    free = iter(range(75))
    for n, context in enumerate((16, 200, 0, 100), 1):
        case.chunks[n] = PagedChunk(context, 1, [next(free) for _ in range(context // 16 + 1)])
    found = backend.batch(case.chunks).metadata.decode_work
    assert (len(found.split) > 0) == (parts > 1)
    assert found.most_parts <= parts + 5
    case.check(backend)


@pytest.mark.parametrize(("heads", "parts"), [(4, 4), (6, 1), (6, 4)])
def test_a_short_chunk_behind_a_long_context_is_computed_in_parts(
    heads: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last part begins behind all that the first tokens see; in a step of its own, and beside others."""
    monkeypatch.setattr(attention_metadata, "_LEAST", 1)
    monkeypatch.setattr(attention_metadata, "_MULTIPLE", 31)
    shape = shape_of(heads=heads)
    backend: Any = choose("triton", shape, torch.float32, CPU)
    backend.tiling = replace(backend.tiling, parts=parts)
    case = Case.random(shape, (20, 1, 30), torch.float32, 5)
    case.chunks[:] = [PagedChunk(270, 20, [*range(19)]), PagedChunk(16, 1, [20, 21]), PagedChunk(0, 30, [22, 23])]
    case.check(backend)
    case.chunks, case.qkv = case.chunks[:1], case.qkv[:20]
    work = backend.batch(case.chunks).metadata.tile_work
    assert work.parts.tolist() == ([310, 0, 1] if parts == 1 else [93, 0, 4])
    assert work.split.tolist() == ([] if parts == 1 else [0])
    case.check(backend)


@pytest.mark.parametrize(("heads", "tile", "parts"), [(4, 2, 1), (4, 5, 6), (8, 4, 6), (8, 5, 1), (2, 9, 6)])
def test_tokens_with_their_drafts_are_tiles_of_few_rows(
    heads: int, tile: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token alone among them, at the beginning too, is a tile as well."""
    monkeypatch.setattr(attention_metadata, "_LEAST", 16)
    monkeypatch.setattr(attention_metadata, "_MULTIPLE", 16)
    shape = shape_of(heads=heads)
    backend: Any = choose("triton", shape, torch.float32, CPU)
    backend.tiling = Tiling(parts, tile, singles=False)
    case = Case.random(shape, (1, tile, 1, 2, tile), torch.float32, heads + tile)
    case.chunks[0] = PagedChunk(299, 1, list(range(75, 94)))
    free = iter(range(75))
    for n, context in enumerate((160, 16, 0, 31), 1):
        count = case.chunks[n].count
        case.chunks[n] = PagedChunk(context, count, [next(free) for _ in range(-(-(context + count) // 16))])
    metadata = backend.batch(case.chunks).metadata
    assert (metadata.decodes, len(metadata.tiles)) == (0, 5)
    assert (len(metadata.tile_work.split) > 0) == (parts > 1)
    case.check(backend)


@given(st.lists(st.integers(1, 40_000), min_size=1, max_size=300), st.integers(1, 200))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_parts_cover_every_context_and_are_no_more_than_there_is_room_for(lengths: list[int], wanted: int) -> None:
    work = WorkNumbers.cut(np.array(lengths, np.int32), wanted)
    split, keys, starts = work.split, int(work.parts[0]), work.parts[1:]
    assert keys % 64 == 0
    assert starts[-1] <= wanted + len(lengths)
    assert len(split) < max(2, wanted)
    for n, length in enumerate(lengths):
        count = int(starts[n + 1] - starts[n])
        assert (count - 1) * keys < length <= count * keys
        assert (count > 1) == (n in split)
    taken = [place for n in split for place in range(work.rooms[n], work.rooms[n] + starts[n + 1] - starts[n])]
    assert taken == list(range(work.room))
    assert len(taken) < 2 * max(2, wanted)
    assert all((work.rooms[n] < 0) == (n not in split) for n in range(len(lengths)))


@pytest.mark.parametrize("decodes", [True, False])
def test_padding_reads_nothing_and_writes_nothing(decodes: bool) -> None:
    """What is behind a table's end, and the block that is nobody's, may hold anything."""
    shape = shape_of()
    case = Case.random(shape, (1, 1) if decodes else (40, 20), torch.float32, 11)
    backend: Any = choose("triton", shape, torch.float32, CPU)
    metadata = AttentionMetadata.of(case.chunks, shape.block_size, CPU, replace(backend.tiling, parts=2))
    tokens = len(metadata.slot_mapping)
    wide = torch.full((4, 64), 10**6, dtype=torch.int32)  # no such block: reading it would end the process
    wide[:2, : metadata.block_table.shape[1]] = metadata.block_table
    for row, chunk in zip(wide, case.chunks, strict=False):
        row[len(chunk.blocks) :] = 10**6
    ends = torch.full((3,), tokens, dtype=torch.int32)
    null_slot = shape.null_block * shape.block_size
    padded = replace(
        metadata,
        slot_mapping=torch.cat([metadata.slot_mapping, torch.full((3,), null_slot, dtype=torch.int32)]),
        block_table=wide,
        query_start_loc=torch.cat([metadata.query_start_loc[:-1], ends]),
        seq_lens=torch.cat([metadata.seq_lens, torch.zeros(2, dtype=torch.int32)]),
        tiles=torch.cat([metadata.tiles, torch.full((2 if not decodes else 0, 2), -1, dtype=torch.int32)]),
        decode_work=_with_room(metadata.decode_work, 2 if decodes else 0),
        tile_work=_with_room(metadata.tile_work, 0 if decodes else 2),
    )
    qkv = torch.cat([case.qkv, torch.full((3, 8, 64), torch.nan)])
    query, key, value = qkv.split([4, 2, 2], dim=1)
    here, there = case.cache.clone(), case.cache.clone()
    given = backend.over(padded).attend(query, key, value, here[0])
    expected = paged_attention(query[:tokens], key[:tokens], value[:tokens], there[0], metadata)
    torch.testing.assert_close(given[:tokens], expected, rtol=2e-6, atol=2e-6)
    assert torch.equal(here[:, :, :-1], there[:, :, :-1])


def _with_room(work: WorkList, items: int) -> WorkList:
    nobody = torch.full((2,), -1, dtype=torch.int32)
    parts = torch.cat([work.parts, work.parts[-1:].repeat(items)])
    rooms, split = torch.cat([work.rooms, nobody[:items]]), torch.cat([work.split, nobody])
    return WorkList(parts, rooms, split, work.most_parts + 3, work.room + 3)
