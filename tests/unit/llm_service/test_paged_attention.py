"""Every back end of attention against plain torch, over random batches; the Triton kernels run in their interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from common.checkpoints.checkpoint import CheckpointError
from llm_service.families.sight import Sight, SpanRule
from llm_service.layers.attention.backend import AttentionBatch, AttentionKind, CacheShape, PagedChunk, Span
from llm_service.layers.attention.choose import choose
from llm_service.layers.attention.int8_blocks import quantize
from llm_service.layers.attention.metadata import AttentionMetadata
from llm_service.layers.attention.spanned import SpannedBatch
from llm_service.layers.attention.torch_backend import TorchBackend
from llm_service.layers.cpu import selection
from llm_service.layers.cpu.numba_backend import NumbaBackend
from llm_service.settings import CacheDtype
from testkit.attention_cases import CAPPED, CPU, WAYS, Case, of_e4m3, shape_of
from testkit.plain_attention import paged_attention


def seeds(name: str) -> range:
    """Of which batches are drawn: of one alone where each program of a kernel is interpreted."""
    return range(1 if name == "triton" else 3)


@pytest.mark.parametrize("counts", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("name", ["torch", "numba", "triton"])
def test_every_back_end_computes_the_same(name: str, counts: tuple[int, ...]) -> None:
    shape = shape_of()
    for seed in seeds(name):
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
    shape = replace(shape_of(), kind=AttentionKind(Sight(window=window)))
    Case.random(shape, counts, torch.float32, window).check(choose(name, shape, torch.float32, CPU))


@pytest.mark.parametrize("window", [1, 8, 24, 150])
@pytest.mark.parametrize("counts", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("name", ["torch", "numba", "triton"])
def test_a_token_of_an_answer_sees_the_prompt_and_a_window(name: str, counts: tuple[int, ...], window: int) -> None:
    """Chunks are of prompts, of answers, or of both."""
    shape = replace(shape_of(), kind=AttentionKind(Sight(answer_window=window)))
    for seed in seeds(name):
        case = Case.random(shape, counts, torch.float32, window + seed).with_answers(window + seed)
        case.check(choose(name, shape, torch.float32, CPU))


@pytest.mark.parametrize("kind", [AttentionKind(Sight(chunk=24)), AttentionKind(Sight(21, chunk=64))])
@pytest.mark.parametrize("counts", [(1, 1, 1), (1, 65, 20)], ids=["decodes", "mixed"])
@pytest.mark.parametrize("name", ["torch", "numba", "triton"])
def test_a_token_sees_none_before_its_chunk(name: str, counts: tuple[int, ...], kind: AttentionKind) -> None:
    shape = replace(shape_of(), kind=kind)
    Case.random(shape, counts, torch.float32, kind.sight.chunk).check(choose(name, shape, torch.float32, CPU))


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("name", ["torch", "numba", "triton"])
def test_products_are_multiplied_by_the_scale_of_the_layers(name: str, window: int) -> None:
    shape = replace(shape_of(), kind=AttentionKind(Sight(window), scale=0.4))
    Case.random(shape, WAYS["mixed"], torch.float32, 1).check(choose(name, shape, torch.float32, CPU))


@pytest.mark.parametrize("kind", [CAPPED, replace(CAPPED, sight=Sight(window=40)), replace(CAPPED, softcap=0.02)])
@pytest.mark.parametrize("counts", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("name", ["torch", "numba", "triton"])
def test_scores_are_drawn_below_a_cap(name: str, counts: tuple[int, ...], kind: AttentionKind) -> None:
    shape = replace(shape_of(), kind=kind)
    Case.random(shape, counts, torch.float32, 1).check(choose(name, shape, torch.float32, CPU))


@pytest.mark.parametrize("name", ["torch", "numba", "triton"])
def test_tokens_of_a_capped_prompt_see_all_that_is_before_them_beyond_a_window(name: str) -> None:
    shape = replace(shape_of(), kind=replace(CAPPED, sight=Sight(window=9, spans=SpanRule.WHOLE_PROMPTS)))
    case = Case.random(shape, WAYS["mixed"], torch.float32, 5)
    case.chunks[2] = replace(case.chunks[2], context=17, blocks=list(range(6)))
    case.chunks[4] = replace(case.chunks[4], context=0, blocks=[6, 7])
    case.chunks[:2] = [PagedChunk(100, 1, list(range(10, 17))), PagedChunk(3, 1, [20])]
    case.chunks[3] = PagedChunk(30, 1, [21, 22])
    case.check(choose(name, shape, torch.float32, CPU), [(2, 60), (68, 88)])
    case.check(choose(name, shape, torch.float32, CPU), [(0, 1), (2, 60), (68, 88)])


@pytest.mark.parametrize("rule", [SpanRule.EVERYWHERE, SpanRule.BEYOND_WINDOWS])
@pytest.mark.parametrize("window", [0, 7, 40])
@pytest.mark.parametrize("name", ["torch", "numba", "triton"])
def test_tokens_of_a_span_see_each_other(name: str, window: int, rule: SpanRule) -> None:
    shape = replace(shape_of(), kind=AttentionKind(Sight(window, spans=rule)))
    case = Case.random(shape, WAYS["mixed"], torch.float32, window)
    case.check(choose(name, shape, torch.float32, CPU), [(2, 30), (34, 67), (70, 72), (72, 80)])


def test_kernels_that_know_no_spans_compute_what_is_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = replace(shape_of(), kind=AttentionKind(Sight(20, spans=SpanRule.EVERYWHERE)))
    case, backend = Case.random(shape, (1, 40, 1, 30), torch.float32, 3), choose("triton", shape, torch.float32, CPU)
    batch, by_torch = TorchBackend.batch, list[Sequence[PagedChunk]]()

    def noted(own: TorchBackend, chunks: Sequence[PagedChunk], spans: Sequence[Span] = ()) -> AttentionBatch:
        by_torch.append(chunks)
        return batch(own, chunks, spans)

    monkeypatch.setattr(TorchBackend, "batch", noted)
    case.check(backend, [(3, 30)])
    assert by_torch == [case.chunks[1:2]]


@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("name", ["torch", "numba", "triton"])
def test_tokens_of_all_spans_of_a_chunk_see_each_other_and_those_between_see_none_behind_them(
    name: str, window: int
) -> None:
    shape = replace(shape_of(), kind=AttentionKind(Sight(window, spans=SpanRule.ALL_MEDIA)))
    case = Case.random(shape, WAYS["mixed"], torch.float32, window)
    case.check(choose(name, shape, torch.float32, CPU), [(2, 30), (34, 60), (66, 67), (68, 72), (74, 80)])
    case.check(choose(name, shape, torch.float32, CPU), [(2, 67)])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [AttentionKind(), CAPPED], ids=["plain", "capped"])
@pytest.mark.parametrize("name", ["torch", "triton"])
def test_half_precision(name: str, kind: AttentionKind, dtype: torch.dtype) -> None:
    shape = replace(shape_of(), kind=kind)
    Case.random(shape, (1, 1, 70), dtype, 3).check(choose(name, shape, dtype, CPU))


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
    sight = Sight(answer_window=40) if answered else Sight(window=40, spans=SpanRule.EVERYWHERE)
    shape = replace(shape_of(), kind=AttentionKind(sight))
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


_READ = {"plain": AttentionKind(), "window": AttentionKind(Sight(24)), "capped": AttentionKind(softcap=1.5)}


@pytest.mark.parametrize(
    ("counts", "kind"),
    [
        pytest.param(WAYS[way], kind, id=f"{way}, {of}")
        for way, kinds in {"decodes": _READ, "prefills": ["plain"], "mixed": ["window", "capped"]}.items()
        for of, kind in _READ.items()
        if of in kinds
    ],
)
@pytest.mark.parametrize("name", ["torch", "triton"])
def test_keys_and_values_in_8_bits_are_attended_to_as_what_they_stand_for(
    name: str, counts: tuple[int, ...], kind: AttentionKind
) -> None:
    shape = replace(shape_of(64, 6, 2), kind=kind, kept=CacheDtype.INT8)
    case = Case.random(replace(shape, kept=CacheDtype.AUTO), counts, torch.float32, 3)
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


_SCALES = torch.tensor([[0.004, 3.0], [0.02, 40.0]])
"""By head, of keys, and of values: some numbers become the largest, others steps of the smallest ones."""


@pytest.mark.parametrize("scales", [None, _SCALES], ids=["plain", "scaled"])
@pytest.mark.parametrize("counts", [pytest.param(counts, id=way) for way, counts in WAYS.items()])
@pytest.mark.parametrize("name", ["torch", "triton"])
def test_keys_and_values_of_e4m3_are_attended_to_as_what_they_stand_for(
    name: str, counts: tuple[int, ...], scales: Tensor | None
) -> None:
    shape = replace(shape_of(64, 6, 2), kept=CacheDtype.FP8)
    case = Case.random(replace(shape, kept=CacheDtype.AUTO), counts, torch.float32, 3)
    case.heads[1][0, 0, :2], case.heads[2][0, 0, :2] = torch.tensor([1e-3, 0.0]), torch.tensor([600.0, -1e9])
    small, plain, expected = of_e4m3(case, shape, scales)
    batch: Any = choose(name, shape, torch.float32, CPU).batch(case.chunks)
    given = (batch if scales is None else batch.with_scales(scales)).attend(*case.heads, small)
    torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-5)
    by = torch.ones(()) if scales is None else scales.view(2, 1, 1, 2, 1)
    assert torch.equal(small.float() * by, plain), "and nothing else was written"


@pytest.mark.parametrize("kind", [AttentionKind(Sight(24)), AttentionKind(softcap=1.5)], ids=["window", "capped"])
@pytest.mark.parametrize("name", ["torch", "triton"])
def test_scales_of_e4m3_count_before_a_cap_and_within_windows(name: str, kind: AttentionKind) -> None:
    shape = replace(shape_of(64, 6, 2), kept=CacheDtype.FP8, kind=kind)
    case = Case.random(replace(shape, kept=CacheDtype.AUTO), WAYS["mixed"], torch.float32, 3)
    small, _, expected = of_e4m3(case, shape, _SCALES)
    batch: Any = choose(name, shape, torch.float32, CPU).batch(case.chunks)
    torch.testing.assert_close(batch.with_scales(_SCALES).attend(*case.heads, small), expected, rtol=1e-5, atol=1e-5)


def test_scales_of_e4m3_reach_both_who_compute_a_step_with_spans() -> None:
    shape = replace(shape_of(64, 6, 2), kept=CacheDtype.FP8, kind=AttentionKind(Sight(spans=SpanRule.EVERYWHERE)))
    case, spans = Case.random(replace(shape, kept=CacheDtype.AUTO), (1, 20, 30), torch.float32, 3), [(3, 9)]
    small, _, expected = of_e4m3(case, shape, _SCALES, spans)
    batch: Any = choose("triton", shape, torch.float32, CPU).batch(case.chunks, spans)
    assert isinstance(batch, SpannedBatch)
    torch.testing.assert_close(batch.with_scales(_SCALES).attend(*case.heads, small), expected, rtol=1e-5, atol=1e-5)


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
    shape = replace(shape_of(), kept=CacheDtype.INT8)
    assert choose("auto", shape, torch.float32, CPU).name == "torch"
    with pytest.raises(CheckpointError, match="it reads no keys and values in 8 bits"):
        choose("numba", shape, torch.float32, CPU)
    with pytest.raises(CheckpointError, match="it reads no keys and values of e4m3"):
        choose("numba", replace(shape_of(), kept=CacheDtype.FP8), torch.float32, CPU)


def test_small_values_in_8_bits_are_not_lost_in_half_precision() -> None:
    """A weight times the step of a value would be less than float16 tells from 0."""
    shape = replace(shape_of(64, 4, 2), kept=CacheDtype.INT8)
    case = Case.random(replace(shape, kept=CacheDtype.AUTO), (40,), torch.float16, 5)
    query, key, value = case.heads
    out = [
        choose(name, shape, torch.float16, CPU)
        .batch([PagedChunk(0, 40, [0, 1, 2])])
        .attend(query, key, (value * 1e-4).to(torch.float16), shape.new_cache(torch.float16, CPU)[0])
        for name in ("torch", "triton")
    ]
    assert (out[0].abs() > 0).float().mean() > 0.9
    torch.testing.assert_close(*out, rtol=0.02, atol=3e-6)
