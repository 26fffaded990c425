"""How a rank gets its device: where its kernels start, what is told where it is too small, and what is captured."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from common.cpu import jit
from common.hf.description import HfModel
from common.hf.models import describe
from common.process.core_share import CoreShare
from common.shm.arena import SharedBuffer
from llm_service.layers.attention import flash_backend
from llm_service.layers.cache_spec import CacheSpec, IndexedKV, PagedKV
from llm_service.layers.lora.linear_adapters import AdapterKernel
from llm_service.layers.tensor_parallel import ALONE, TensorGroup
from llm_service.model_config.text import TextConfig
from llm_service.models.decoder import Decoder
from llm_service.plan import StepPlan, StepResult
from llm_service.settings import CacheDtype, EngineSettings
from llm_service.worker import adapters, load, load_adapters
from llm_service.worker.cache_dtype import check_small_cache
from llm_service.worker.dummy_plans import prompt_plan
from llm_service.worker.memory import Gauge
from llm_service.worker.messages import AddAdapter
from llm_service.worker.model_runner import ModelRunner
from testkit.local_engine import LocalEngine
from tests.adapters import make_adapter
from tools.models.tiny import make

SECOND = torch.device("cuda:1")
GIVEN = {"nodes": 1, "kernels": "wait", "hf": None}
SETTINGS = EngineSettings(**{**dict.fromkeys(EngineSettings.__struct_fields__, 0), **GIVEN})  # type: ignore[arg-type]


def test_a_rank_s_kernels_start_on_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", asked.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(load, "_load", lambda *_: list(asked))
    assert load.load_rank(SETTINGS, SECOND, ALONE, -1) == [SECOND], "before anything is loaded"
    load.load_rank(SETTINGS, torch.device("cpu"), ALONE, -1)
    assert asked == [SECOND]


def test_a_gpu_that_is_too_small_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_too_much(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nException raised from malloc")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("set_device", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda _: None)
    monkeypatch.setattr(load, "_load", load_too_much)
    with pytest.raises(CheckpointError) as caught:
        load.load_rank(SETTINGS, SECOND, ALONE, -1)
    assert str(caught.value) == "the GPU's memory is too small: CUDA out of memory. Tried to allocate 9 GiB."


@pytest.mark.parametrize(
    ("given", "group", "named"),
    [
        ({"compile": True}, ALONE, "--compile"),
        ({}, TensorGroup(1, 2, expert_parallel=True), "--enable-expert-parallel"),
    ],
)
def test_what_a_model_that_transformers_computes_does_not_have_is_refused_by_name(
    checkpoints: Callable[..., Path], given: dict[str, Any], group: TensorGroup, named: str
) -> None:
    found = HfModel(architecture="", hidden_size=8, vocab_size=8, max_position=8, placeholders={})
    settings = msgspec.structs.replace(SETTINGS, **{"attention": "auto", "hf": found, **given})
    with pytest.raises(CheckpointError, match=f"{named} is not for a model that transformers computes"):
        load._decoder(settings, Checkpoint(checkpoints("qwen3_vl")), torch.float32, torch.device("cpu"), group)


def test_a_model_without_a_family_whose_text_our_decoder_computes_has_what_a_family_has(tmp_path: Path) -> None:
    """Weights in 8 bits, and slots for an adapter, which is read for the shapes of the text's matrices."""
    folder, root = make("llava", tmp_path / "model"), tmp_path / "adapters"
    make_adapter(folder, root / "one", seed=1, modules=("q_proj", "down_proj"))
    found = describe(folder)
    sizes = {"block_size": 16, "max_running": 2, "max_step_tokens": 64, "row_arena_bytes": 1 << 20, "row_levels": 1}
    given = {"model": str(folder), "device": "cpu", "dtype": "float32", "attention": "auto", "graphs": "auto"}
    asked = {"weight_dtype": "int8", "max_loras": 1, "max_lora_rank": 4, "lora_dir": str(root), "base_names": ()}
    settings = msgspec.structs.replace(SETTINGS, hf=found, kv_cache_bytes=8 << 20, **given, **sizes, **asked)
    memory = SharedBuffer.create("test-rows", 1 << 20)
    rank = load.load_rank(settings, torch.device("cpu"), ALONE, memory.fd)
    assert rank.weights.bits == 8
    reader = load_adapters.adapter_reader(settings)
    assert reader is not None
    rank.runner.adapt(AddAdapter(1, reader("one")))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PaliGemma's processor
