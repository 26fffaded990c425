"""The gated delta net by Triton's kernels in their interpreter, and by what stands in for flash-linear-attention."""

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
from llm_service.layers.gdn.triton_backend import TritonBackend
from testkit import gdn_cases
from testkit.gdn_cases import Case

CPU = torch.device("cpu")
SHAPES = (GdnShape(1, 2, 32, 16), GdnShape(2, 2, 24, 48, width=3))
COUNTS = ((1, 1), (1, 130, 65, 2))


@pytest.mark.parametrize(
    ("shape", "dtype", "counts"),
    [
        *((SHAPES[0], torch.float16, counts) for counts in COUNTS),
        *((SHAPES[1], torch.float32, counts) for counts in COUNTS),
        (SHAPES[0], torch.bfloat16, COUNTS[1]),
        pytest.param(GdnShape(2, 4, 128, 128), torch.float32, gdn_cases.COUNTS[2], marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_sequences_of_a_batch_are_transformers_one_by_one(
    shape: GdnShape, dtype: torch.dtype, counts: tuple[int, ...]
) -> None:
    gdn_cases.check(TritonBackend(shape, dtype, CPU), Case.drawn(shape, sum(counts), dtype), counts)


def test_equal_keys_that_nothing_fades_are_exact_enough() -> None:
    case = Case.drawn(SHAPES[0], 128, torch.float32)
    case.alike()
    gdn_cases.check(TritonBackend(SHAPES[0], torch.float32, CPU), case, [128])


@pytest.mark.parametrize("counts", [(1, 66, 5), (1, 1, 1)], ids=str)
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


def test_states_that_a_run_passes_are_copied() -> None:
    gdn_cases.check_copies(TritonBackend(SHAPES[0], torch.float32, CPU), Case.drawn(SHAPES[0], 270, torch.float32))


def test_the_library_gets_packed_runs_as_it_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    library = ModuleType("fla.ops.gated_delta_rule")
    library.chunk_gated_delta_rule = packed  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", library)
    shape, counts = SHAPES[0], (1, 70, 1, 5)
    rule = fla_rule.find(shape)
    assert rule is not None
    case = Case.drawn(shape, sum(counts), torch.float16)
    backend = TritonBackend(shape, torch.float16, CPU, rule)
    gdn_cases.check(backend, case, counts)
    gdn_cases.check_copies(backend, Case.drawn(shape, 270, torch.float16))


def test_where_the_library_is_missing_the_kernels_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", None)
    assert fla_rule.find(SHAPES[0]) is None


def packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As the library's (of 0.6, the arguments that there are in older ones too, and the lengths on the host): [1,
    tokens, heads, size] of several sequences, of which `cu_seqlens` says where they begin."""
    assert scale is None
    assert output_final_state
    assert use_qk_l2norm_in_kernel
    assert q.shape[2] == v.shape[2]
    assert initial_state is not None
    assert initial_state.isfinite().all()
    assert cu_seqlens is not None
    assert cu_seqlens_cpu is not None, "the library would wait for the device"
    assert torch.equal(cu_seqlens, cu_seqlens_cpu)
    parts = []
    for index, (begin, end) in enumerate(itertools.pairwise(cu_seqlens_cpu.tolist())):
        tokens = (each[:, begin:end] for each in (q, k, v, g, beta))
        parts.append(
            gdn_cases.theirs.torch_chunk_gated_delta_rule(
                *tokens,
                initial_state=initial_state[index : index + 1],
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )
        )
    return torch.cat([read for read, _ in parts], dim=1), torch.cat([state for _, state in parts])
