"""Attention back ends of the vision towers: all give the same result, and what cannot run says why."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from common.cpu import pair_attention, tile_attention
from common.cpu.compiling import Readiness
from common.cpu.jit import use_threads
from common.cpu.pair_attention import PairAttention
from common.cpu.tile_attention import TiledAttention
from common.hardware import multiplies_tiles
from encoder_service.models import attention, row_kernels
from encoder_service.models.attention import (
    AttentionUnavailable,
    Flash,
    Numba,
    Sdpa,
    Triton,
    candidates,
    capturable,
    choose,
    flash_segments,
    runs,
)

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_row_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a back end selects is forgotten after the test."""
    for name in ("kernels", "blocks"):
        monkeypatch.setattr(row_kernels._state, name, None)


SEGMENTS = st.lists(st.integers(1, 90), min_size=1, max_size=6)


def drawn(count: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randn(count, 3, 2, 16, generator=generator).unbind(1))


def plain(parts: list[torch.Tensor], lengths: list[int]) -> torch.Tensor:
    """Segment by segment."""
    out = []
    for q, k, v in zip(*(part.split(lengths) for part in parts), strict=True):
        weights = (torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5).softmax(-1)
        out.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(out)


@settings(max_examples=20, deadline=None)
@given(SEGMENTS, st.integers(0, 2**31))
@pytest.mark.parametrize("backend", [Sdpa(), Triton()], ids=lambda each: each.name)
def test_any_segments_equal_plain_torch(backend, lengths, seed):
    parts = drawn(sum(lengths), seed)
    ours = backend.over(lengths, CPU)(*parts)
    torch.testing.assert_close(ours, plain(parts, lengths), rtol=1e-5, atol=1e-5)


SHORT = pytest.mark.skipif(
    attention._obstacle("numba", CPU, torch.bfloat16, wanted=True) != "", reason="this processor lacks AVX512-BF16"
)


