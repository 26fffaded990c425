"""Every back end of attention against plain torch, over random batches; the Triton kernels run in their interpreter."""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from common.checkpoint import CheckpointError
from llm_service.layers.attention import flash_backend, kernel_backend
from llm_service.layers.attention import metadata as attention_metadata
from llm_service.layers.attention.backend import AttentionKind, CacheShape, PagedChunk
from llm_service.layers.attention.choose import choose, runs
from llm_service.layers.attention.int8_blocks import quantize
from llm_service.layers.attention.metadata import AttentionMetadata, Tiling, WorkList, WorkNumbers
from llm_service.layers.attention.triton_backend import TritonBackend, TritonBatch
from llm_service.layers.cpu import selection
from llm_service.layers.cpu.numba_backend import NumbaBackend
from tests.attention_cases import CPU, WAYS, Case, shape_of
from tests.plain_attention import paged_attention


@pytest.mark.parametrize("counts", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("name", ["torch", "numba", "triton"])
def test_every_back_end_computes_the_same(name: str, counts: tuple[int, ...]) -> None:
    shape = shape_of()
    for seed in range(3):
        Case.random(shape, counts, torch.float32, seed).check(choose(name, shape, torch.float32, CPU))


@pytest.mark.parametrize("name", ["torch", "numba", "triton"])
@pytest.mark.parametrize(
    "shape",
    [
        shape_of(head_dim=80),
        shape_of(head_dim=128, heads=6, kv_heads=1),
        shape_of(head_dim=24, heads=3, kv_heads=3),
        shape_of(block_size=4),
        shape_of(block_size=1),
        shape_of(head_dim=256, heads=2, kv_heads=1, block_size=32),
    ],
    ids=["80", "one KV head", "a KV head each", "blocks of 4", "blocks of 1", "256"],
)
def test_heads_and_blocks_of_any_size(name: str, shape: CacheShape) -> None:
    Case.random(shape, (1, 1, 20, 1), torch.float32, 7).check(choose(name, shape, torch.float32, CPU))


@pytest.mark.parametrize("window", [1, 8, 24, 150])
@pytest.mark.parametrize("counts", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("name", ["torch", "numba", "triton"])
def test_a_token_sees_no_more_than_its_window(name: str, counts: tuple[int, ...], window: int) -> None:
    shape = replace(shape_of(), kind=AttentionKind(window=window))
    Case.random(shape, counts, torch.float32, window).check(choose(name, shape, torch.float32, CPU))


@pytest.mark.parametrize("window", [1, 8, 24, 150])
@pytest.mark.parametrize("counts", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("name", ["torch", "numba", "triton"])
def test_a_token_of_an_answer_sees_the_prompt_and_a_window(name: str, counts: tuple[int, ...], window: int) -> None:
    """Chunks are of prompts, of answers, or of both."""
    shape = replace(shape_of(), kind=AttentionKind(window=window, sees_prompt=True))
    for seed in range(3):
        case = Case.random(shape, counts, torch.float32, window + seed).with_answers(seed)
        case.check(choose(name, shape, torch.float32, CPU))


@pytest.mark.parametrize("kind", [AttentionKind(chunk=24), AttentionKind(21, chunk=64)])
@pytest.mark.parametrize("counts", [(1, 1, 1), (1, 65, 20)], ids=["decodes", "mixed"])
@pytest.mark.parametrize("name", ["torch", "numba", "triton"])
def test_a_token_sees_none_before_its_chunk(name: str, counts: tuple[int, ...], kind: AttentionKind) -> None:
    shape = replace(shape_of(), kind=kind)
    Case.random(shape, counts, torch.float32, kind.chunk).check(choose(name, shape, torch.float32, CPU))


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("name", ["torch", "numba", "triton"])
def test_products_are_multiplied_by_the_scale_of_the_layers(name: str, window: int) -> None:
    shape = replace(shape_of(), kind=AttentionKind(window, scale=0.4))
    Case.random(shape, WAYS["mixed"], torch.float32, 1).check(choose(name, shape, torch.float32, CPU))


CAPPED = AttentionKind(scale=0.4, softcap=1.5)
"""Of scores several of which are far above it."""


@pytest.mark.parametrize("kind", [CAPPED, replace(CAPPED, window=40), replace(CAPPED, softcap=0.02)])
@pytest.mark.parametrize("counts", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("name", ["torch", "numba", "triton"])
def test_scores_are_drawn_below_a_cap(name: str, counts: tuple[int, ...], kind: AttentionKind) -> None:
    shape = replace(shape_of(), kind=kind)
    Case.random(shape, counts, torch.float32, 1).check(choose(name, shape, torch.float32, CPU))


@pytest.mark.parametrize("name", ["torch", "numba", "triton"])
def test_tokens_of_a_capped_prompt_see_all_that_is_before_them_beyond_a_window(name: str) -> None:
    shape = replace(shape_of(), kind=replace(CAPPED, window=9, spans=True, prompt_spans=True))
    case = Case.random(shape, WAYS["mixed"], torch.float32, 5)
    case.chunks[2] = replace(case.chunks[2], context=17, blocks=list(range(6)))
    case.chunks[4] = replace(case.chunks[4], context=0, blocks=[6, 7])
    case.chunks[:2] = [PagedChunk(100, 1, list(range(10, 17))), PagedChunk(3, 1, [20])]
    case.chunks[3] = PagedChunk(30, 1, [21, 22])
    case.check(choose(name, shape, torch.float32, CPU), [(2, 60), (68, 88)])
    case.check(choose(name, shape, torch.float32, CPU), [(0, 1), (2, 60), (68, 88)])


@pytest.mark.parametrize("whole", [False, True], ids=["as far as a window reaches", "beyond a window"])
@pytest.mark.parametrize("window", [0, 7, 40])
@pytest.mark.parametrize("name", ["torch", "numba", "triton"])
def test_tokens_of_a_span_see_each_other(name: str, window: int, *, whole: bool) -> None:
    shape = replace(shape_of(), kind=AttentionKind(window, spans=True, whole_spans=whole))
    case = Case.random(shape, WAYS["mixed"], torch.float32, window)
    case.check(choose(name, shape, torch.float32, CPU), [(2, 30), (34, 67), (70, 72), (72, 80)])


@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("name", ["torch", "numba", "triton"])
def test_tokens_of_all_spans_of_a_chunk_see_each_other_and_those_between_see_none_behind_them(
    name: str, window: int
) -> None:
    shape = replace(shape_of(), kind=AttentionKind(window, spans=True, joined_spans=True))
    case = Case.random(shape, WAYS["mixed"], torch.float32, window)
    case.check(choose(name, shape, torch.float32, CPU), [(2, 30), (34, 60), (66, 67), (68, 72), (74, 80)])
    case.check(choose(name, shape, torch.float32, CPU), [(2, 67)])


@pytest.mark.parametrize("answered", [0, 12, 150, 290])
@pytest.mark.parametrize("parts", [2, 5])
@pytest.mark.parametrize("counts", [(1, 1, 1), (20, 1, 30)])
def test_parts_of_a_context_before_a_window_count_for_nothing(
    counts: tuple[int, ...], parts: int, answered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do those between a prompt and the window of an answer of so many tokens, 0: the window is for all."""
    monkeypatch.setattr(attention_metadata, "_LEAST", 16)
    monkeypatch.setattr(attention_metadata, "_MULTIPLE", 16)
    monkeypatch.setattr(kernel_backend, "COMBINED", 2)
    shape = replace(shape_of(), kind=AttentionKind(window=21, sees_prompt=answered > 0))
    backend: Any = choose("triton", shape, torch.float32, CPU)
    backend.tiling = replace(backend.tiling, parts=parts)
    case = Case.random(shape, counts, torch.float32, 5)
    case.chunks[0] = PagedChunk(399 - counts[0], counts[0], list(range(75, 100)), answered=answered)
    case.chunks[1] = PagedChunk(200, 1, list(range(13)), answered=answered // 2)
    case.chunks[2] = PagedChunk(70, counts[2], list(range(13, 20)), answered=answered // 10)
    metadata = backend.batch(case.chunks).metadata
    assert len(metadata.decode_work.split) + len(metadata.tile_work.split) > 0
    case.check(backend)


@pytest.mark.parametrize("kind", [AttentionKind(), CAPPED], ids=["plain", "capped"])
@pytest.mark.parametrize("name", ["torch", "triton"])
def test_half_precision(name: str, kind: AttentionKind) -> None:
    """The interpreter has no products in bfloat16: those are tried on a GPU."""
    shape = replace(shape_of(), kind=kind)
    Case.random(shape, (1, 1, 70), torch.float16, 3).check(choose(name, shape, torch.float16, CPU))


@pytest.mark.parametrize("counts", [(1, 1, 1), (40,), (1, 20)])
@pytest.mark.parametrize("name", ["torch", "numba"])
def test_no_step_copies_more_of_the_cache_than_its_own_sequences_and_numba_decodes_copy_nothing(
    name: str, counts: tuple[int, ...]
) -> None:
    shape = replace(shape_of(), blocks=4000)
    case = Case.random(shape, counts, torch.float32, 3)
    query, key, value = case.qkv.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
    batch = choose(name, shape, torch.float32, CPU).batch(case.chunks)
    read = [chunk for chunk in case.chunks if name == "torch" or chunk.count > 1]
    longest = max((chunk.context + chunk.count for chunk in read), default=0)
    with Made() as made:
        batch.attend(query, key, value, case.cache[0])
    assert made.largest <= max(query.numel(), longest * shape.heads * shape.head_dim)


class Made(TorchDispatchMode):
    """Watches the sizes of what torch computes: `largest` tensor, in elements, that is a view of nothing else."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {each.untyped_storage().data_ptr() for each in args if isinstance(each, torch.Tensor)}
        for each in out if isinstance(out, tuple) else (out,):
            if isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, each.numel())
        return out


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


@pytest.mark.parametrize("counts", WAYS.values(), ids=WAYS)
def test_a_processor_without_wide_vectors_leaves_chunks_to_torch(counts: tuple[int, ...]) -> None:
    shape = shape_of()
    Case.random(shape, counts, torch.float32, 1).check(NumbaBackend(shape, packs=False))


@pytest.mark.parametrize(
    ("spans", "answered"), [([], 0), ([(29, 50)], 0), ([], 70)], ids=["causal", "a span", "answers"]
)
@pytest.mark.parametrize(
    ("packs", "dtype"), [(False, torch.float32), (True, torch.float32), (True, torch.bfloat16)], ids=str
)
def test_a_token_and_its_drafts_beside_a_prompt_have_the_bits_that_each_has_alone(
    packs: bool, dtype: torch.dtype, spans: list[tuple[int, int]], answered: int
) -> None:
    """Those of one sequence are more than a prompt's that are decoded. Where so many are `answered` the window is for
    these alone."""
    if (packs and not selection.wide_vectors()) or (dtype == torch.bfloat16 and not selection.computes_bfloat16()):
        pytest.skip("the processor lacks AVX-512, or AVX512-BF16")
    shape = replace(shape_of(), kind=AttentionKind(window=40, spans=True, sees_prompt=answered > 0))
    case, backend = Case.random(shape, (5, 1, 20, 30, 7), torch.float32, 2), NumbaBackend(shape, dtype, packs=packs)
    case.chunks[:3] = [replace(chunk, decodes=True, answered=min(answered, chunk.context)) for chunk in case.chunks[:3]]
    parts = case.qkv.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
    together, alone = case.cache[0].to(dtype), case.cache[0].to(dtype)
    out, at = backend.batch(case.chunks, spans).attend(*parts, together), 0
    for chunk in case.chunks[:3]:
        for ahead in range(chunk.count):
            less = chunk.count - 1 - ahead
            one = PagedChunk(chunk.context + ahead, 1, chunk.blocks, answered=max(0, chunk.answered - less))
            given = (part[at : at + 1] for part in parts)
            assert torch.equal(backend.batch([one]).attend(*given, alone)[0], out[at])
            at += 1
    of_span = [(begin - at, end - at) for begin, end in spans]
    behind = backend.batch(case.chunks[3:], of_span).attend(*(part[at:] for part in parts), alone)
    assert torch.equal(behind, out[at:])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("name", ["triton", "numba"])
def test_warming_up_touches_nobodys_block_alone(name: str) -> None:
    shape = shape_of()
    cache = torch.full_like(shape.new_cache(torch.float32, CPU)[0], 7.0)
    backend: Any = choose(name, shape, torch.float32, CPU)
    backend.warm_up(cache)
    assert (cache[:, :-1] == 7.0).all()
    assert (cache[:, -1, :2] == 0.0).all()


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


def test_the_best_that_is_here_is_chosen_and_what_is_not_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = shape_of()
    if selection.computes_bfloat16():
        assert choose("auto", shape, torch.bfloat16, CPU).name == "numba"
    monkeypatch.setattr(selection, "multiplies_bfloat16", lambda: False)
    assert choose("auto", shape, torch.float32, CPU).name == "numba"
    assert choose("auto", shape, torch.bfloat16, CPU).name == "torch"
    with pytest.raises(CheckpointError, match="--attention flash cannot be used: there is no GPU"):
        choose("flash", shape, torch.float16, CPU)
    wide = CacheShape(1, 1, 16, 2, 1, 512)
    with pytest.raises(CheckpointError, match="--attention flash cannot be used: it knows heads of 256"):
        choose("flash", wide, torch.bfloat16, torch.device("cuda"))
    with pytest.raises(CheckpointError, match="--attention numba cannot be used: it computes in float32"):
        choose("numba", shape, torch.bfloat16, CPU)


def _library(name: str, **functions: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    for each, function in functions.items():
        setattr(module, each, function)
    return module


def test_both_versions_of_flash_attn_are_called_as_they_document(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library cannot run here: stand-ins with its signatures compute from exactly what it would be given."""

    def version_3(q, k_cache, v_cache, *, cache_seqlens, page_table, cu_seqlens_q, max_seqlen_q, softcap=0.0, **rule):
        rule |= {"softcap": softcap or None}
        return _stand_in(q, k_cache, v_cache, cache_seqlens, page_table, cu_seqlens_q, max_seqlen_q, **rule)

    def version_2(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table, softcap=0.0, **rule):
        rule |= {"softcap": softcap or None}
        lengths = cu_seqlens_k.diff()
        assert lengths.max() <= max_seqlen_k
        return _stand_in(q, k, v, lengths, block_table, cu_seqlens_q, max_seqlen_q, **rule)

    newest = {"flash_attn_interface": _library("flash_attn_interface", flash_attn_with_kvcache=version_3)}
    older = {"flash_attn_interface": None, "flash_attn": _library("flash_attn", flash_attn_varlen_func=version_2)}
    for modules, block_size in ((newest, 16), (older, 256)):
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)  # type: ignore[arg-type]
        compute = flash_backend.find(block_size)
        assert compute is not None
        for kind in (AttentionKind(), AttentionKind(window=9, scale=0.2), CAPPED):
            shape = replace(shape_of(), block_size=block_size, kind=kind)
            Case.random(shape, WAYS["mixed"], torch.float32, 2).check(flash_backend.FlashBackend(shape, CPU, compute))
        spanned = replace(shape, kind=AttentionKind(spans=True))
        case = Case.random(spanned, (1, 40), torch.float32, 2)
        case.check(flash_backend.FlashBackend(spanned, CPU, compute), [(3, 30)])
    assert flash_backend.find(16) is None, "version 2 reads pages of 256 alone"


def test_a_flash_attn_without_soft_caps_is_refused_where_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    def older(q, k, v, cu_seqlens_q, *, softmax_scale, causal, window_size): ...

    def newer(q, k, v, cu_seqlens_q, *, softmax_scale, causal, window_size, softcap=0.0): ...

    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)  # type: ignore[arg-type]
    capped, gpu = replace(shape_of(), block_size=256, kind=CAPPED), torch.device("cuda")
    for varlen, knows in ((older, False), (newer, True)):
        monkeypatch.setitem(sys.modules, "flash_attn", _library("flash_attn", flash_attn_varlen_func=varlen))
        assert flash_backend.find(256) is not None
        assert (flash_backend.find(256, softcap=True) is not None) is knows
        if not knows:
            with pytest.raises(CheckpointError, match="flash-attn 3 with soft caps of scores is not installed"):
                choose("flash", capped, torch.bfloat16, gpu)


def _stand_in(q, keys, values, lengths, table, starts, longest, *, softmax_scale, causal, window_size, softcap=None):
    assert causal
    before, behind = window_size
    assert behind == (-1 if before < 0 else 0)
    assert longest >= starts.diff().max()
    none = torch.empty(0)
    work = WorkList(none, none, none, 0, 0)
    metadata = AttentionMetadata(none, table, starts, lengths, lengths, torch.empty(0, 2), work, work, 64, longest, 0)
    nothing = q.new_empty(0, keys.shape[2], keys.shape[3])
    kind = AttentionKind(before + 1, scale=softmax_scale, softcap=softcap)
    return paged_attention(q, nothing, nothing, torch.stack([keys, values]), metadata, kind).view_as(q)


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_a_back_end_that_works_passes_its_trial(name: str) -> None:
    assert runs(name, CacheShape(2, 100, 16, 4, 2, 64), torch.float32, CPU)


@pytest.mark.parametrize("where", ["batch", "attend"])
def test_one_that_fails_in_any_way_does_not(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where there is no compiler, or a library was built for another GPU."""

    def fails(*_: Any) -> Any:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(TritonBackend if where == "batch" else TritonBatch, where, fails)
    assert not runs("triton", CacheShape(2, 100, 16, 4, 2, 64), torch.float32, CPU)


@pytest.mark.parametrize(
    "kind", [AttentionKind(), AttentionKind(24), AttentionKind(softcap=1.5)], ids=["plain", "window", "capped"]
)
@pytest.mark.parametrize("counts", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("name", ["torch", "triton"])
def test_keys_and_values_in_8_bits_are_attended_to_as_what_they_stand_for(
    name: str, counts: tuple[int, ...], kind: AttentionKind
) -> None:
    shape = replace(shape_of(64, 6, 2), kind=kind, int8=True)
    case = Case.random(replace(shape, int8=False), counts, torch.float32, 3)
    query, key, value = case.heads
    stored = shape.new_cache(torch.float32, CPU)
    layer = [shape.int8_tokens(part) for part in stored[0]]
    everywhere = torch.arange((shape.blocks + 1) * shape.block_size)
    for tokens, kept in zip(layer, case.cache[0], strict=True):
        tokens.write(everywhere, kept.flatten(0, 1))
    plain = torch.stack([tokens[everywhere].view(case.cache[0, 0].shape) for tokens in layer])
    near = [(numbers * scales.unsqueeze(2)) for numbers, scales in map(quantize, (key, value))]
    metadata = AttentionMetadata.of(case.chunks, shape.block_size, CPU)
    expected = paged_attention(query, *near, plain, metadata, shape.kind, ())
    given = choose(name, shape, torch.float32, CPU).batch(case.chunks).attend(query, key, value, stored[0])
    torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-5)
    for tokens, kept in zip(layer, plain, strict=True):
        assert torch.equal(tokens[everywhere], kept.flatten(0, 1)), "and nothing else was written"
    whole = paged_attention(query, key, value, case.cache[0].clone(), metadata, shape.kind, ())
    assert not torch.equal(expected, whole)
    torch.testing.assert_close(expected, whole, rtol=0, atol=0.02)


def test_a_scale_is_the_largest_number_s() -> None:
    drawn = torch.randn(50, 3, 16, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 4, 50).view(
        -1, 1, 1
    )
    drawn[7] = 0
    numbers, scales = quantize(drawn)
    assert numbers.abs().amax(2).eq(127).sum() == 3 * 49
    error = (numbers * scales.unsqueeze(2) - drawn).abs()
    assert bool((error <= scales.unsqueeze(2) * 0.5001).all())


def test_no_back_end_takes_8_bits_that_does_not_read_them() -> None:
    shape = replace(shape_of(), int8=True)
    assert choose("auto", shape, torch.float32, CPU).name == "torch"
    with pytest.raises(CheckpointError, match="it reads no keys and values in 8 bits"):
        choose("numba", shape, torch.float32, CPU)


def test_small_values_in_8_bits_are_not_lost_in_half_precision() -> None:
    """A weight times the step of a value would be less than float16 tells from 0."""
    shape = replace(shape_of(64, 4, 2), int8=True)
    case = Case.random(replace(shape, int8=False), (40,), torch.float16, 5)
    query, key, value = case.heads
    out = [
        choose(name, shape, torch.float16, CPU)
        .batch([PagedChunk(0, 40, [0, 1, 2])])
        .attend(query, key, (value * 1e-4).to(torch.float16), shape.new_cache(torch.float16, CPU)[0])
        for name in ("torch", "triton")
    ]
    assert (out[0].abs() > 0).float().mean() > 0.9
    torch.testing.assert_close(*out, rtol=0.02, atol=3e-6)
