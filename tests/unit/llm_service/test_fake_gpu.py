"""Steps on a GPU that there is not: nothing on their way asks the host, but for rows that come from there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch

pytest.importorskip("triton")

from benchmarks.llm_device import config_of, step
from common import library_models
from common.arena import SharedBuffer
from common.checkpoint import Checkpoint
from llm_service.layers.group import ALONE
from llm_service.models.decoder import Decoder
from llm_service.models.known_text import known_text
from llm_service.models.loader import load_decoder
from llm_service.plan import Draw, RowSlice
from llm_service.worker import gpu_sampler, sampler
from llm_service.worker.adapters import RankAdapters
from llm_service.worker.caches import Caches
from llm_service.worker.graphs import CaptureBounds, GraphKind, GraphRunner
from llm_service.worker.model_runner import ModelRunner
from llm_service.worker.row_arena import RowArena
from tests.checkpoints import FAMILIES
from tests.fake_gpu import GPU, OnHost, Recording, fake_gpu
from tools.models.tiny import make

pytestmark = pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="this torch was built without CUDA")

LEVELS = 4
OWN_TEXTS = ("qwen3_vl_moe", "qwen3_5")
STEPS = {
    "decode": [(20, 1), (33, 1)],
    "verify": [(20, 3), (33, 1)],
    "prefill": [(0, 20), (33, 1)],
    "eager": [(0, 100), (33, 1)],
}
DRAWS = [
    Draw(at=0, temperature=0.7, top_p=0.9, top_k=20, uniform=0.3, logprobs=3),
    Draw(at=1, prompt=bytes(40), output=bytes(8), carried=0, repetition_penalty=1.4, logit_bias={4: 2.0}, banned=(7,)),
]


class Unread:
    """What would go to the host."""

    def __init__(self, source: torch.Tensor) -> None:
        assert source.device == GPU


KINDS = {
    "qwen3_vl": {"attention_kernel", "qk_norm_rotary_kernel", "gate_kernel"},
    "qwen3_vl_moe": {"route_kernel", "sort_kernel", "weighted_sum_kernel"},
    "qwen3_5": {"conv_step_kernel", "step_kernel", "system_kernel", "invert_kernel", "scan_kernel"},
    "glm5_next": {"kda_step_kernel", "kda_fade_kernel", "kda_scan_kernel", "score_tokens_kernel"},
    "mistral_large4": {"score_tokens_kernel"},
    "kimi_k25": {"latent_kernel", "sort_kernel"},
}
BOUNDS = CaptureBounds(6, 64, 512, 1, drafts=3, draft_rows=16)


def made_runner(decoder: Decoder, memory: SharedBuffer, levels: int) -> ModelRunner:
    caches = Caches(decoder.mixers(), 64, 16, torch.bfloat16, GPU, attention="triton", state_slots=6)
    arena = RowArena(memory.view, levels, decoder.config.hidden_size, torch.bfloat16)
    runner = ModelRunner(decoder, arena, caches)
    runner._draw = gpu_sampler.draw
    assert not runner.not_capturable()
    return runner


def check_capture(runner: ModelRunner, bounds: CaptureBounds, adapters: RankAdapters | None = None) -> None:
    """Nothing of what is captured comes from the host or goes there."""
    capture, given = Recording(), (runner._decoder, runner.caches, bounds)
    runner.adapters = adapters
    runner.graphs = GraphRunner(*given, capture, max_bytes=1, agree=lambda number: number, adapters=adapters)
    assert capture.on_host == []
    assert runner.graphs.sizes[GraphKind.DECODE] == [1, 2, 4, 6]


def check_steps(runner: ModelRunner, draws: list[Draw], adapters: list[int] | None = None) -> None:
    """Each step that a graph fits has one copy of its numbers from the host, one of what draws say, and those of
    rows."""
    assert runner.graphs is not None
    for name, chunks in STEPS.items():
        rows = [RowSlice(2, 0, 5)] if chunks[0][0] == 0 else []
        plan = msgspec.structs.replace(step(chunks), rows=rows, draws=draws, slots=[0, 1], adapters=adapters or [])
        replays = runner.graphs.replays
        with OnHost() as watch:
            runner.launch(plan)
        if runner.graphs.replays == replays:
            assert name != "decode", "a token of each sequence has a graph"
            continue
        assert set(watch.seen) <= {"empty", "copy_"} | ({"slice", "view", "to", "_to_copy"} if rows else set()), name
        copies = 1 + any(not draw.plain for draw in draws) + any(draw.logprobs >= 0 for draw in draws)
        assert watch.seen.count("copy_") == copies, name
        assert watch.seen.count("to") + watch.seen.count("_to_copy") <= len(rows), name


@pytest.fixture
def rows_memory(monkeypatch: pytest.MonkeyPatch) -> SharedBuffer:
    monkeypatch.setattr(sampler, "ToHost", Unread)
    return SharedBuffer.create("rows", 1 << 20)


@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
def test_a_step_is_launched_and_captured_without_a_question_to_the_host(
    experts: bool, rows_memory: SharedBuffer
) -> None:
    with fake_gpu() as launched:
        with torch.inference_mode(mode=False):
            decoder = Decoder(config_of(2, experts=experts, tiny=True), ALONE, torch.bfloat16, GPU)
        decoder.finalize()
        runner = made_runner(decoder, rows_memory, LEVELS)
        check_capture(runner, replace(BOUNDS, levels=LEVELS))
        assert {"attention_kernel", "combine_kernel", "store_kernel", "norm_kernel"} <= set(launched)
        assert ("route_kernel" in launched) == experts
        check_steps(runner, DRAWS)
        assert runner.graphs is not None
        assert runner.graphs.replays == len(STEPS) - 1
        assert {"adjust_kernel", "draw_kernel"} <= set(launched)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the library's processors
@pytest.mark.parametrize("kind", KINDS)
def test_texts_of_all_kinds_are_captured_without_a_question_to_the_host(
    kind: Any, checkpoints: Callable[..., Path], tmp_path: Path, rows_memory: SharedBuffer
) -> None:
    if kind in FAMILIES or kind in OWN_TEXTS:
        checkpoint, text = Checkpoint(checkpoints(kind)), None
    else:
        checkpoint = Checkpoint(make(kind, tmp_path))
        text = known_text(checkpoint, library_models.describe(tmp_path), ALONE, 4096)
        assert text is not None
    with fake_gpu() as launched:
        with torch.inference_mode(mode=False):
            decoder = load_decoder(checkpoint, torch.bfloat16, GPU, ALONE, text=text)
        runner = made_runner(decoder, rows_memory, 1)
        check_capture(runner, BOUNDS)
        check_steps(runner, [Draw(at=0), Draw(at=1)])
        assert set(launched) >= KINDS[kind], launched


def test_adapters_are_followed_in_graphs(checkpoints: Callable[..., Path], rows_memory: SharedBuffer) -> None:
    checkpoint = Checkpoint(checkpoints("qwen3_vl"))
    with fake_gpu() as launched:
        with torch.inference_mode(mode=False):
            decoder = load_decoder(checkpoint, torch.bfloat16, GPU, ALONE)
        with mock.patch("llm_service.layers.adapters.runs_of", lambda places: [(0, len(places))]):  # waits, once
            adapters = RankAdapters(decoder, 2, 8)
        runner = made_runner(decoder, rows_memory, 1)
        check_capture(runner, BOUNDS, adapters)
        check_steps(runner, [Draw(at=0), Draw(at=1)], [1, -1])
        assert {"shrink_kernel", "expand_kernel"} <= set(launched)


def test_what_asks_the_device_for_a_number_is_told() -> None:
    with fake_gpu(), OnHost() as watch:
        number = torch.empty(3, device=GPU)
        with pytest.raises(Exception, match="local_scalar_dense"):
            number.sum().item()
        number.to("cpu")
        assert watch.seen, "a copy to the host"
