"""Mamba-2 by torch's operators: transformers' numbers, whatever is beside a sequence or cuts it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from llm_service.layers.cache_spec import Segment
from llm_service.layers.mamba2.backend import Mamba2Shape
from llm_service.layers.mamba2.torch_backend import TorchBackend
from llm_service.plan import Chunk
from testkit import mamba2_cases
from testkit.mamba2_cases import Case

SHAPE = Mamba2Shape(4, 8, 16, 32, least_step=0.3)
"""Fewer heads than a vector has numbers; channels fill whole vectors."""
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("counts", mamba2_cases.COUNTS, ids=str)
@pytest.mark.parametrize("shape", mamba2_cases.SHAPES, ids=str)
def test_sequences_of_a_batch_are_transformers_one_by_one(
    shape: Mamba2Shape, counts: tuple[int, ...], dtype: torch.dtype
) -> None:
    mamba2_cases.check(TorchBackend(shape, CPU), Case.drawn(shape, sum(counts), dtype), counts)


@pytest.mark.parametrize("total", [65, 128, 200, 257])
def test_a_sequence_cut_at_whole_chunks_has_the_same_bits(total: int) -> None:
    case = Case.drawn(SHAPE, total, torch.float32)
    whole = computed(case, [total])
    for cuts in ([64, total], [*range(64, total, 64), total], [total // 64 * 64, total]):
        assert all(torch.equal(one, other) for one, other in zip(computed(case, cuts), whole, strict=True))


def test_states_that_a_run_passes_are_copied() -> None:
    mamba2_cases.check_copies(TorchBackend(SHAPE, CPU), Case.drawn(SHAPE, 270, torch.float32))


def test_drafts_have_the_bits_of_tokens_that_come_one_by_one() -> None:
    case = Case.drawn(SHAPE, 75, torch.float32)
    backend = TorchBackend(SHAPE, CPU)
    outs = []
    for cuts in ([75], [71, 72, 73, 74, 75]):
        cache, begin = case.states(1), 70
        backend.batch([Segment(0, 70, 0, fresh=True)]).run(case.part(0, 70), case.weights, cache)
        each = []
        for end in cuts:
            segment = Segment(0, end - begin, 0, fresh=False, context=begin, answers=end - begin)
            each.append(backend.batch([segment]).run(case.part(begin, end), case.weights, cache))
            begin = end
        outs.append([torch.cat(each), *cache.tensors])
    assert all(torch.equal(one, other) for one, other in zip(*outs, strict=True))


def test_an_answer_that_is_computed_anew_at_once_is_what_it_was_token_by_token() -> None:
    case = Case.drawn(SHAPE, 150, torch.float32)
    backend, cache, said = TorchBackend(SHAPE, CPU), case.states(2), list[Tensor]()
    said.append(backend.batch([Segment(0, 100, 0, fresh=True)]).run(case.part(0, 100), case.weights, cache))
    for place in range(100, 150):
        step = [Segment(0, 1, 0, fresh=False, context=place, answers=1)]
        said.append(backend.batch(step).run(case.part(place, place + 1), case.weights, cache))
    anew = Segment.of([Chunk(0, 150, 0, answers=50)], [1])
    made = backend.batch(anew).run(case.given, case.weights, cache)
    torch.testing.assert_close(made, torch.cat(said), atol=1e-4, rtol=1e-4)
    for each in cache.tensors:
        torch.testing.assert_close(each[1], each[0], atol=1e-4, rtol=1e-4)


def computed(case: Case, cuts: list[int]) -> list[Tensor]:
    """What comes out of a sequence that is cut there, and its state."""
    backend, cache, begin, outs = TorchBackend(case.shape, CPU), case.states(1), 0, []
    for end in cuts:
        segment = Segment(0, end - begin, 0, fresh=begin == 0, context=begin)
        if end > begin:
            outs.append(backend.batch([segment]).run(case.part(begin, end), case.weights, cache))
        begin = end
    return [torch.cat(outs), *cache.tensors]
