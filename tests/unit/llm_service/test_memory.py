"""How much memory the KV cache gets: from an option, or from what the largest step leaves free."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.llm_device import config_of
from common.checkpoints.checkpoint import CheckpointError
from common.shm.arena import SharedBuffer
from llm_service.layers.tensor_parallel import ALONE, TensorGroup
from llm_service.models.decoder import Decoder
from llm_service.plan import RowSlice
from llm_service.settings import EngineSettings
from llm_service.worker.dummy_plans import largest_step
from llm_service.worker.load import _compile
from llm_service.worker.memory import (
    available_memory,
    block_count,
    cache_budget,
    host_block_count,
    slot_count,
    snapshot_count,
)

BLOCK = 1 << 20


def settings(**given: Any) -> EngineSettings:
    """Everything that is not given is as small as can be."""
    fields = dict.fromkeys(EngineSettings.__struct_fields__, 0)
    return EngineSettings(**{**fields, "block_size": 16, "max_running": 4, "max_step_tokens": 64, **given})


def count(free: int, group: TensorGroup = ALONE, *, gpu: bool = False, **given: Any) -> int:
    asked = settings(**given)
    return block_count(asked, BLOCK, cache_budget(asked, free, gpu=gpu), 4096, group)


def test_the_cache_is_a_share_of_what_is_free() -> None:
    assert count(100 * BLOCK) == 40
    assert count(100 * BLOCK, gpu=True) == 90
    assert count(100 * BLOCK, kv_memory_share=0.25, gpu=True) == 25


def test_a_size_that_is_given_is_taken_whatever_is_free() -> None:
    assert count(0, kv_cache_bytes=7 * BLOCK + 1) == 7


def test_it_is_no_larger_than_all_that_may_run_at_once_can_fill() -> None:
    assert count(10_000 * BLOCK) == 4 * 4096 // 16


def test_no_room_for_one_block_is_told_and_says_how_large_one_is() -> None:
    with pytest.raises(CheckpointError, match=f"too little memory is free .* {BLOCK} bytes"):
        count(2 * BLOCK)
    with pytest.raises(CheckpointError, match="--kv-cache-bytes is too small"):
        count(100 * BLOCK, kv_cache_bytes=BLOCK - 1)


def test_ranks_agree_on_what_the_poorest_of_them_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorGroup, "all_reduce_min", lambda self, number: min(number, 12))
    assert count(100 * BLOCK, TensorGroup(0, 2)) == 12


def test_the_host_keeps_as_many_blocks_as_its_memory_holds_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = settings(kv_host_bytes=20 * BLOCK + 1)
    assert host_block_count(settings(), BLOCK, 0, ALONE) == 0
    assert host_block_count(asked, BLOCK, 0, ALONE) == 20
    with pytest.raises(CheckpointError, match=f"--kv-host-bytes is too small .* {20 * BLOCK + 2} bytes"):
        host_block_count(asked, 20 * BLOCK + 2, 0, ALONE)
    with pytest.raises(CheckpointError, match="layers keep states"):
        host_block_count(asked, BLOCK, 1, ALONE)
    monkeypatch.setattr(TensorGroup, "all_reduce_min", lambda self, number: min(number, 12))
    assert host_block_count(asked, BLOCK, 0, TensorGroup(0, 2)) == 12


def test_on_a_cpu_what_the_host_keeps_is_not_free_for_the_cache() -> None:
    assert count(100 * BLOCK, kv_host_bytes=50 * BLOCK) == 20
    assert count(100 * BLOCK, kv_host_bytes=50 * BLOCK, gpu=True) == 90


def test_on_a_cpu_what_the_host_has_taken_of_its_blocks_already_is_not_free_and_not_taken_once_more() -> None:
    """The front takes the memory while the model is loaded, and a new engine finds all of it taken."""
    memory = SharedBuffer.create("kv blocks", 2 * 50 * BLOCK)
    asked = {"kv_host_bytes": 50 * BLOCK, "kv_host_fd": memory.fd, "tensor_parallel": 2}
    try:
        assert count(100 * BLOCK, **asked) == 20
        memory.view[: 2 * 20 * BLOCK] = bytes(2 * 20 * BLOCK)  # each of two ranks has 20 blocks less that are free
        assert count(80 * BLOCK, **asked) == 20
        memory.view[:] = bytes(memory.size)
        assert count(50 * BLOCK, **asked) == 20
    finally:
        memory.close()


def test_every_sequence_that_may_run_has_a_state_slot_where_half_of_the_budget_holds_them() -> None:
    assert slot_count(settings(), 0, 0, ALONE) == 0
    assert slot_count(settings(), BLOCK, 100 * BLOCK, ALONE) == 4
    assert slot_count(settings(), BLOCK, 7 * BLOCK, ALONE) == 3
    with pytest.raises(CheckpointError, match=f"the state of one sequence takes {BLOCK} bytes"):
        slot_count(settings(), BLOCK, 2 * BLOCK - 1, ALONE)


def test_snapshots_have_their_share_and_no_more_than_can_be_of_use() -> None:
    asked = settings(snapshot_share=0.5, prefix_cache=True)
    assert snapshot_count(asked, BLOCK, 9 * BLOCK, ALONE) == 4
    assert snapshot_count(asked, BLOCK, 1000 * BLOCK, ALONE) == 16 * 4
    assert snapshot_count(asked, 0, 100 * BLOCK, ALONE) == 0, "no layer has states"
    assert snapshot_count(settings(snapshot_share=0.5), BLOCK, 100 * BLOCK, ALONE) == 0, "nothing is cached"
    drafting = settings(snapshot_share=0.5, speculative_tokens=4)
    assert snapshot_count(drafting, BLOCK, 100 * BLOCK, ALONE) == 4, "states are set aside before drafts"


def test_the_largest_step_is_as_large_as_the_limits_allow() -> None:
    plan, blocks = largest_step(settings(max_running=4, max_step_tokens=64, row_arena_bytes=6400), 128)
    assert plan.tokens == 64
    assert len(plan.positions) == 3 * len(plan.token_ids)
    assert [chunk.count for chunk in plan.chunks] == [1, 1, 1, 61]
    assert plan.rows == [RowSlice(3, 0, 50)], "as many as the arena holds"
    assert largest_step(settings(max_running=4, max_step_tokens=32, row_arena_bytes=6400), 128)[0].rows[0].count == 29
    assert len(plan.draws) == 4
    assert all(draw.alters for draw in plan.draws)
    tables = {each.row: array("i", each.blocks).tolist() for each in plan.appended}
    assert sorted(block for table in tables.values() for block in table) == list(range(blocks))
    assert all(len(tables[chunk.row]) * 16 >= chunk.count for chunk in plan.chunks)


def test_layers_are_compiled_on_gpus_and_for_one_rank_alone() -> None:
    with pytest.raises(CheckpointError, match="--compile is for GPUs"):
        _compile(None, ALONE, torch.device("cpu"))  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="--compile is for one rank"):
        _compile(None, TensorGroup(0, 2), torch.device("cuda:0"))  # type: ignore[arg-type]


def test_torch_compiles_all_kinds_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own limit it would leave some of a hybrid model's as they are."""
    import torch._dynamo  # takes a second

    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 8)
    monkeypatch.setattr(torch, "compile", lambda part, **_: part)
    decoder = Decoder(config_of(2, experts=False, tiny=True), ALONE, torch.float32, torch.device("cpu"))
    decoder.compile_layers()
    assert torch._dynamo.config.recompile_limit > 8


def test_a_control_groups_limit_counts_where_it_is_the_tighter_one(tmp_path: Path) -> None:
    proc = tmp_path / "meminfo"
    proc.write_text("MemTotal:       2000 kB\nMemAvailable:   1000 kB\n")
    assert available_memory(proc, tmp_path) == 1000 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("5000\n")
    assert available_memory(proc, tmp_path) == 1000 * 1024
    (tmp_path / "memory.max").write_text("105000\n")
    assert available_memory(proc, tmp_path) == 100_000
    (tmp_path / "memory.current").write_text("200000\n")
    assert available_memory(proc, tmp_path) == 0
