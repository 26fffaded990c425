"""Kimi Delta Attention with Triton's kernel in its interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from llm_service.layers.cache_spec import Segment
from llm_service.layers.kda.backend import KdaShape
from llm_service.layers.kda.choose import runs
from llm_service.layers.kda.triton_backend import TritonBackend
from tests import gdn_cases
from tests.kda_cases import Case

CPU = torch.device("cpu")
SHAPES = (KdaShape(2, 16), KdaShape(3, 24, width=3))


@pytest.mark.parametrize("counts", [(1, 1, 1), (1, 65, 2)], ids=str)
@pytest.mark.parametrize(
    ("shape", "least", "dtype"), [*zip(SHAPES, (-5.0, None), (torch.float32, torch.float16), strict=True)], ids=str
)
def test_sequences_of_a_batch_are_transformers_one_by_one(
    shape: KdaShape, least: float | None, dtype: torch.dtype, counts: tuple[int, ...]
) -> None:
    gdn_cases.check(TritonBackend(shape, CPU), Case.drawn(shape, sum(counts), dtype, least), counts)


def test_states_that_a_run_passes_are_copied() -> None:
    gdn_cases.check_copies(TritonBackend(SHAPES[0], CPU), Case.drawn(SHAPES[0], 270, torch.float32))


def test_padding_touches_nothing() -> None:
    shape, backend = SHAPES[0], TritonBackend(SHAPES[0], CPU)
    case = Case.drawn(shape, 6, torch.float32)
    cache, alone = case.states(4), case.states(4)
    metadata = backend.padding(6, 5, decodes_only=True)
    batch, segments = backend.over(metadata), [Segment(n, n + 1, n + 1, fresh=True) for n in range(3)]
    for given in ([Segment(n, n + 1, 0, fresh=True) for n in range(5)], segments):  # what stood there before is gone
        metadata.packed.copy_(torch.from_numpy(metadata.numbers(given)))
    out = batch.run(case.given, case.weights, cache)
    assert torch.equal(out[:3], backend.batch(segments).run(case.part(0, 3), case.weights, alone))
    for one, other in zip(cache.tensors, alone.tensors, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_a_kernel_that_does_not_run_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = TritonBackend(SHAPES[0], CPU)
    assert runs(backend, SHAPES[0], torch.float32, CPU)
    monkeypatch.setattr("llm_service.layers.kda.triton_backend.kda_step_kernel", None)
    assert not runs(backend, SHAPES[0], torch.float32, CPU)
