"""Steps on a GPU that there is not: nothing on their way asks the host, but for rows that come from there."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from benchmarks import quantized
from benchmarks.llm_device import config_of, step
from common.checkpoints.checkpoint import Checkpoint
from common.hf import models as hf_models
from common.hf.small_models import made_up
from common.shm.arena import SharedBuffer
from llm_service.layers.attention.backend import CacheShape
from llm_service.layers.gpu import index_trial, lora_tiles, quantized_weight
from llm_service.layers.gpu.int8_weight import Int8Weight
from llm_service.layers.gpu.quantized_weight import GpuWeight
from llm_service.layers.linear.quantized_weight import QuantizedWeight
from llm_service.layers.lora.slots import LowRank
from llm_service.layers.self_attention.layer import SelfAttention
from llm_service.layers.tensor_parallel import ALONE
from llm_service.model_config.served import ServedModel
from llm_service.models.decoder import Decoder
from llm_service.models.draft_head import DraftHead
from llm_service.models.hf.decoder import HfDecoder
from llm_service.models.hf.text import text_alone
from llm_service.models.known_text import known_text
from llm_service.models.loader import load_decoder
from llm_service.plan import Draw, HiddenSum, Proposal, RowSlice, StepAdapters
from llm_service.settings import CacheDtype
from llm_service.worker import capture_watch, gpu_sampler, model_runner, sampler
from llm_service.worker import host_cache as host_caches
from llm_service.worker.adapters import RankAdapters
from llm_service.worker.caches import Caches
from llm_service.worker.capture_watch import WaitWatch
from llm_service.worker.draft_loader import load_draft_model, load_eagle_head, load_mtp_layer
from llm_service.worker.draft_model import DraftModel
from llm_service.worker.graphs import CaptureBounds, GraphKind
from llm_service.worker.host_cache import HostCache
from llm_service.worker.model_runner import ModelRunner
from llm_service.worker.row_arena import RowArena
from llm_service.worker.weights import describe
from testkit.checkpoints import FAMILIES
from tests.eagle_checkpoint import eagle_head
from tests.fake_gpu import GPU, OnHost, Recording, fake_gpu
from tests.mtp_checkpoint import with_mtp_layer
from tests.quantized import FORMATS, quantize_checkpoint
from tools.models.tiny import config_of_recipe, make
from tools.models.w8a8 import W8A8

pytestmark = pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="this torch was built without CUDA")

LEVELS = 4
OWN_TEXTS = ("qwen3_vl_moe", "qwen3_5", "qwen4_exp")
STEPS = {
    "decode": [(20, 1), (33, 1)],
    "verify": [(20, 3), (33, 1)],
    "prefill": [(0, 20), (33, 1)],
    "eager": [(0, 100), (33, 1)],
}
DRAWS = [
    Draw(at=0, temperature=0.7, top_p=0.9, top_k=20, uniform=0.3, logprobs=3),
    Draw(at=1, prompt=bytes(40), output=bytes(8), carried=0, repetition_penalty=1.4, logit_bias={4: 2.0}, banned=(7,)),
    Draw(at=1, carried=0, banned=(7,), banned_behind=((3, 5), (4, 5))),
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
    "qwen4_exp": {"step_kernel", "attention_kernel"},
    "minimax_m3_vl": {"score_blocks_kernel", "attention_kernel"},
    "gemma3": {"attention_kernel"},
    "apertus1p5": {"attention_kernel"},
    "llama4": {"attention_kernel", "sort_kernel"},
    "nemotron_h_omni": {"conv_step_kernel", "mamba2_step_kernel", "mamba2_scan_kernel", "group_norm_kernel"},
    "lfm2_vl": {"conv_step_kernel", "conv_run_kernel", "conv_keep_kernel"},
    "lfm3_vl": {"conv_step_kernel", "conv_run_kernel", "conv_keep_kernel"},
}
BOUNDS = CaptureBounds(6, 64, 512, 1, drafts=3, draft_rows=16)


def made_runner(
    decoder: Decoder | HfDecoder,
    memory: SharedBuffer,
    levels: int,
    *,
    kept: CacheDtype = CacheDtype.AUTO,
    adapters: RankAdapters | None = None,
) -> ModelRunner:
    attention: Any = decoder.backend if isinstance(decoder, HfDecoder) else "triton"
    caches = Caches(
        decoder.mixers(), 64, 16, torch.bfloat16, GPU, attention=attention, state_slots=6, kv_cache_dtype=kept
    )
    arena = RowArena(memory.view, levels, decoder.hidden_size, torch.bfloat16)
    runner = ModelRunner(decoder, arena, caches, adapters=adapters)
    runner._draw = gpu_sampler.draw
    assert not runner.not_capturable()
    return runner


def check_capture(runner: ModelRunner, bounds: CaptureBounds) -> None:
    """Nothing of what is captured comes from the host or goes there."""
    capture = Recording()
    runner.capture(bounds, capture, max_bytes=1, agree=lambda number: number)
    assert capture.on_host == []
    assert runner.graphs is not None
    assert runner.graphs.sizes[GraphKind.DECODE] == [1, 2, 4, 6]


def check_steps(runner: ModelRunner, draws: list[Draw], adapters: list[int] | None = None) -> None:
    """No step asks the host for anything but copies of its numbers; each that a graph fits has one of these, one of
    what draws say, and those of rows."""
    assert runner.graphs is not None
    for name, chunks in STEPS.items():
        rows = [RowSlice(2, 0, 5)] if chunks[0][0] == 0 else []
        plan = msgspec.structs.replace(
            step(chunks), rows=rows, draws=draws, slots=[0, 1], adapters=StepAdapters(slots=adapters or [])
        )
        replays = runner.graphs.replays
        with OnHost() as watch:
            runner.launch(plan)
        assert set(watch.seen) <= {"empty", "copy_"} | ({"slice", "view", "to", "_to_copy"} if rows else set()), name
        assert watch.seen.count("to") + watch.seen.count("_to_copy") <= len(rows), name
        if runner.graphs.replays == replays:  # copies of an eager step are as many as what asks for numbers
            assert name != "decode", "a token of each sequence has a graph"
            continue
        copies = 1 + any(not draw.plain for draw in draws) + any(draw.logprobs >= 0 for draw in draws)
        assert watch.seen.count("copy_") == copies, name


@pytest.fixture
def rows_memory(monkeypatch: pytest.MonkeyPatch) -> SharedBuffer:
    for module in (sampler, model_runner):
        monkeypatch.setattr(module, "ToHost", Unread)
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


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of transformers' processors
@pytest.mark.parametrize("kind", KINDS)
def test_texts_of_all_kinds_are_captured_without_a_question_to_the_host(
    kind: Any, checkpoints: Callable[..., Path], tmp_path: Path, rows_memory: SharedBuffer
) -> None:
    if kind in FAMILIES or kind in OWN_TEXTS:
        checkpoint, text = Checkpoint(checkpoints(kind)), None
    else:
        checkpoint = Checkpoint(make(kind, tmp_path))
        text = known_text(checkpoint, hf_models.describe(tmp_path), ALONE, 4096)
        assert text is not None
    with fake_gpu() as launched:
        with torch.inference_mode(mode=False):
            decoder = load_decoder(checkpoint, torch.bfloat16, GPU, ALONE, text=text)
        runner = made_runner(decoder, rows_memory, 1)
        check_capture(runner, BOUNDS)
        check_steps(runner, [Draw(at=0), Draw(at=1)])
        assert set(launched) >= KINDS[kind], launched


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of transformers' processors
@pytest.mark.parametrize("kind", ["glm5_next", "mistral_large4", "minimax_m3_vl"])
def test_tokens_are_scored_by_torch_without_a_question_to_the_host(
    kind: str, tmp_path: Path, rows_memory: SharedBuffer
) -> None:
    """As where our kernel is wrong."""
    checkpoint = Checkpoint(make(kind, tmp_path))
    text = known_text(checkpoint, hf_models.describe(tmp_path), ALONE, 4096)
    with fake_gpu() as launched, mock.patch.object(index_trial, "gives_scores", return_value=False):
        with torch.inference_mode(mode=False):
            decoder = load_decoder(checkpoint, torch.bfloat16, GPU, ALONE, text=text)
        runner = made_runner(decoder, rows_memory, 1)
        check_capture(runner, BOUNDS)
        check_steps(runner, [Draw(at=0), Draw(at=1)])
        assert KINDS[kind] - set(launched) <= {"score_tokens_kernel", "score_blocks_kernel"}
        assert not any(name.startswith("score_") for name in launched)


@pytest.mark.parametrize("count", [1, 20], ids=["the last place", "all places"])
def test_prompts_are_embedded_without_a_question_to_the_host(
    count: int, checkpoints: Callable[..., Path], rows_memory: SharedBuffer
) -> None:
    checkpoint = Checkpoint(checkpoints("qwen3_vl"))
    with fake_gpu():
        with torch.inference_mode(mode=False):
            decoder = load_decoder(checkpoint, torch.bfloat16, GPU, ALONE)
        runner = made_runner(decoder, rows_memory, 1)
        check_capture(runner, BOUNDS)
        pools = [HiddenSum(20 - count, count), HiddenSum(20)]
        plan = msgspec.structs.replace(step([(0, 20), (33, 1)]), draws=[], pools=pools)
        with OnHost() as watch:
            runner.launch(plan)
        assert watch.seen == ["empty", "copy_"]
        assert runner.graphs is not None
        assert runner.graphs.replays == 1


def test_adapters_are_followed_in_graphs(checkpoints: Callable[..., Path], rows_memory: SharedBuffer) -> None:
    checkpoint = Checkpoint(checkpoints("qwen3_vl"))
    with fake_gpu() as launched:
        with torch.inference_mode(mode=False):
            decoder = load_decoder(checkpoint, torch.bfloat16, GPU, ALONE)
        with mock.patch(
            "llm_service.layers.lora.linear_adapters.runs_of", lambda places: [(0, len(places))]
        ):  # waits, once
            adapters = RankAdapters(decoder, 2, 8)
        runner = made_runner(decoder, rows_memory, 1, adapters=adapters)
        check_capture(runner, BOUNDS)
        check_steps(runner, [Draw(at=0), Draw(at=1)], [1, -1])
        assert {"shrink_kernel", "expand_kernel"} <= set(launched)
        check_filling(runner, adapters)


def test_adapters_are_added_by_torch_in_eager_steps(
    checkpoints: Callable[..., Path], rows_memory: SharedBuffer
) -> None:
    """As where our kernels are wrong: steps without adapters have graphs, and no other asks the host for a number."""
    checkpoint = Checkpoint(checkpoints("qwen3_vl"))
    with fake_gpu() as launched, mock.patch.object(lora_tiles, "computes", return_value=False):
        with torch.inference_mode(mode=False):
            decoder = load_decoder(checkpoint, torch.bfloat16, GPU, ALONE)
        with mock.patch("llm_service.layers.lora.linear_adapters.runs_of", lambda places: [(0, len(places))]):
            adapters = RankAdapters(decoder, 2, 8)
        runner = made_runner(decoder, rows_memory, 1, adapters=adapters)
        check_capture(runner, BOUNDS)
        check_filling(runner, adapters)
        assert runner.graphs is not None
        replays = runner.graphs.replays
        plan = msgspec.structs.replace(step(STEPS["decode"]), draws=[Draw(at=0)], slots=[0, 1])
        with OnHost() as watch:
            runner.launch(msgspec.structs.replace(plan, adapters=StepAdapters([], [0, -1])))
        assert set(watch.seen) <= {"empty", "copy_"}
        assert runner.graphs.replays == replays
        runner.launch(plan)
        assert runner.graphs.replays == replays + 1
        assert not {"shrink_kernel", "expand_kernel"} & set(launched)


def check_filling(runner: ModelRunner, adapters: RankAdapters) -> None:
    """An adapter of all layers is one copy more, and nothing else goes between host and device."""
    adapters._loaded[1] = {
        linear: {part: LowRank(torch.ones(2, linear.inputs), torch.ones(len(linear.places(part)), 2), 1.0)}
        for linear, part in adapters._linears.values()
    }
    plan, seen = msgspec.structs.replace(step(STEPS["decode"]), draws=[Draw(at=0)], slots=[0, 1]), list[list[str]]()
    for filled in ([], [(0, 1)]):
        sizes = mock.patch("llm_service.worker.adapters._bytes_of", lambda half: np.empty(half.nbytes, np.uint8))
        with sizes, mock.patch.object(LowRank, "ordered", lambda pair, _: pair), OnHost() as watch:
            runner.launch(msgspec.structs.replace(plan, adapters=StepAdapters(filled, [0, -1])))
        seen.append(watch.seen)
    assert seen[1] == ["empty", "copy_", *seen[0]]


@pytest.mark.parametrize("name", ["decode", "eager"])
def test_masks_are_waited_for_when_the_model_has_been_launched(name: str, rows_memory: SharedBuffer) -> None:
    seen: list[set[str]] = []
    with fake_gpu() as launched:
        with torch.inference_mode(mode=False):
            decoder = Decoder(config_of(2, experts=False, tiny=True), ALONE, torch.bfloat16, GPU)
        decoder.finalize()
        runner = made_runner(decoder, rows_memory, 1)
        check_capture(runner, BOUNDS)
        draws = [Draw(at=0), Draw(at=1, mask_follows=True)]
        launched.clear()

        def masks() -> list[bytes]:
            seen.append(set(launched))
            return [b"\xff" * (4 * -(-decoder.config.vocab_size // 32))]

        plan = msgspec.structs.replace(step(STEPS[name]), draws=draws, slots=[0, 1])
        with OnHost() as watch:
            runner.launch(plan, masks)
        assert set(watch.seen) <= {"empty", "copy_"}
    assert len(seen) == 1
    assert "attention_kernel" in seen[0]
    assert "adjust_kernel" not in seen[0]
    assert "adjust_kernel" in launched


def test_what_asks_the_device_for_a_number_is_told() -> None:
    with fake_gpu(), OnHost() as watch:
        number = torch.empty(3, device=GPU)
        with pytest.raises(Exception, match="local_scalar_dense"):
            number.sum().item()
        number.to("cpu")
        assert watch.seen, "a copy to the host"


FORMS = (
    ("qwen3_vl", "fp8 in blocks"),
    ("qwen3_vl", "int-quantized, with zeros"),
    ("qwen3_vl", "pack-quantized"),
    ("qwen3_vl", "nvfp4"),
    ("qwen3_vl", "awq"),
    ("qwen3_vl", "gptq in order of importance"),
    ("qwen3_vl_moe", "fp8 in blocks"),
    ("qwen3_vl_moe", "awq"),
    ("qwen3_5_moe", "float-quantized, a scale an output"),
)


@pytest.mark.parametrize(("family", "form"), FORMS)
def test_quantised_weights_are_captured_without_a_question_to_the_host(
    family: Any, form: str, checkpoints: Callable[..., Path], tmp_path: Path, rows_memory: SharedBuffer
) -> None:
    folder, _ = quantize_checkpoint(checkpoints(family), FORMATS[form], tmp_path)
    with fake_gpu() as launched:
        with torch.inference_mode(mode=False):
            decoder = load_decoder(Checkpoint(folder), torch.bfloat16, GPU, ALONE)
        runner = made_runner(decoder, rows_memory, 1)
        check_capture(runner, BOUNDS)
        check_steps(runner, [Draw(at=0), Draw(at=1)])
        assert "product_kernel" in launched


@pytest.mark.filterwarnings("ignore:Accessing the data pointer:UserWarning")  # which no fake tensor has
@pytest.mark.parametrize(("weight_dtype", "inputs"), [("int8", ""), ("w8a8", "int8")])
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_vl_moe"])
def test_rounded_weights_are_captured_without_a_question_to_the_host(
    family: Any, weight_dtype: str, inputs: str, checkpoints: Callable[..., Path], rows_memory: SharedBuffer
) -> None:
    """The head's inputs are as they are."""
    checkpoint = Checkpoint(checkpoints(family))
    with fake_gpu() as launched:
        with torch.inference_mode(mode=False):
            decoder = load_decoder(checkpoint, torch.bfloat16, GPU, ALONE, weight_dtype=weight_dtype)
        assert describe(decoder, weight_dtype).inputs == inputs
        runner = made_runner(decoder, rows_memory, 1)
        check_capture(runner, BOUNDS)
        check_steps(runner, [Draw(at=0), Draw(at=1)])
        assert "product_kernel" in launched
        assert ("int8_product_kernel" in launched) == bool(inputs)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer:UserWarning")  # which no fake tensor has
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_vl_moe"])
def test_checkpoints_in_w8a8_are_captured_without_a_question_to_the_host(
    family: Any, checkpoints: Callable[..., Path], tmp_path: Path, rows_memory: SharedBuffer
) -> None:
    folder, _ = quantize_checkpoint(checkpoints(family), FORMATS["int-quantized"], tmp_path)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": W8A8}))
    with fake_gpu() as launched:
        with torch.inference_mode(mode=False):
            decoder = load_decoder(Checkpoint(folder), torch.bfloat16, GPU, ALONE)
        told = describe(decoder, "compressed-tensors")
        assert (told.number, told.bits, told.widened_in, told.inputs) == ("int8", 8, "", "int8")
        runner = made_runner(decoder, rows_memory, 1)
        check_capture(runner, BOUNDS)
        check_steps(runner, [Draw(at=0), Draw(at=1)])
        assert {"round_rows_kernel", "int8_product_kernel"} <= set(launched)
        assert "product_kernel" not in launched