@pytest.fixture(params=["pairs", "tiles"])
def numba(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Numba:
    """Our kernels for CPUs, by pairs or by tiles."""
    if request.param == "tiles" and not multiplies_tiles():
        pytest.skip("this processor lacks AMX")
    monkeypatch.setattr(attention, "multiplies_tiles", lambda: request.param == "tiles")
    return Numba(wait=True)


def in_short(lengths: list[int], heads: int, dim: int) -> list[torch.Tensor]:
    """Queries and keys as rotary positions leave them, and values as a part of what is beside them."""
    generator = torch.Generator().manual_seed(dim)
    heads_of_all = torch.randn(sum(lengths), 3 * heads, dim, generator=generator).bfloat16()
    return [*heads_of_all[:, : 2 * heads].clone().chunk(2, dim=1), heads_of_all[:, 2 * heads :]]


@SHORT
@pytest.mark.parametrize("dim", [4, 16, 36, 64, 72, 80, 96, 128, 160])
def test_our_kernel_for_cpus_is_no_further_off_than_torch_s(dim: int, numba: Numba) -> None:
    lengths = [5, 130, 64, 64, 1, 257, 300]
    parts = in_short(lengths, 3, dim)
    ours, theirs = (backend.over(lengths, CPU)(*parts) for backend in (numba, Sdpa()))
    exact = plain([part.float() for part in parts], lengths)
    assert ours.dtype == torch.bfloat16
    assert (ours - exact).pow(2).mean().sqrt() <= 1.01 * (theirs - exact).pow(2).mean().sqrt()
    torch.testing.assert_close(ours.float(), exact, rtol=2e-2, atol=2e-2)


@SHORT
def test_our_kernel_for_cpus_gives_the_same_bits_in_any_company_and_on_any_number_of_threads(numba: Numba) -> None:
    lengths, known = [40, 333, 64], torch.get_num_threads()
    parts = in_short(lengths, 2, 72)
    together = numba.over(lengths, CPU)(*parts)
    try:
        use_threads(1)
        each = zip(*(part.split(lengths) for part in parts), strict=True)
        alone = [numba.over([len(q)], CPU)(q, k, v) for q, k, v in each]
    finally:
        use_threads(known)
    assert torch.cat(alone).equal(together)


@SHORT
def test_heads_may_lie_in_any_order_without_a_further_kernel(numba: Numba) -> None:
    """One that nobody compiled before would be in the midst of a batch."""
    lengths = [40, 70]
    parts = [part.contiguous() for part in in_short(lengths, 2, 64)]
    turned = [part.transpose(0, 1).contiguous().transpose(0, 1) for part in parts]
    attend = numba.over(lengths, CPU)
    expected = attend(*parts)
    assert attend(*turned).equal(expected)
    assert attend(parts[0], *turned[1:]).equal(expected)
    for typed in (*pair_attention.TYPED.values(), *tile_attention.TYPED.values()):
        assert {tuple(types) for types in typed.kernel.overloads} <= {typed.types}


@SHORT
def test_what_is_not_a_number_stays_in_its_segment_and_high_scores_do_not_overflow(numba: Numba) -> None:
    lengths = [30, 300, 70]
    q, k, v = in_short(lengths, 2, 64)
    v[10, 0, 3] = torch.nan
    out = numba.over(lengths, CPU)(100 * q, k, v)
    assert out[:30, 0, 3].isnan().all()
    assert out[30:].isfinite().all()
    torch.testing.assert_close(
        out[30:], Sdpa().over(lengths[1:], CPU)(100 * q[30:], k[30:], v[30:]), rtol=0.1, atol=0.1
    )


@SHORT
def test_torch_computes_until_our_kernels_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    process = SimpleNamespace(readiness=Readiness.WAITING)
    monkeypatch.setattr(attention, "not_kept", list)
    monkeypatch.setattr(attention, "Compilation", lambda names: process if names else None)
    backend, parts = Numba(), in_short([90], 2, 64)
    assert backend.over([90], CPU)(*parts).equal(Sdpa().over([90], CPU)(*parts))
    process.readiness = Readiness.FAILED
    assert not isinstance(backend.over([90], CPU), PairAttention)
    process.readiness = Readiness.THERE
    assert isinstance(backend.over([90], CPU), PairAttention)


@SHORT
@pytest.mark.parametrize("name", ["auto", "numba"])
def test_our_kernels_are_waited_for_where_that_is_wanted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(attention, "not_kept", lambda names: names[:1])
    monkeypatch.setattr("common.cpu.jit.compile_all", made.extend)
    monkeypatch.setattr(attention, "Compilation", lambda _: pytest.fail("another process compiles"))
    monkeypatch.setitem(attention.BACKENDS, "numba", Numba)
    with capture_logs() as lines:
        backend = choose(name, CPU, torch.bfloat16, 64, "wait")
    assert isinstance(backend, Numba)
    assert isinstance(backend.over([90], CPU), (PairAttention, TiledAttention))
    assert len(made) == 1
    assert [(line["event"], line["kernels"]) for line in lines] == [("our kernels are compiled before this serves", 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_can_be_all_that_computes_on_a_cpu(dtype: torch.dtype) -> None:
    assert choose("auto", CPU, dtype, 64, "torch").name == "sdpa"
    assert [backend.name for backend in capturable("auto", CPU, dtype, 64, "torch")] == ["sdpa"]


@settings(max_examples=10, deadline=None)
@given(st.lists(SEGMENTS, min_size=2, max_size=4))
def test_stable_segments_can_be_filled_again_and_again(cuts):
    stable = Triton().stable(640, 640, CPU)
    table = stable._table.data_ptr()
    for seed, lengths in enumerate(cuts):
        parts = drawn(sum(lengths), seed)
        assert stable.holds(lengths)
        stable.fill(stable.table(lengths))
        torch.testing.assert_close(stable(*parts), plain(parts, lengths), rtol=1e-5, atol=1e-5)
    assert stable._table.data_ptr() == table


def test_stable_segments_say_what_they_have_no_room_for():
    stable = Triton().stable(256, 256, CPU)
    assert stable.holds([16] * 16)
    assert not stable.holds([4] * 64)


def test_torch_s_own_attention_has_no_stable_form():
    assert Sdpa().stable(64, 64, CPU) is None


def test_neighbours_of_one_length_go_together():
    assert runs([4, 4, 4, 6, 4]) == [(3, 4), (1, 6), (1, 4)]


@pytest.mark.parametrize(
    ("name", "device", "dtype", "why"),
    [
        ("flash", "cpu", torch.float32, "--attention flash: it needs a GPU"),
        ("numba", "cuda", torch.bfloat16, "--attention numba: it needs a CPU with AVX512-BF16"),
        pytest.param("numba", "cpu", torch.float32, "--attention numba: it needs bfloat16", marks=SHORT),
        ("flash", "cuda", torch.float32, "--attention flash: it needs bfloat16 or float16"),
        ("flash3", "cuda", torch.bfloat16, "--attention flash3: flash-attn 3 cannot be imported"),
    ],
)
def test_a_back_end_that_cannot_run_is_refused_by_name(name, device, dtype, why):
    with pytest.raises(AttentionUnavailable, match=why):
        choose(name, torch.device(device), dtype, 64)


def test_triton_is_refused_where_there_is_neither_a_gpu_nor_the_interpreter(monkeypatch):
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    with pytest.raises(AttentionUnavailable, match="--attention triton: it needs a GPU"):
        choose("triton", CPU, torch.float32, 64)


def test_what_is_not_installed_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(attention.importlib.util, "find_spec", lambda _: None)
    for name, why in (("triton", "triton is not installed"), ("flash", "neither flash-attn")):
        with pytest.raises(AttentionUnavailable, match=why):
            choose(name, torch.device("cuda"), torch.bfloat16, 64)


@pytest.mark.parametrize(
    ("device", "dtype", "names"),
    [
        ("cpu", torch.float32, ["sdpa"]),
        pytest.param("cpu", torch.bfloat16, ["numba", "sdpa"], marks=SHORT),
        ("cuda", torch.float32, ["triton", "sdpa"]),
        ("cuda", torch.bfloat16, ["flash", "triton", "sdpa"]),
    ],
)
def test_auto_has_an_order_of_preference(device, dtype, names):
    assert candidates(torch.device(device), dtype) == names


class Wrong(Sdpa):
    """Has forgotten the values."""

    name = "flash"

    def over(self, lengths, device):
        return lambda q, k, v: torch.zeros_like(v)


class Broken(Sdpa):
    """Was built for another driver."""

    name = "triton"

    def over(self, lengths, device):
        raise RuntimeError("no kernel image is available")


class Missing(Sdpa):
    """Is a package that was built for another torch."""

    name = "flash"

    def __init__(self):
        raise ImportError("undefined symbol")


class Right(Sdpa):
    """Another sdpa."""

    name = "triton"


class Other(Sdpa):
    """And one more."""

    name = "flash"


@pytest.mark.parametrize(
    ("first", "second", "chosen"),
    [(Wrong, Broken, "sdpa"), (Broken, Right, "triton"), (Right, Wrong, "triton"), (Missing, Right, "triton")],
)
def test_auto_passes_over_what_fails_its_trial(monkeypatch, first, second, chosen):
    monkeypatch.setattr(attention, "BACKENDS", {"flash": first, "triton": second, "sdpa": Sdpa})
    monkeypatch.setattr(attention, "_obstacle", lambda *_, **__: "")
    assert choose("auto", CPU, torch.float32, 16).name == chosen


def test_one_that_is_asked_for_and_cannot_be_imported_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(attention, "BACKENDS", {"flash": Missing, "sdpa": Sdpa})
    monkeypatch.setattr(attention, "_obstacle", lambda *_, **__: "")
    with pytest.raises(AttentionUnavailable, match="--attention flash: undefined symbol"):
        choose("flash", CPU, torch.float32, 16)


@pytest.mark.parametrize(
    "package",
    ["raise ImportError('undefined symbol')", "raise OSError('undefined symbol')", "__version__ = '4.0'"],
)
def test_a_flash_attn_that_is_of_no_use_gives_way_to_torch_s(package, monkeypatch, tmp_path):
    (tmp_path / "flash_attn.py").write_text(package)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    assert Flash()._run is varlen.varlen_attn
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)


def test_in_graphs_our_own_kernel_is_the_first_of_all_that_pass_their_trial(monkeypatch):
    monkeypatch.setattr(attention, "BACKENDS", {"flash3": Wrong, "flash": Other, "triton": Right, "sdpa": Sdpa})
    monkeypatch.setattr(attention, "_obstacle", lambda *_, **__: "")
    assert choose("auto", CPU, torch.float32, 16).name == "flash"
    assert [each.name for each in capturable("auto", CPU, torch.float32, 16)] == ["triton", "flash", "sdpa"]
    named = [each.name for each in capturable("flash", CPU, torch.float32, 16)]
    assert named == ["flash"], "a name holds everywhere"


@pytest.mark.parametrize("sums", [False, True])
def test_the_third_version_is_asked_first_as_it_wants_to_be_called(sums, monkeypatch, tmp_path):
    """Its early releases return the sums of exponentials as well."""
    (tmp_path / "flash_attn_interface.py").write_text(
        "from tests.unit.encoder_service import test_attention as tests\n"
        "def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None,\n"
        "                           seqused_k=None, softmax_scale=None, causal=False, qv=None):\n"
        "    assert max_seqlen_q == max_seqlen_k and cu_seqlens_q is cu_seqlens_k\n"
        "    out = tests.plain([q, k, v], cu_seqlens_q.diff().tolist())\n"
        f"    return (out, None) if {sums} else out\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn_interface", raising=False)
    gpu = torch.device("cuda")
    assert candidates(gpu, torch.bfloat16)[0] == "flash3"
    lengths = [3, 40, 7]
    parts, backend = drawn(sum(lengths)), Flash("flash3")
    torch.testing.assert_close(backend.over(lengths, CPU)(*parts), plain(parts, lengths), rtol=1e-5, atol=1e-5)
    stable = backend.stable(64, 64, CPU)
    stable.fill(stable.table(lengths))
    torch.testing.assert_close(stable(*parts), plain(parts, lengths), rtol=1e-5, atol=1e-5)
    assert backend.stable(2048, 2048, CPU).holds([64] * 32), "a video's frame groups"
    monkeypatch.delitem(sys.modules, "flash_attn_interface", raising=False)


@pytest.mark.parametrize("patches", [64, 256, 1024, 2048, 4096, 16384])
def test_more_segments_of_a_smaller_graph_launch_no_more_programs_than_a_larger_one(patches):
    tiles = -(-patches // 128)
    assert flash_segments(patches, patches) >= min(16, patches // 16)
    assert flash_segments(patches, patches) * tiles <= max(512, 16 * tiles)
    assert flash_segments(patches, 64) == patches // 16, "windows"
