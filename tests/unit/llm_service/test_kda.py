"""Kimi Delta Attention by torch's operators: transformers' numbers, whatever is beside a sequence or cuts it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from llm_service.layers.cache_spec import Segment
from llm_service.layers.kda.backend import KdaShape
from llm_service.layers.kda.torch_backend import TorchBackend
from testkit import gdn_cases
from testkit.kda_cases import Case

SHAPES = (KdaShape(2, 16), KdaShape(3, 24, width=3))
SHAPE = KdaShape(4, 32)
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("counts", gdn_cases.COUNTS, ids=str)
@pytest.mark.parametrize(("shape", "least"), [*zip(SHAPES, (-5.0, None), strict=True)], ids=str)
def test_sequences_of_a_batch_are_transformers_one_by_one(
    shape: KdaShape, least: float | None, counts: tuple[int, ...], dtype: torch.dtype
) -> None:
    gdn_cases.check(TorchBackend(shape, CPU), Case.drawn(shape, sum(counts), dtype, least), counts)


@pytest.mark.parametrize("total", [65, 128, 200, 257])
def test_a_sequence_cut_at_whole_chunks_has_the_same_bits(total: int) -> None:
    case = Case.drawn(SHAPE, total, torch.float32)
    whole = computed(case, [total])
    for cuts in ([64, total], [*range(64, total, 64), total], [total // 64 * 64, total]):
        assert all(torch.equal(one, other) for one, other in zip(computed(case, cuts), whole, strict=True))


def test_a_sequence_has_the_same_bits_whoever_is_beside_it() -> None:
    case = Case.drawn(SHAPE, 150, torch.float32)
    backend, alone, beside = TorchBackend(SHAPE, CPU), case.states(6), case.states(6)
    segments = [Segment(0, 1, 4, fresh=True), Segment(1, 80, 2, fresh=True), Segment(80, 150, 1, fresh=True)]
    out = backend.batch(segments).run(case.given, case.weights, beside)
    for segment in segments:
        part, count = case.part(segment.begin, segment.end), segment.end - segment.begin
        own = backend.batch([Segment(0, count, segment.slot, fresh=True)]).run(part, case.weights, alone)
        assert torch.equal(own, out[segment.begin : segment.end])
        pairs = zip(alone.tensors, beside.tensors, strict=True)
        assert all(torch.equal(one[segment.slot], other[segment.slot]) for one, other in pairs)


def test_equal_keys_that_nothing_fades_are_exact_enough() -> None:
    case = Case.drawn(SHAPE, 128, torch.float32)
    case.alike()
    gdn_cases.check(TorchBackend(SHAPE, CPU), case, [128])


@pytest.mark.parametrize("least", [None, -5.0, -6.0], ids=str)
def test_what_fades_at_once_leaves_numbers(least: float | None) -> None:
    """e to what 64 tokens fade by together is no number of float32, nor is its inverse; of 16 tokens with the second
    bound they still are."""
    case = Case.drawn(SHAPE, 128, torch.float32, least)
    case.given.a.fill_(30.0)
    case.weights.a_log.fill_(1.0)
    gdn_cases.check(TorchBackend(SHAPE, CPU), case, [128])


@pytest.mark.parametrize(("shape", "least"), [*zip(SHAPES, (-5.0, None), strict=True)], ids=str)
def test_numbers_are_those_of_float64(shape: KdaShape, least: float | None) -> None:
    case = Case.drawn(shape, 150, torch.float32, least)
    found = (
        TorchBackend(shape, CPU).batch([Segment(0, 150, 0, fresh=True)]).run(case.given, case.weights, case.states(1))
    )
    torch.testing.assert_close(found, case.exact().float(), rtol=1e-5, atol=1e-5)


def test_states_that_a_run_passes_are_copied() -> None:
    gdn_cases.check_copies(TorchBackend(SHAPE, CPU), Case.drawn(SHAPE, 270, torch.float32))


def computed(case: Case, cuts: list[int]) -> list[Tensor]:
    """What comes out of a sequence that is cut there, and its state."""
    backend, cache, begin, outs = TorchBackend(case.shape, CPU), case.states(1), 0, []
    for end in cuts:
        segment = Segment(0, end - begin, 0, fresh=begin == 0)
        if end > begin:
            outs.append(backend.batch([segment]).run(case.part(begin, end), case.weights, cache))
        begin = end
    return [torch.cat(outs), *cache.tensors]