@pytest.mark.parametrize("form", quantized.FORMS)
def test_products_of_many_rows_ask_the_host_for_nothing(form: str) -> None:
    """Of sizes for which there are products in 8 bits on both sides: dense ones, and those of experts."""
    weight = quantized.FORMS[form](torch.randn(256, 384))
    with fake_gpu() as launched:
        with torch.inference_mode(mode=False):
            one, several = GpuWeight.of([weight.to(GPU)]), GpuWeight.of_experts([[weight.to(GPU)]] * 3)
        assert one is not None
        assert (one.scaled is not None) == (several.scaled_experts is not None) == (form == "fp8")
        ends = torch.empty(3, dtype=torch.int32, device=GPU)
        with OnHost() as watch:
            for rows in (1, 20, 300):
                x = torch.empty(rows, 384, dtype=torch.bfloat16, device=GPU)
                assert one.product(x).shape == several.grouped_product(x, ends).shape == (rows, 256)
        assert watch.seen == []
        more = {"round_to_e4m3_kernel", "scaled_product_kernel"} if form == "fp8" else {"widen_kernel"}
        assert {"product_kernel", *more} <= set(launched)


def test_widened_weights_of_experts_ask_the_host_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are multiplied where our kernel is wrong, two experts at a time."""
    monkeypatch.setattr(quantized_weight, "_OF_EXPERTS_AT_ONCE", 2 * 256 * 384)
    weight = quantized.FORMS["awq"](torch.randn(256, 384))
    with fake_gpu() as launched:
        with torch.inference_mode(mode=False):
            made = replace(GpuWeight.of_experts([[weight.to(GPU)]] * 3), few=False)
        ends, x = torch.empty(3, dtype=torch.int32, device=GPU), torch.empty(20, 384, dtype=torch.bfloat16, device=GPU)
        with OnHost() as watch:
            assert made.grouped_product(x, ends).shape == (20, 256)
        assert watch.seen == []
        assert launched == ["widen_kernel"] * 3


@pytest.mark.parametrize("scale", [0.0, 0.25], ids=["own scales", "a stored scale"])
def test_products_of_rounded_rows_ask_the_host_for_nothing(scale: float) -> None:
    weight = replace(QuantizedWeight.rounded(torch.randn(256, 4096), inputs=True), input_scale=scale)
    with fake_gpu() as launched:
        with torch.inference_mode(mode=False):
            one, several = Int8Weight.of([weight.to(GPU)]), Int8Weight.of_experts([[weight.to(GPU)]] * 3)
        assert one is not None
        assert several is not None
        ends, bias = (torch.empty(n, dtype=kind, device=GPU) for n, kind in ((3, torch.int32), (256, torch.bfloat16)))
        with OnHost() as watch:
            for rows in (1, 20, 300):
                x = torch.empty(rows, 4096, dtype=torch.bfloat16, device=GPU)
                assert one.product(x, bias).shape == several.grouped_product(x, ends).shape == (rows, 256)
        assert watch.seen == []
        assert set(launched) == {"round_rows_kernel", "int8_product_kernel", "int8_join_kernel"}


def check_drafts(proposer: DraftModel, moved: int) -> None:
    """Each step of what proposes is launched from graphs of its own, and has one copy of its numbers from the host, or
    as many as are `moved`."""
    capture = Recording()
    proposer.capture(BOUNDS, capture, max_bytes=1)
    assert capture.on_host == []
    assert proposer.graphs is not None
    plan = msgspec.structs.replace(step([(20, 4), (33, 1)]), draws=[Draw(at=at) for at in range(1, 5)])
    plan = msgspec.structs.replace(plan, proposals=[Proposal(3, 0), Proposal(2, 0)])
    decoder = proposer._runner._decoder
    states = len(decoder.reads) or 1 if isinstance(decoder, DraftHead) else 1
    hidden = torch.empty(5, states * decoder.hidden_size, dtype=torch.bfloat16, device=GPU)
    with OnHost() as watch:
        proposer.propose(plan, [5, 5, 7, 8], hidden)
    assert set(watch.seen) <= {"empty", "copy_"}
    assert watch.seen.count("copy_") == 3 * moved
    assert proposer.graphs.replays == 3


def test_a_draft_model_has_graphs_and_asks_the_host_for_nothing(
    checkpoints: Callable[..., Path], rows_memory: SharedBuffer
) -> None:
    checkpoint = Checkpoint(checkpoints("qwen3_vl"))
    with fake_gpu():
        with torch.inference_mode(mode=False):
            drafting = load_draft_model(checkpoint, ServedModel.of(checkpoint), torch.bfloat16, GPU)
        arena = RowArena(rows_memory.view, 1, drafting.decoder.hidden_size, torch.bfloat16)
        check_drafts(drafting.proposer(arena, 64, 16, "triton"), 1)


def test_a_layer_for_multi_token_prediction_has_graphs_and_asks_the_host_for_nothing(
    checkpoints: Callable[..., Path], tmp_path: Path, rows_memory: SharedBuffer
) -> None:
    """What it is given of hidden states is told by places, which are copied as well."""
    checkpoint = Checkpoint(with_mtp_layer(checkpoints("qwen3_5"), tmp_path))
    with fake_gpu():
        with torch.inference_mode(mode=False):
            target = load_decoder(checkpoint, torch.bfloat16, GPU, ALONE)
            drafting = load_mtp_layer(checkpoint, target, torch.bfloat16)
        arena = RowArena(rows_memory.view, 1, target.hidden_size, torch.bfloat16)
        check_drafts(drafting.proposer(arena, 64, 16, "triton"), 2)


def test_an_eagle3_head_has_graphs_and_so_has_the_model_that_extracts_states_for_it(
    checkpoints: Callable[..., Path], tmp_path: Path, rows_memory: SharedBuffer
) -> None:
    checkpoint = Checkpoint(checkpoints("qwen3_vl"))
    head = Checkpoint(eagle_head(checkpoint.folder, tmp_path / "head"))
    with fake_gpu():
        with torch.inference_mode(mode=False):
            target = load_decoder(checkpoint, torch.bfloat16, GPU, ALONE)
            drafting = load_eagle_head(head, target, checkpoint, torch.bfloat16)
        check_capture(made_runner(target, rows_memory, 3), BOUNDS)
        arena = RowArena(rows_memory.view, 3, target.hidden_size, torch.bfloat16)
        check_drafts(drafting.proposer(arena, 64, 16, "triton"), 2)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of transformers' processors
@pytest.mark.parametrize("kind", ["cohere2_vision", "granite4_vision", "exaone4_5", "paddleocr_vl"])
def test_texts_that_transformers_computes_are_captured_without_a_question_to_the_host(
    kind: str, rows_memory: SharedBuffer
) -> None:
    """Windows, levels of rows, and positions on three axes."""
    model = made_up(config_of_recipe(kind), text_alone)
    with fake_gpu() as launched:
        with torch.inference_mode(mode=False):
            decoder = HfDecoder(model, torch.bfloat16, GPU, attention="triton")
        runner = made_runner(decoder, rows_memory, 1)
        check_capture(runner, BOUNDS)
        check_steps(runner, [Draw(at=0), Draw(at=1)])
        assert "attention_kernel" in launched


@pytest.mark.parametrize(
    ("kept", "scaled"), [(CacheDtype.INT8, False), (CacheDtype.FP8, False), (CacheDtype.FP8, True)]
)
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_keys_and_values_in_8_bits_are_captured_without_a_question_to_the_host(
    family: Any, kept: CacheDtype, scaled: bool, checkpoints: Callable[..., Path], rows_memory: SharedBuffer
) -> None:
    checkpoint = Checkpoint(checkpoints(family))
    with fake_gpu() as launched:
        with torch.inference_mode(mode=False):
            decoder = load_decoder(checkpoint, torch.bfloat16, GPU, ALONE)
        for mixer in decoder.mixers() if scaled else ():
            if isinstance(mixer, SelfAttention):
                mixer.kv_scales = torch.ones(2, mixer.kv_heads, device=GPU)
        runner = made_runner(decoder, rows_memory, 1, kept=kept)
        check_capture(runner, BOUNDS)
        check_steps(runner, [Draw(at=0), Draw(at=1)])
        assert ("store_int8_kernel" if kept is CacheDtype.INT8 else "store_kernel") in launched


@pytest.mark.parametrize("kept", CacheDtype)
def test_blocks_go_to_the_host_and_back_in_copies_that_nobody_waits_for(kept: CacheDtype) -> None:
    """One of each block, and one of all of their numbers."""
    shape = CacheShape(4, 32, 16, 8, 4, 64, kept=kept)
    with fake_gpu(), mock.patch.object(host_caches, "PinnedCopies"), OnHost() as on_host:
        cache = HostCache([shape.new_cache(torch.bfloat16, GPU).flatten(0, 1)], 8)
        on_host.seen.clear()
        cache.offload([(3, 0), (5, 1), (9, 2)])
        assert on_host.seen.count("copy_") == 3 + 1
        on_host.seen.clear()
        cache.load([(0, 7), (2, 8)])
        assert on_host.seen.count("copy_") == 2 + 1
        assert set(on_host.seen) <= {"copy_", "device", "empty", "select"}


@pytest.mark.parametrize(("capability", "waits"), [((9, 0), ""), ((10, 0), ""), ((8, 0), "aten::_grouped_mm")], ids=str)
def test_a_product_of_groups_waits_for_their_sizes_unless_the_device_reads_them(
    capability: tuple[int, int], waits: str
) -> None:
    with fake_gpu(), mock.patch("torch.cuda.get_device_capability", return_value=capability):
        x, weight = (torch.zeros(*size, dtype=torch.bfloat16, device=GPU) for size in ((8, 64), (2, 64, 32)))
        ends = torch.zeros(2, dtype=torch.int32, device=GPU)
        with WaitWatch() as watch:
            torch.nn.functional.grouped_mm(x, weight, offs=ends)
        assert capture_watch._asks_for_sizes(x.half()), "in bfloat16 alone"
    assert watch.waits == waits


def test_a_step_is_waited_for_on_its_own_gpu() -> None:
    """By a thread whose current one is another."""
    second = torch.device("cuda:1")
    with mock.patch("torch.cuda.Event", mock.MagicMock), mock.patch("torch.cuda.set_device") as chosen:
        model_runner.Launched(None, [], second, began=0.0, replayed=False).result()
    chosen.assert_called_once_with(second)
