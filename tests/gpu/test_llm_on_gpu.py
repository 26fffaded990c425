"""The LLM side on a GPU: kernels against plain torch, graphs against eager steps, and what memory is left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from common.checkpoints.checkpoint import Checkpoint
from common.gpu.graphs import CudaCapture
from common.shm.arena import SharedBuffer
from llm_service.layers.attention.backend import CacheShape, PagedChunk
from llm_service.layers.attention.choose import choose
from llm_service.layers.attention.flash_backend import find
from llm_service.layers.attention.metadata import Tiling
from llm_service.layers.moe.sparse_mlp import SparseMLP
from llm_service.layers.tensor_parallel import ALONE, TensorGroup
from llm_service.models.loader import load_decoder
from llm_service.plan import Draw, RowSlice, StepPlan
from llm_service.request import SamplingParams
from llm_service.settings import EngineSettings
from llm_service.worker import gpu_sampler, sampler
from llm_service.worker.caches import Caches
from llm_service.worker.dummy_plans import largest_step
from llm_service.worker.fusion import fuse
from llm_service.worker.graphs import CaptureBounds, GraphKind, decode_sizes, prefill_sizes
from llm_service.worker.load import load_rank
from llm_service.worker.row_arena import RowArena
from llm_service.worker.wait_trial import unmeant_waits
from testkit.attention_cases import WAYS, Case, shape_of
from testkit.checkpoints import Family
from testkit.local_engine import LocalEngine, make_prompt
from tests import pictures

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda:0")
CPU = torch.device("cpu")
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
TYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("counts", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(
    "shape",
    [shape_of(), shape_of(head_dim=128, heads=8, kv_heads=2), shape_of(head_dim=80), shape_of(head_dim=256)],
    ids=["64", "128", "80", "256"],
)
def test_our_kernels_compute_what_plain_torch_does(
    shape: CacheShape, counts: tuple[int, ...], dtype: torch.dtype
) -> None:
    for seed in range(3):
        Case.random(shape, counts, dtype, seed, CUDA).check(choose("triton", shape, dtype, CUDA))


@pytest.mark.parametrize("parts", [1, 4, 60])
def test_long_contexts_are_split_and_put_together(parts: int) -> None:
    shape = replace(shape_of(head_dim=128, heads=8, kv_heads=2), blocks=1000)
    backend: Any = choose("triton", shape, torch.bfloat16, CUDA)
    backend.tiling = replace(backend.tiling, parts=parts)
    case = Case.random(shape, (1, 1), torch.bfloat16, 1, CUDA)
    case.chunks = [PagedChunk(7000, 1, list(range(500))), PagedChunk(40, 1, [900, 901, 902])]
    case.check(backend)


@pytest.mark.parametrize(("heads", "tile"), [(16, 5), (8, 4), (8, 5), (4, 8)])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_tokens_with_their_drafts_are_tiles_of_few_rows(heads: int, tile: int, dtype: torch.dtype) -> None:
    shape = shape_of(head_dim=128, heads=heads, kv_heads=2)
    backend: Any = choose("triton", shape, dtype, CUDA)
    for parts in (1, 60):
        backend.tiling = Tiling(parts, tile, singles=False)
        Case.random(shape, (1, tile, 1, 2, tile), dtype, heads, CUDA).check(backend)


@pytest.mark.parametrize("counts", WAYS.values(), ids=WAYS)
def test_flash_attn_computes_the_same_where_it_is_installed(counts: tuple[int, ...]) -> None:
    if find(16) is None:
        pytest.skip("flash-attn 3 is not installed")
    shape = shape_of(head_dim=128)
    Case.random(shape, counts, torch.bfloat16, 1, CUDA).check(choose("flash", shape, torch.bfloat16, CUDA))


def sizes(decodes: list[int], prefills: list[int]) -> dict[GraphKind, list[int]]:
    return {GraphKind.PREFILL: prefills, GraphKind.VERIFY: [], GraphKind.DECODE: decodes}


def graphed(folder: Path, step_tokens: int) -> LocalEngine:
    engine = LocalEngine(folder, step_tokens=step_tokens, max_running=6, blocks=256, device="cuda:0")
    bounds = CaptureBounds(6, 64, 4096, engine.runner.arena.levels)
    engine.runner.capture(bounds, CudaCapture(CUDA), max_bytes=1 << 30, agree=lambda number: number)
    assert engine.runner.graphs is not None
    assert engine.runner.graphs.sizes == sizes(decode_sizes(6), prefill_sizes(64))
    return engine


@pytest.mark.parametrize("step_tokens", [64, 4096])
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_graphs_give_the_tokens_of_eager_steps(
    family: Family, step_tokens: int, checkpoints: Callable[..., Path]
) -> None:
    folder = checkpoints(family)
    photographs = [pictures.photograph(name).resize((120, 90)) for name in ("astronaut", "coffee")]
    prompts = [
        make_prompt(folder, [photographs[0], "What is in the picture?"]),
        make_prompt(folder, ["Tell me about two red circles."]),
        make_prompt(folder, [photographs[1], "and", photographs[0], "differ how?"]),
    ]
    expected = [outcome.tokens for outcome in LocalEngine(folder, step_tokens=step_tokens).run(prompts, GREEDY)]
    engine = graphed(folder, step_tokens)
    for _ in range(2):  # the second time over buffers and a cache that hold the first's
        assert [outcome.tokens for outcome in engine.run(prompts, GREEDY)] == expected
    assert engine.runner.graphs is not None
    assert engine.runner.graphs.replays > 40


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
def test_a_token_s_step_waits_for_nothing(family: Family, checkpoints: Callable[..., Path]) -> None:
    folder = checkpoints(family)
    for engine in (LocalEngine(folder, device="cuda:0"), graphed(folder, 64)):
        assert unmeant_waits(engine.runner) == []


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
def test_compiled_layers_give_the_tokens_of_plain_ones(checkpoints: Callable[..., Path]) -> None:
    folder = checkpoints("qwen3_vl")
    prompts = [make_prompt(folder, [pictures.photograph("coffee").resize((120, 90)), "What is it?"])]
    expected = [outcome.tokens for outcome in LocalEngine(folder, device="cuda:0").run(prompts, GREEDY)]
    engine = LocalEngine(folder, device="cuda:0")
    engine.runner._decoder.compile_layers()
    assert [outcome.tokens for outcome in engine.run(prompts, GREEDY)] == expected


@pytest.mark.parametrize("group", [ALONE, TensorGroup(1, 4, expert_parallel=True)], ids=["all", "some experts"])
def test_experts_in_one_product_are_those_in_turn_and_can_be_captured(group: TensorGroup) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("the grouped product asks the device for sizes here")
    layer = SparseMLP(16, 4, 256, 128, group, torch.bfloat16).requires_grad_(requires_grad=False).to(CUDA)
    for parameter in layer.parameters():
        parameter.normal_(std=parameter.shape[-1] ** -0.5)
    x = torch.randn(24, 256, dtype=torch.bfloat16, device=CUDA)
    weights, chosen = layer.gate(x).float().softmax(-1).topk(4, dim=-1)
    weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
    expected = layer._in_turn(x, weights, chosen)
    torch.testing.assert_close(layer._together(x, weights, chosen), expected, rtol=3e-2, atol=3e-2)
    out = torch.empty_like(x)

    def run() -> None:
        out.copy_(layer(x))

    with torch.inference_mode():  # a graph's own tensors are made in it, so replays belong there as well
        replay = CudaCapture(CUDA)(run)
        out.zero_()
        replay()
    torch.testing.assert_close(out, expected, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_logits_are_near_those_of_the_cpu(dtype: torch.dtype, checkpoints: Callable[..., Path]) -> None:
    folder = checkpoints("qwen3_vl")
    chunk = PagedChunk(0, 40, [0, 1, 2])
    ids = torch.randint(0, 500, (40,), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(40, dtype=torch.int32).expand(3, -1)
    logits = []
    for device, kind in ((CPU, torch.float32), (CUDA, dtype)):
        decoder = load_decoder(Checkpoint(folder), kind, device)
        caches = Caches(decoder.mixers(), 8, 16, kind, device)
        with torch.inference_mode():
            hidden = decoder.embed_tokens(ids.to(device))
            hidden = decoder(hidden, positions.to(device), caches.layers, caches.batches([chunk]), None)
            logits.append(decoder.logits(hidden).cpu())
    cosine = torch.nn.functional.cosine_similarity(*logits, dim=-1)
    assert cosine.min() > (0.999999 if dtype == torch.float32 else 0.99)


def test_rows_are_copied_from_locked_memory_and_their_place_is_free_once_settled() -> None:
    memory = SharedBuffer.create("rows", 64 << 20)
    arena = RowArena(memory.view, 2, 4096, torch.bfloat16)
    arena.pin()
    count = memory.size // arena.row_bytes
    everything = RowSlice(0, 0, count)
    for seed in range(3):
        rows = torch.randn(count, 2, 4096, generator=torch.Generator().manual_seed(seed)).bfloat16()
        arena.bytes_of(everything).copy_(rows.view(torch.uint8).flatten())
        hidden = torch.zeros(count, 4096, dtype=torch.bfloat16, device=CUDA)
        deepstack = fuse(hidden, [everything], arena)
        torch.cuda.synchronize()
        arena.bytes_of(everything).zero_()
        assert deepstack is not None
        assert torch.equal(hidden.cpu(), rows[:, 0])
        assert torch.equal(deepstack.values[0].cpu(), rows[:, 1])


@pytest.mark.parametrize("vocabulary", [1000, 40_000])
@pytest.mark.parametrize("spread", [0.3, 4.0])
def test_the_sampler_draws_there_as_on_the_cpu(vocabulary: int, spread: float) -> None:
    logits = spread * torch.randn(7, vocabulary, generator=torch.Generator().manual_seed(0))
    first, second = logits[6].topk(2).indices.tolist()
    draws = [
        Draw(at=0),
        Draw(at=1, temperature=0.7, top_p=0.9, uniform=0.3, logprobs=3),
        Draw(at=2, temperature=1.3, top_k=40, uniform=0.9),
        Draw(at=3, temperature=1.0, min_p=0.05, uniform=0.5, logit_bias={4: 2.0}, banned=(7,)),
        Draw(at=4, prompt=torch.arange(50, dtype=torch.int32).numpy().tobytes(), repetition_penalty=1.4),
        Draw(at=5, allowed_mask=bytes([0b10101010] * (vocabulary // 8))),
        Draw(at=6, carried=0, banned_behind=((9, first), (8, second))),
    ]
    before = torch.tensor([9])
    expected = sampler.draw(logits, draws, before).result().tokens
    assert expected[6] == second
    for each in (sampler, gpu_sampler):
        assert each.draw(logits.cuda(), draws, before.cuda()).result().tokens == expected


def test_the_cache_is_what_the_largest_step_leaves_free(checkpoints: Callable[..., Path]) -> None:
    memory = SharedBuffer.create("test-rows", 1 << 20)
    given = {
        "model": str(checkpoints("qwen3_vl")),
        "device": "cuda:0",
        "dtype": "bfloat16",
        "attention": "auto",
        "graphs": "auto",
        "graph_bytes": 1 << 28,
        "kv_memory_share": 0.5,
        "block_size": 16,
        "max_running": 64,
        "max_step_tokens": 2048,
        "row_arena_bytes": 1 << 20,
        "row_levels": 3,
        "threads": 1,
        "nodes": 1,
        "hf": None,
    }
    settings = EngineSettings(**{**dict.fromkeys(EngineSettings.__struct_fields__, 0), **given})
    free, _ = torch.cuda.mem_get_info()
    runner = load_rank(settings, CUDA, ALONE, memory.fd).runner
    assert runner.caches.blocks == 64 * 4096 // 16, "a tiny model's contexts fit"
    assert runner.graphs is not None
    assert runner.graphs.sizes == sizes(decode_sizes(64), prefill_sizes(2048))
    plan: StepPlan = largest_step(settings, runner.arena.row_bytes)[0]
    assert len(runner.run(plan).tokens) == 64
    left, _ = torch.cuda.mem_get_info()
    assert left > free // 3
