"""Back ends over a cache of latents, keys that have their values in them, against plain torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from benchmarks import shape_cases
from common.checkpoints.checkpoint import CheckpointError
from llm_service.families.sight import Sight, SpanRule
from llm_service.layers.attention import metadata as attention_metadata
from llm_service.layers.attention.backend import AttentionKind, CacheShape, PagedChunk
from llm_service.layers.attention.choose import choose
from llm_service.layers.attention.metadata import Tiling
from llm_service.layers.attention.one_head import attend_to_one
from llm_service.layers.attention.torch_backend import TorchBatch
from testkit.attention_cases import CPU, WAYS, Case, latents_of


@pytest.mark.parametrize("counts", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("name", ["torch", "triton"])
def test_every_back_end_computes_the_same(name: str, counts: tuple[int, ...]) -> None:
    shape = replace(latents_of(), kind=AttentionKind(scale=0.3))
    Case.random(shape, counts, torch.float32, 1).check(choose(name, shape, torch.float32, CPU))


@pytest.mark.parametrize("name", ["torch", "triton"])
@pytest.mark.parametrize(
    "shape",
    [
        latents_of(72, 64, heads=6),
        latents_of(24, 20, heads=1),
        latents_of(block_size=1),
        latents_of(heads=48),
        latents_of(528, 520, heads=2),
        latents_of(40, 40, heads=6),
    ],
    ids=["six heads", "no powers of two", "blocks of 1", "several groups of heads", "wide latents", "nothing rotated"],
)
def test_heads_and_latents_of_any_size(name: str, shape: CacheShape) -> None:
    Case.random(shape, (1, 1, 20, 1), torch.float32, 7).check(choose(name, shape, torch.float32, CPU))


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_half_precision(name: str) -> None:
    shape = latents_of()
    Case.random(shape, (1, 1, 40), torch.float16, 3).check(choose(name, shape, torch.float16, CPU))


@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize("tile", [2, 5, 40])
def test_parts_of_contexts_and_tokens_with_their_drafts(
    tile: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_metadata, "_LEAST", 16)
    monkeypatch.setattr(attention_metadata, "_MULTIPLE", 16)
    shape = replace(latents_of(heads=8), kind=AttentionKind(Sight(window=window)))
    backend: Any = choose("triton", shape, torch.float32, CPU)
    backend.tiling = Tiling(6, tile, singles=tile == 2)
    case = Case.random(shape, (1, 1, 5), torch.float32, tile)
    case.chunks[0] = PagedChunk(299, 1, list(range(75, 94)))
    case.chunks[1], case.chunks[2] = PagedChunk(40, 1, [0, 1, 2]), PagedChunk(160, 5, [*range(3, 14)])
    metadata = backend.batch(case.chunks).metadata
    assert len(metadata.decode_work.split) + len(metadata.tile_work.split) > 1
    case.check(backend)


@pytest.mark.parametrize("sight", [Sight(window=5), Sight(window=24), Sight(chunk=16)], ids=str)
@pytest.mark.parametrize("counts", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("name", ["torch", "triton"])
def test_windows_and_chunks_of_sequences(name: str, counts: tuple[int, ...], sight: Sight) -> None:
    shape = replace(latents_of(), kind=AttentionKind(sight))
    Case.random(shape, counts, torch.float32, 4).check(choose(name, shape, torch.float32, CPU))


def test_spans_are_torch_s() -> None:
    shape = replace(latents_of(), kind=AttentionKind(Sight(window=24, spans=SpanRule.EVERYWHERE)))
    case = Case.random(shape, WAYS["mixed"], torch.float32, 2)
    for name in ("torch", "triton"):
        case.check(choose(name, shape, torch.float32, CPU), [(2, 30), (34, 67)])


def test_scores_of_many_queries_are_computed_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llm_service.layers.attention.one_head._ROOM", 4 * 4 * 300)
    shape = latents_of()
    Case.random(shape, (70, 33), torch.float32, 5).check(choose("torch", shape, torch.float32, CPU))


def test_kernels_that_know_no_latents_are_refused_by_name_or_left_out_with_a_line_of_the_log() -> None:
    with pytest.raises(CheckpointError, match="--attention numba cannot be used: it knows no values that lie within"):
        choose("numba", latents_of(), torch.float32, CPU)
    with capture_logs() as lines:
        assert choose("auto", latents_of(), torch.float32, CPU).name == "torch"
    assert [line["backend"] for line in lines] == ["numba"]


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_what_is_not_a_number_outside_of_live_slots_is_not_read(name: str) -> None:
    shape_cases.check_noise_outside(latents_of(), torch.float32, CPU, name)


def test_warming_up_touches_nobodys_block_alone() -> None:
    shape = latents_of()
    cache = torch.full_like(shape.new_cache(torch.float32, CPU)[0], 7.0)
    backend: Any = choose("triton", shape, torch.float32, CPU)
    backend.warm_up(cache)
    assert (cache[:, :-1] == 7.0).all()
    assert (cache[:, -1, :2] == 0.0).all()


def test_torch_alone_draws_scores_over_latents_below_a_cap() -> None:
    shape = replace(latents_of(), kind=AttentionKind(scale=0.3, softcap=1.5))
    Case.random(shape, WAYS["mixed"], torch.float32, 4).check(choose("torch", shape, torch.float32, CPU))
    with pytest.raises(CheckpointError, match="it knows no soft caps of scores over latents"):
        choose("triton", shape, torch.float32, CPU)


@pytest.mark.parametrize(
    ("counts", "name"),
    [
        *((counts, "torch") for counts in WAYS.values()),
        (WAYS["mixed"], "triton"),
        *(pytest.param(WAYS[way], "triton", marks=pytest.mark.soak) for way in WAYS if way != "mixed"),
    ],
    ids=str,
)
def test_sinks_take_their_share_of_what_attends(
    name: str, counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of contexts in several parts as well."""
    monkeypatch.setattr(attention_metadata, "_LEAST", 16)
    monkeypatch.setattr(attention_metadata, "_MULTIPLE", 16)
    shape = replace(latents_of(), kind=AttentionKind(scale=0.3))
    case, sinks = Case.random(shape, counts, torch.float32, 9), torch.tensor([-1.0, 0.5, 2.0, 40.0])
    backend: Any = choose(name, shape, torch.float32, CPU)
    query, key, value = case.heads
    plain = choose("torch", shape, torch.float32, CPU).batch(case.chunks)
    expected = torch.empty(*query.shape[:2], shape.value_dim)
    assert isinstance(plain, TorchBatch)
    keys = plain.store(key, value, case.cache[0].clone())[0][:, 0]
    for part in plain.segments:
        here, seen = slice(part.begin, part.end), keys[part.slots]
        scores = torch.einsum("nhw,mw->nhm", query[here], seen) * 0.3
        if (mask := part.mask_of(seen)) is not None:
            scores = scores.masked_fill(~mask.unsqueeze(1), -torch.inf)
        lost = sinks.view(1, -1, 1).expand(len(scores), -1, -1)
        shares = torch.cat([scores, lost], dim=2).softmax(2)[..., :-1]
        expected[here] = shares @ seen[:, : shape.value_dim]
        if name == "torch":
            made = torch.empty_like(expected[here])
            attend_to_one(made, query[here], seen, mask, 0.3, sinks=sinks)
            torch.testing.assert_close(made, expected[here], rtol=1e-5, atol=1e-5)
    if name == "triton":
        backend.tiling = Tiling(6, 5)
        made = backend.batch(case.chunks).attend(query, key, value, case.cache[0].clone(), sinks)
        torch.testing.assert_close(made, expected.flatten(1), rtol=1e-5, atol=1e-5)
