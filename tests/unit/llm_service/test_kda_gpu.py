"""Kimi Delta Attention by Triton's kernels in their interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from llm_service.layers.cache_spec import Segment
from llm_service.layers.kda.backend import KdaShape
from llm_service.layers.kda.choose import runs
from llm_service.layers.kda.triton_backend import TritonBackend
from testkit import gdn_cases
from testkit.kda_cases import Case

CPU = torch.device("cpu")
SHAPES = (KdaShape(2, 16), KdaShape(3, 24, width=3))


@pytest.mark.parametrize(
    ("shape", "least", "dtype", "counts"),
    [
        (SHAPES[0], -5.0, torch.float32, (1, 130, 65, 2)),
        (SHAPES[0], -5.0, torch.float32, (1, 1, 1)),
        pytest.param(SHAPES[0], -5.0, torch.bfloat16, (1, 130, 65, 2), marks=pytest.mark.soak),
        pytest.param(SHAPES[1], None, torch.float16, (1, 130, 65, 2), marks=pytest.mark.soak),
        (SHAPES[1], None, torch.float16, (1, 1, 1)),
    ],
    ids=str,
)
def test_sequences_of_a_batch_are_transformers_one_by_one(
    shape: KdaShape, least: float | None, dtype: torch.dtype, counts: tuple[int, ...]
) -> None:
    gdn_cases.check(TritonBackend(shape, dtype, CPU), Case.drawn(shape, sum(counts), dtype, least), counts)


@pytest.mark.parametrize(
    ("shape", "least"), [pytest.param(SHAPES[0], -5.0, marks=pytest.mark.soak), (SHAPES[1], None)], ids=str
)
def test_numbers_are_those_of_float64(shape: KdaShape, least: float | None) -> None:
    case = Case.drawn(shape, 150, torch.float32, least)
    found = (
        TritonBackend(shape, torch.float32, CPU)
        .batch([Segment(0, 150, 0, fresh=True)])
        .run(case.given, case.weights, case.states(1))
    )
    torch.testing.assert_close(found, case.exact().float(), rtol=1e-5, atol=1e-5)


def test_states_that_a_run_passes_are_copied() -> None:
    gdn_cases.check_copies(TritonBackend(SHAPES[0], torch.float32, CPU), Case.drawn(SHAPES[0], 270, torch.float32))


@pytest.mark.soak
def test_equal_keys_that_nothing_fades_are_exact_enough() -> None:
    case = Case.drawn(SHAPES[0], 128, torch.float32)
    case.alike()
    gdn_cases.check(TritonBackend(SHAPES[0], torch.float32, CPU), case, [128])


def test_what_fades_at_once_leaves_numbers() -> None:
    case = Case.drawn(SHAPES[0], 70, torch.float32, None)
    case.given.a.fill_(30.0)
    case.weights.a_log.fill_(1.0)
    gdn_cases.check(TritonBackend(SHAPES[0], torch.float32, CPU), case, [70])


@pytest.mark.parametrize("counts", [pytest.param((1, 66, 5), marks=pytest.mark.soak), (1, 1, 1)], ids=str)
def test_padding_touches_nothing(counts: tuple[int, ...]) -> None:
    tokens, shape = sum(counts), SHAPES[0]
    case = Case.drawn(shape, tokens + 3, torch.float32)
    cache, alone = case.states(4), case.states(4)
    backend = TritonBackend(shape, torch.float32, CPU)
    metadata = backend.padding(tokens + 3, len(counts) + 2, decodes_only=tokens == len(counts))
    batch, begin, segments = backend.over(metadata), 0, []
    for slot, count in enumerate(counts, 1):
        segments.append(Segment(begin, begin + count, slot, fresh=True))
        begin += count
    before = [Segment(0, tokens + 3, 0, fresh=True)]
    if tokens == len(counts):
        before = [Segment(n, n + 1, 0, fresh=True) for n in range(len(counts) + 2)]
    for given in (before, segments):  # what stood there before is gone
        metadata.packed.copy_(torch.from_numpy(metadata.numbers(given)))
    out = batch.run(case.given, case.weights, cache)
    expected = backend.batch(segments).run(case.part(0, tokens), case.weights, alone)
    assert torch.equal(out[:tokens], expected)
    for one, other in zip(cache.tensors, alone.tensors, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_a_kernel_that_does_not_run_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = TritonBackend(SHAPES[0], torch.float32, CPU)
    assert runs(backend, SHAPES[0], torch.float32, CPU)
    monkeypatch.setattr("llm_service.layers.gpu.kda_kernels.kda_step_kernel", None)
    assert not runs(backend, SHAPES[0], torch.float32, CPU)
