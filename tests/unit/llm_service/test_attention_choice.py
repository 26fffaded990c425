"""Which back end of attention is chosen, what its trial and its warming up do, and how flash-attn is called."""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from typing import Any

import pytest
import torch

from common.checkpoints.checkpoint import CheckpointError
from llm_service.families.sight import Sight, SpanRule
from llm_service.layers.attention import flash_backend, triton_backend
from llm_service.layers.attention.backend import AttentionKind, CacheShape
from llm_service.layers.attention.choose import choose, runs
from llm_service.layers.attention.metadata import AttentionMetadata, WorkList
from llm_service.layers.attention.triton_backend import TritonBackend, TritonBatch
from llm_service.layers.cpu import selection
from llm_service.settings import CacheDtype
from testkit.attention_cases import CAPPED, CPU, WAYS, Case, latents_of, shape_of
from testkit.plain_attention import paged_attention


@pytest.mark.parametrize("name", ["triton", "numba"])
def test_warming_up_touches_nobodys_block_alone(name: str) -> None:
    shape = shape_of()
    cache = torch.full_like(shape.new_cache(torch.float32, CPU)[0], 7.0)
    backend: Any = choose(name, shape, torch.float32, CPU)
    backend.warm_up(cache)
    assert (cache[:, :-1] == 7.0).all()
    assert (cache[:, -1, :2] == 0.0).all()


def test_the_best_that_is_here_is_chosen_and_what_is_not_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = shape_of()
    if selection.computes_bfloat16():
        assert choose("auto", shape, torch.bfloat16, CPU).name == "numba"
    monkeypatch.setattr(selection, "multiplies_bfloat16", lambda: False)
    assert choose("auto", shape, torch.float32, CPU).name == "numba"
    assert choose("auto", shape, torch.bfloat16, CPU).name == "torch"
    with monkeypatch.context() as patched:
        patched.setattr(selection, "_state", selection._State())
        selection.leave_to_torch()
        assert choose("auto", shape, torch.float32, CPU).name == "torch"
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
        for kind in (AttentionKind(), AttentionKind(Sight(window=9), scale=0.2), CAPPED):
            shape = replace(shape_of(), block_size=block_size, kind=kind)
            Case.random(shape, WAYS["mixed"], torch.float32, 2).check(flash_backend.FlashBackend(shape, CPU, compute))
        spanned = replace(shape, kind=AttentionKind(Sight(spans=SpanRule.EVERYWHERE)))
        case = Case.random(spanned, (1, 40), torch.float32, 2)
        case.check(flash_backend.FlashBackend(spanned, CPU, compute), [(3, 30)])
    assert flash_backend.find(16) is None, "version 2 reads pages of 256 alone"


def test_keys_and_values_are_written_for_flash_attn_as_torch_writes_them() -> None:
    shape = shape_of()
    key, value = (torch.randn(3, 3 * shape.kv_heads, shape.head_dim)[:, : shape.kv_heads] for _ in range(2))
    slots, caches = torch.tensor([5, 0, 33], dtype=torch.int32), []
    for device, store in (("cpu", flash_backend._store_by_torch), ("cuda", triton_backend.store)):
        assert flash_backend._store_on(torch.device(device)) is store
        caches.append(shape.new_cache(torch.float32, CPU)[0].zero_())
        store(key, value, caches[-1], slots)
    assert torch.equal(*caches)


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
    kind = AttentionKind(Sight(before + 1), scale=softmax_scale, softcap=softcap)
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


@pytest.mark.parametrize("kept", CacheDtype)
@pytest.mark.parametrize("kind", [AttentionKind(), AttentionKind(Sight(window=9)), CAPPED], ids=["all", "near", "cap"])
def test_a_back_end_passes_for_whatever_it_is_made_for(kind: AttentionKind, kept: CacheDtype) -> None:
    assert runs("triton", CacheShape(2, 100, 16, 4, 2, 64, kind, kept=kept), torch.float32, CPU)


def test_latents_pass() -> None:
    assert runs("triton", latents_of(), torch.float32, CPU)


@pytest.mark.parametrize("count", [1, 150], ids=["a token", "a prompt"])
def test_one_whose_numbers_are_wrong_does_not(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a compiler makes wrong code of a kernel for one kind of GPU."""
    attend = TritonBatch.attend

    def wrong(self: TritonBatch, query: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        out = attend(self, query, *given)
        if len(query) == count:
            out[-1, 0] = torch.nan
        return out

    monkeypatch.setattr(TritonBatch, "attend", wrong)
    assert not runs("triton", CacheShape(2, 100, 16, 4, 2, 64), torch.float32, CPU)


def test_a_trial_for_which_memory_is_short_says_nothing_of_a_back_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(TritonBatch, "attend", full)
    with pytest.raises(torch.OutOfMemoryError):
        runs("triton", CacheShape(2, 100, 16, 4, 2, 64), torch.float32, CPU)
