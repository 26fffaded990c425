"""The benchmarks of GPUs on a CPU, with small shapes and graphs that are run again: that they work, and count right."""

from __future__ import annotations

import json
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import FunctionEventAvg

from benchmarks import llm_device, profile_device, real_shape, shapes, vit
from benchmarks.device import Again, Machine, Peaks, measured, sheet, timed
from common.checkpoints.checkpoint import Checkpoint
from common.media.item import Grid
from encoder_service.families import config
from encoder_service.models.tower import load_tower
from llm_service.model_config.text import TextConfig
from llm_service.models.loader import load_decoder

CPU = torch.device("cpu")
HERE = Machine(CPU, torch.float32, Peaks(1e9, 1e9), Peaks(1e9, 1e9), runs=1, capture=Again, tiny=True)


def text_config() -> TextConfig:
    return llm_device.config_of(2, experts=False, tiny=True)


@pytest.mark.soak
def test_the_decoder_s_steps_are_timed_eagerly_before_anything_is_captured_and_then_in_every_way() -> None:
    wanted = llm_device.cases((1, 3), (20,), (16, 40))
    found = list(llm_device.measure(text_config(), HERE, wanted, llm_device.Settings("triton")))
    assert [case for case, _ in found] == [*wanted, *wanted]
    ways = [list(times) for _, times in found]
    assert ways == [["eager"]] * len(wanted) + [["eager", "graph", "replay"]] * len(wanted)


def test_a_step_is_of_the_chunks_that_were_asked_for() -> None:
    plan = llm_device.step([(20, 1), (0, 17), (3, 2)])
    assert [(chunk.context, chunk.count) for chunk in plan.chunks] == [(20, 1), (0, 17), (3, 2)]
    assert {each.row: array("i", each.blocks).tolist() for each in plan.appended} == {0: [0, 3], 1: [1, 4], 2: [2]}
    assert [draw.at for draw in plan.draws] == [0, 17, 19]
    assert plan.tokens == 20


def test_a_step_computes_what_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    shape, eager = text_config(), replace(HERE, capture=None)
    runner = llm_device.make_runner(shape, 8, eager, llm_device.Settings("torch"))
    products: list[int] = []

    def watched(x: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
        products.append(2 * x.shape[0] * weight.numel())
        return x @ weight.T

    monkeypatch.setattr(torch.nn.functional, "linear", watched)
    for chunks in ([(0, 40)], [(20, 10)]):
        products.clear()
        runner.run(llm_device.step(chunks))
        seen = sum(context * count + count * (count + 1) / 2 for context, count in chunks)
        attention = 4 * shape.layers * shape.heads * shape.head_dim * seen
        assert sum(products) + attention == shapes.step_operations(shape, chunks)
    products.clear()
    runner.run(llm_device.step([(20, 1)]))
    assert sum(products) / 2 * 4 == shapes.weight_bytes(shape, 4)


def test_of_experts_those_count_that_tokens_reach() -> None:
    shape = llm_device.config_of(48, experts=True, tiny=False)
    one, many = (shapes.weight_bytes(shape, 1, tokens) / 1e9 for tokens in (1, 1 << 20))
    assert round(one, 1) == 3.0, "3 B of weights are active"
    assert round(many) == 30


def test_the_published_shape_has_as_many_weights_as_its_name_says() -> None:
    shape = TextConfig.of(shapes.MODEL)
    embeddings = shape.vocab_size * shape.hidden_size
    assert round((shapes.weight_bytes(shape, 1) + embeddings) / 1e9, 1) == 8.2


def test_the_tower_s_passes_are_timed_eagerly_and_replayed(tmp_path: Path) -> None:
    here = replace(HERE, file=tmp_path / "rows.jsonl")
    rows = list(vit.rows(shapes.TINY_TOWER, here, ["triton", "sdpa"], vit.TINY_MIXES, (32, 64)))
    assert [row.split(" | ")[2] for row in rows] == ["triton", "triton", "sdpa", "sdpa"]
    assert ["nan" in row for row in rows] == [False, False, True, True], "torch's own attention has no graphs"
    kept = [json.loads(row) for row in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["attention"] for row in kept] == ["triton", "triton", "sdpa", "sdpa"]
    assert len(list(vit.stages(shapes.TINY_TOWER, HERE, vit.TINY_MIXES))) == 2


def test_a_checkpoint_of_a_given_shape_is_loaded_by_both_services(tmp_path: Path) -> None:
    checkpoint = Checkpoint(
        real_shape.write(
            tmp_path / "made", {**shapes.MODEL["text_config"], **shapes.TINY}, shapes.TINY_TOWER, CPU, shard=40_000
        )
    )
    assert len({info.file for info in checkpoint.tensors.values()}) > 3
    assert load_decoder(checkpoint, torch.float32, CPU).config == text_config()
    tower = load_tower(checkpoint, config.read(checkpoint), CPU, torch.float32)
    patches = torch.randn(24, 3 * 2 * 16 * 16)
    assert tower(patches, [Grid(1, 4, 6)]).isfinite().all()


def test_a_device_is_timed_until_it_is_done() -> None:
    found = timed({"nothing": lambda: None}, 3, CPU)
    assert 0 <= found["nothing"][1] <= found["nothing"][0]
    here = measured(CPU, torch.float32, side=64, size=1 << 16)
    assert here.operations > 0
    assert here.bandwidth > 0


@pytest.mark.parametrize(
    ("name", "bandwidth"),
    [
        ("NVIDIA H100 80GB HBM3", 3.35),
        ("NVIDIA H100 PCIe", 2.0),
        ("NVIDIA H200", 4.8),
        ("NVIDIA A100-SXM4-80GB", 2.039),
    ],
)
def test_a_gpu_is_known_by_its_name(name: str, bandwidth: float) -> None:
    peaks = sheet(name)
    assert peaks is not None
    assert peaks.bandwidth == pytest.approx(bandwidth * 1e12)
    assert sheet("NVIDIA GeForce RTX 4090") is None


def test_what_the_host_does_beside_a_gpu_is_no_kernel() -> None:
    seen = [event("matmul", DeviceType.CUDA, 9, 4e6), event("cudaLaunchKernel", DeviceType.CPU, 9, 0.0)]
    assert profile_device.kernels(seen, gpu=True) == {"matmul": (4.0, 9)}
    assert profile_device.kernels([event("aten::mm", DeviceType.CPU, 3, 2e6)], gpu=False) == {"aten::mm": (2.0, 3)}


def event(name: str, where: DeviceType, count: int, microseconds: float) -> FunctionEventAvg:
    seen = FunctionEventAvg()
    seen.key, seen.device_type, seen.count = name, where, count
    if where is DeviceType.CUDA:
        seen.self_device_time_total = int(microseconds)
    else:
        seen.self_cpu_time_total = int(microseconds)
    return seen
