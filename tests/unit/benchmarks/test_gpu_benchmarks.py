"""The benchmarks of GPUs on a CPU, with small shapes and graphs that are run again: that they work, and count right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import llm_device, real_shape, shapes, vit
from benchmarks.device import Peaks, measured, sheet, timed
from common.checkpoint import Checkpoint
from common.media.item import Grid
from encoder_service.families import config
from encoder_service.models.tower import load_tower
from llm_service.models.config import TextConfig
from llm_service.models.loader import load_decoder

CPU = torch.device("cpu")
TEXT = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_theta": 10_000,
    "max_position_embeddings": 256,
    "rope_scaling": {"mrope_interleaved": True, "mrope_section": [4, 2, 2], "rope_type": "default"},
}
TOWER = {
    **shapes.TOWER,
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0],
}


class Again:
    """A graph is its callable."""

    held = 0

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        return run


def text_config() -> TextConfig:
    return TextConfig.of({**shapes.MODEL, "text_config": TEXT})


@pytest.mark.soak
def test_the_decoder_s_steps_are_timed_eagerly_and_replayed() -> None:
    machine = llm_device.Machine(CPU, torch.float32, Peaks(1e9, 1e9), runs=1, capture=Again)
    found = llm_device.measure(
        text_config(), machine, sequences=(1, 3), context=20, tokens=(16, 40), attention="triton"
    )
    assert [many for many, _ in found["decode"]] == [1, 3]
    assert all(list(times) == ["eager", "graph", "replay"] for kind in found.values() for _, times in kind)
    table = llm_device.report(text_config(), machine, 20, found).splitlines()
    assert [row.count("|") for row in table] == [8] * 4 + [0] + [7] * 4


def test_a_step_computes_what_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    shape, machine = text_config(), llm_device.Machine(CPU, torch.float32, Peaks(1e9, 1e9), runs=1)
    runner = llm_device.make_runner(shape, 8, machine, "torch")
    products: list[int] = []

    def watched(x: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
        products.append(2 * x.shape[0] * weight.numel())
        return x @ weight.T

    monkeypatch.setattr(torch.nn.functional, "linear", watched)
    runner.run(llm_device.prefill(40))
    attention = 4 * shape.layers * shape.heads * shape.head_dim * 40 * 41 / 2
    assert sum(products) + attention == shapes.prefill_operations(shape, 40)
    products.clear()
    runner.run(llm_device.decodes(1, 20))
    assert sum(products) / 2 * 4 == shapes.weight_bytes(shape, 4)


def test_the_published_shape_has_as_many_weights_as_its_name_says() -> None:
    shape = TextConfig.of(shapes.MODEL)
    embeddings = shape.vocab_size * shape.hidden_size
    assert round((shapes.weight_bytes(shape, 1) + embeddings) / 1e9, 1) == 8.2


def test_the_tower_s_passes_are_timed_eagerly_and_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vit, "MIXES", {"one": [Grid(1, 4, 6)], "two": [Grid(1, 2, 2), Grid(2, 4, 4)]})
    given: dict[str, Any] = {"runs": 1, "peak": 1e9, "budgets": (32, 64), "capture": Again}
    rows = list(vit.rows(TOWER, CPU, torch.float32, ["triton", "sdpa"], **given))
    assert [row.split(" | ")[2] for row in rows] == ["triton", "triton", "sdpa", "sdpa"]
    assert ["nan" in row for row in rows] == [False, False, True, True], "torch's own attention has no graphs"


def test_a_checkpoint_of_a_given_shape_is_loaded_by_both_services(tmp_path: Path) -> None:
    checkpoint = Checkpoint(real_shape.write(tmp_path / "made", TEXT, TOWER, CPU, shard=40_000))
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