@pytest.mark.parametrize(
    ("kind", "asked", "tokens"),
    [
        ("gemma3", {"grows_steps": True}, 16 + 7),
        ("paligemma", {"grows_steps": True}, 16 + 512 + 7),
        ("gemma3", {}, 16),
        ("gemma3", {"grows_steps": True, "max_step_tokens": 100}, 100),
        ("llava", {"grows_steps": True}, 16),
    ],
)
def test_steps_have_room_for_what_is_computed_at_once_unless_their_size_was_asked_for(
    kind: str, asked: dict[str, Any], tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pictures have 16 rows; and what such a step needs is measured before the cache takes the rest."""
    folder, seen = make(kind, tmp_path), list[int]()
    monkeypatch.setattr(Gauge, "free", lambda _: 50 << 20)
    run = ModelRunner.run

    def watched(runner: ModelRunner, plan: StepPlan) -> StepResult:
        seen.append(plan.tokens)
        return run(runner, plan)

    monkeypatch.setattr(ModelRunner, "run", watched)
    sizes = {"block_size": 16, "max_running": 8, "max_step_tokens": 16, "row_arena_bytes": 1 << 20, "row_levels": 1}
    given = {"model": str(folder), "device": "cpu", "dtype": "float32", "attention": "auto", "graphs": "auto"}
    found = describe(folder)
    settings = msgspec.structs.replace(SETTINGS, hf=found, threads=1, **{**given, **sizes, **asked})
    memory = SharedBuffer.create("test-rows", 1 << 20)
    rank = load.load_rank(settings, torch.device("cpu"), ALONE, memory.fd)
    assert rank.max_step_tokens == tokens == max(seen)


def test_the_cache_is_a_share_of_what_is_free_when_the_largest_step_has_run(
    checkpoints: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, seen = checkpoints("qwen3_vl"), list[Any]()
    run = ModelRunner.run

    def watched(runner: ModelRunner, plan: StepPlan) -> StepResult:
        seen.append((plan.tokens, len(plan.draws)))
        return run(runner, plan)

    def free(_: Gauge) -> int:
        seen.append("measured")
        return 50 << 20

    monkeypatch.setattr(ModelRunner, "run", watched)
    monkeypatch.setattr(Gauge, "free", free)
    sizes = {"block_size": 16, "max_running": 8, "max_step_tokens": 64, "row_arena_bytes": 1 << 20, "row_levels": 3}
    given = {"model": str(folder), "device": "cpu", "dtype": "float32", "attention": "auto", "graphs": "auto"}
    settings = msgspec.structs.replace(SETTINGS, **given, **sizes, kv_memory_share=0.5, threads=1)
    memory = SharedBuffer.create("test-rows", 1 << 20)
    runner = load.load_rank(settings, torch.device("cpu"), ALONE, memory.fd).runner
    assert seen == [(1, 1), (64, 8), "measured"]  # one token first, for the kernels of few rows
    (kind,) = runner.caches.paged.values()
    assert runner.caches.blocks == (25 << 20) // (kind.shape.block_bytes(torch.float32)) < 8 * 4096 // 16


def test_a_cache_in_8_bits_holds_more_blocks(checkpoints: Callable[..., Path]) -> None:
    sizes = {"block_size": 16, "max_running": 2, "max_step_tokens": 64, "row_arena_bytes": 1 << 20, "row_levels": 3}
    given = {"model": str(checkpoints("qwen3_vl")), "device": "cpu", "dtype": "float32", "attention": "auto"}
    found = []
    for kept in CacheDtype:
        asked = {**given, **sizes, "kv_cache_bytes": 1 << 20, "threads": 1, "kv_cache_dtype": kept}
        memory = SharedBuffer.create("test-rows", 1 << 20)
        settings = msgspec.structs.replace(SETTINGS, **asked)
        runner = load.load_rank(settings, torch.device("cpu"), ALONE, memory.fd).runner
        (kind,) = runner.caches.paged.values()
        assert kind.cache.nbytes // (runner.caches.blocks + 1) == kind.shape.block_bytes(torch.float32)
        found.append((runner.caches.blocks, kind.shape.head_dim))
    (plain, head_dim), (short, _), (shortest, _) = found
    assert short == (1 << 20) // ((1 << 20) // plain * (head_dim + 4) // (4 * head_dim))
    assert shortest == 4 * plain


def test_the_host_keeps_blocks_where_it_is_told_to(checkpoints: Callable[..., Path]) -> None:
    sizes = {"block_size": 16, "max_running": 2, "max_step_tokens": 64, "row_arena_bytes": 1 << 20, "row_levels": 3}
    given = {"model": str(checkpoints("qwen3_vl")), "device": "cpu", "dtype": "float32", "attention": "auto"}
    asked = {**given, **sizes, "kv_cache_bytes": 1 << 20, "threads": 1}
    for bytes_ in (0, 3 << 20):
        memory = SharedBuffer.create("test-rows", 1 << 20)
        told = msgspec.structs.replace(SETTINGS, **asked, kv_host_bytes=bytes_)
        runner = load.load_rank(told, torch.device("cpu"), ALONE, memory.fd).runner
        (kind,) = runner.caches.paged.values()
        kept = runner.host_cache.count if runner.host_cache is not None else 0
        assert kept == bytes_ // kind.shape.block_bytes(torch.float32)


@pytest.mark.parametrize(
    ("specs", "named"),
    [
        ([PagedKV(4, 2, 64), IndexedKV(PagedKV(4, 2, 64), 32)], "choose tokens by an index"),
        ([PagedKV(4, 1, 40, values_in_keys=32)], "latent attention"),
        ([PagedKV(4, 2, 63)], "a multiple of 4 numbers"),
    ],
)
def test_caches_that_cannot_be_in_8_bits_are_refused(specs: list[CacheSpec], named: str) -> None:
    mixers = [SimpleNamespace(cache_spec=lambda spec=spec: spec) for spec in specs]
    decoder: Any = SimpleNamespace(mixers=lambda: mixers, keeps_small_cache=True)
    with pytest.raises(CheckpointError, match=named):
        check_small_cache(decoder, CacheDtype.INT8)


def test_latent_attention_keeps_no_e4m3() -> None:
    mixers = [SimpleNamespace(cache_spec=lambda: PagedKV(4, 1, 40, values_in_keys=32))]
    decoder: Any = SimpleNamespace(mixers=lambda: mixers, keeps_small_cache=True)
    with pytest.raises(CheckpointError, match="--kv-cache-dtype fp8 is not for latent attention"):
        check_small_cache(decoder, CacheDtype.FP8)


def test_a_rank_divides_the_cores_while_it_computes_and_looks_before_each_layer(
    checkpoints: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, used, looks = f"twinlens-test-{os.getpid()}", list[int](), list[CoreShare]()
    look = CoreShare.look

    def counted(share: CoreShare) -> None:
        looks.append(share)
        look(share)

    monkeypatch.setattr(jit, "use_threads", used.append)
    monkeypatch.setattr(CoreShare, "of_this_host", lambda _, use: CoreShare(name, 2, use))
    monkeypatch.setattr(CoreShare, "look", counted)
    sizes = {"block_size": 16, "max_running": 8, "max_step_tokens": 64, "row_arena_bytes": 1 << 20, "row_levels": 3}
    given = {"model": str(checkpoints("qwen3_vl")), "device": "cpu", "dtype": "float32", "attention": "auto"}
    settings = msgspec.structs.replace(SETTINGS, **given, **sizes, kv_cache_bytes=1 << 20, threads=1, core_share=True)
    memory, other = SharedBuffer.create("test-rows", 1 << 20), CoreShare(name, 2, int)
    runner = load.load_rank(settings, torch.device("cpu"), ALONE, memory.fd).runner
    assert runner.core_share is not None
    used.clear()
    plan = prompt_plan(1, settings.block_size)[0]
    with other.computing():
        looks.clear()
        runner.run(plan)
        assert used == [1]
        assert looks.count(runner.core_share) == 1 + TextConfig.of(Checkpoint(checkpoints("qwen3_vl")).config).layers
    runner.run(plan)
    assert used == [1, 2]
    with other.computing():
        assert other._used == 2, "between steps it holds no claim"
    other.close()
    runner.core_share.close()


def test_attention_whose_launches_depend_on_lengths_is_not_captured(checkpoints: Callable[..., Path]) -> None:
    runner = LocalEngine(checkpoints("qwen3_vl"), attention="torch").runner
    assert "--attention torch" in runner.not_capturable()
    assert LocalEngine(checkpoints("qwen3_vl"), attention="triton").runner.not_capturable() == ""


@pytest.mark.parametrize(("why", "others", "agreed"), [("", 1, True), ("", 0, False), ("torch computes", 1, False)])
def test_a_rank_has_graphs_where_every_rank_has_them(why: str, others: int, agreed: bool) -> None:
    """A trial of a kernel may end otherwise on another rank, which would not capture, and be waited for."""
    runner: Any = SimpleNamespace(not_capturable=lambda: why)
    group: Any = SimpleNamespace(all_reduce_min=lambda own: min(own, others))
    assert load._capturable(runner, group) == agreed


@pytest.mark.parametrize("others", [1, 0])
def test_our_kernels_add_adapters_where_they_do_on_every_rank(others: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llm_service.layers.gpu.row_kernels.run_on", lambda _: True)
    monkeypatch.setattr("llm_service.layers.gpu.lora_tiles.computes", lambda *_: True)
    group = SimpleNamespace(all_reduce_min=lambda own: min(own, others))
    decoder: Any = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16, group=group)
    assert adapters._kernel_for(decoder, 8) is (AdapterKernel.GPU if others else AdapterKernel.NONE)


@pytest.mark.parametrize(("capability", "can"), [((8, 0), False), ((9, 0), True), ((10, 3), True), ((12, 0), False)])
def test_experts_are_captured_where_their_product_asks_the_device_for_nothing(
    capability: tuple[int, int], can: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    made = SimpleNamespace(dtype=torch.bfloat16, device=SECOND, config=SimpleNamespace(experts=8))
    assert (Decoder.not_capturable(made) == "") == can  # type: ignore[arg-type]


def test_weights_are_made_on_their_device(checkpoint: Path) -> None:
    config = TextConfig.of(Checkpoint(checkpoint).config)
    made = Decoder(config, ALONE, torch.bfloat16, torch.device("meta"))
    assert {parameter.device.type for parameter in made.parameters()} == {"meta"}


def test_a_flash_attn_without_the_function_that_is_needed_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flash_attn_interface", "flash_attn"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    assert flash_backend.find(256) is None
    monkeypatch.setattr(sys.modules["flash_attn"], "flash_attn_varlen_func", print, raising=False)
    assert flash_backend.find(256) is not None
    assert flash_backend.find(16) is None, "version 2 reads no blocks of this size"


@pytest.mark.parametrize("error", ["ImportError", "OSError", "RuntimeError"])
def test_a_flash_attn_whose_library_does_not_fit_is_none(
    error: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of another torch: its library is loaded by Python, or by torch."""
    for name in ("flash_attn_interface", "flash_attn"):
        (tmp_path / f"{name}.py").write_text(f"raise {error}('undefined symbol')")
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    assert flash_backend.find(256) is None
