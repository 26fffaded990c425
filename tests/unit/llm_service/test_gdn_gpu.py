"""The gated delta net by Triton's kernels in their interpreter, whose products know no bfloat16, and by what stands in
for flash-linear-attention."""

from __future__ import annotations

import itertools
import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from llm_service.layers.cache_spec import Segment
from llm_service.layers.gdn import fla_rule
from llm_service.layers.gdn.backend import GdnShape
from llm_service.layers.gdn.metadata import NOBODY, GdnMetadata
from llm_service.layers.gdn.triton_backend import TritonBackend
from tests import gdn_cases
from tests.gdn_cases import Case

CPU = torch.device("cpu")
SHAPES = (GdnShape(1, 2, 32, 16), GdnShape(2, 2, 24, 48, width=3))
COUNTS = ((1, 1), (1, 130, 65, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sequences_of_a_batch_are_transformers_one_by_one(
    shape: GdnShape, counts: tuple[int, ...], dtype: torch.dtype
) -> None:
    gdn_cases.check(TritonBackend(shape, dtype, CPU), Case.drawn(shape, sum(counts), dtype), counts)


def test_equal_keys_that_nothing_fades_are_exact_enough() -> None:
    case = Case.drawn(SHAPES[0], 128, torch.float32)
    case.alike()
    gdn_cases.check(TritonBackend(SHAPES[0], torch.float32, CPU), case, [128])


def test_a_step_that_is_padding_touches_nothing() -> None:
    case = Case.drawn(SHAPES[0], 3, torch.float32)
    cache, alone = case.states(2), case.states(2)
    backend = TritonBackend(SHAPES[0], torch.float32, CPU)
    metadata = GdnMetadata.of([Segment(row, row + 1, 1, fresh=True) for row in range(3)], CPU)
    metadata.steps[1:, 1] = NOBODY
    out = backend.over(metadata).run(case.given, case.weights, cache)
    expected = backend.batch([Segment(0, 1, 1, fresh=True)]).run(case.part(0, 1), case.weights, alone)
    assert torch.equal(out[:1], expected)
    for one, other in zip(cache.tensors, alone.tensors, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_library_gets_packed_runs_as_it_wants_them(shape: GdnShape, monkeypatch: pytest.MonkeyPatch) -> None:
    library = ModuleType("fla.ops.gated_delta_rule")
    library.chunk_gated_delta_rule = packed  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", library)
    rule, counts = fla_rule.find(shape), (1, 70, 1, 5)
    assert rule is not None
    case = Case.drawn(shape, sum(counts), torch.float16)
    gdn_cases.check(TritonBackend(shape, torch.float16, CPU, rule), case, counts)


def test_where_the_library_is_missing_the_kernels_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", None)
    assert fla_rule.find(SHAPES[0]) is None


def packed(q: Tensor, k: Tensor, v: Tensor, **given: object) -> tuple[Tensor, Tensor]:
    """As the library's: [1, tokens, heads, size] of several sequences, of which `cu_seqlens` says where they begin."""
    starts, initial = given.pop("cu_seqlens"), given.pop("initial_state")
    assert isinstance(starts, Tensor)
    assert isinstance(initial, Tensor)
    g, beta = given.pop("g"), given.pop("beta")
    assert q.shape[2] == v.shape[2]
    assert given == {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    assert initial.isfinite().all()
    parts = []
    for index, (begin, end) in enumerate(itertools.pairwise(starts.tolist())):
        one = slice(begin, end)
        tokens = (each[:, one] for each in (q, k, v, g, beta))  # type: ignore[index]
        parts.append(
            gdn_cases.theirs.torch_chunk_gated_delta_rule(*tokens, initial_state=initial[index : index + 1], **given)
        )
    return torch.cat([read for read, _ in parts], dim=1), torch.cat([state for _, state in parts])
