"""Towers on a GPU that there is not: nothing that is captured, and nothing on a replay's way, asks the host."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from common.checkpoints.checkpoint import Checkpoint
from common.cpu.linear import Linear
from common.hf import models as hf_models
from common.media.item import Grid
from encoder_service.families import config
from encoder_service.models import blocks, rotary_kernel
from encoder_service.models.hf.tower import HfTower
from encoder_service.models.internvl import InternVLTower
from encoder_service.models.processor import ItemProcessor
from encoder_service.models.qwen2_audio import Qwen2AudioTower
from encoder_service.models.tower import load_tower
from encoder_service.worker.graphs import GraphedTower, Replay
from encoder_service.worker.hf.batches import Made
from encoder_service.worker.hf.graphs import ShapeGraphs
from encoder_service.worker.hf.runner import picture
from encoder_service.worker.runner import StagedTower
from testkit.audio_checkpoint import make_audio_checkpoint
from testkit.checkpoints import TOWERS, Family
from testkit.internvl_checkpoint import make_internvl
from tests.fake_gpu import GPU, Crossings, OnHost, Recording, fake_gpu
from tools.models.tiny import make

pytestmark = pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="this torch was built without CUDA")

BUDGETS = (64, 256)
REPLAYED = ("qwen2_vl", "qwen2_5_vl")
"""Before a replay the others repeat rows as often as numbers on the host say, and fake tensors have none."""
MIX = [Grid(2, 6, 8), Grid(1, 10, 12)]


@pytest.mark.parametrize("family", TOWERS)
def test_a_tower_is_captured_and_replayed_without_a_question_to_the_host(
    family: Family, checkpoints: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "_kernel", lambda _: rotary_kernel.turn)  # that it runs is found out by its numbers
    checkpoint = Checkpoint(checkpoints(family))
    with fake_gpu() as launched:
        with torch.inference_mode(mode=False):
            tower = load_tower(checkpoint, config.read(checkpoint), GPU, torch.bfloat16, "triton")
        capture = Recording()
        graphs = GraphedTower(tower, BUDGETS, capture, max_bytes=1, device=GPU, dtype=torch.bfloat16)
        assert capture.on_host == []
        assert graphs.budgets == list(BUDGETS)
        assert {"_varlen_attention", "rotary_kernel"} <= set(launched)
        if family not in REPLAYED:
            return
        for prepare, tables in ((graphs.prepare, 1), (tower.prepare, len(tower.longest))):
            with Crossings() as crossings:
                prepare(MIX, GPU)
            assert crossings.seen == ["copy_"] * (1 + tables), "of all that patches are told, and of segments"
        patches = torch.empty(
            sum(grid.patches for grid in MIX), tower.patch_embed.proj.weight.shape[1], dtype=torch.bfloat16, device=GPU
        )
        ready = graphs.prepare(MIX, GPU)
        assert isinstance(ready, Replay)
        with OnHost() as watch:
            graphs.run(patches, ready)
        assert watch.seen == []
        assert graphs.replays == 1


def test_tiles_are_captured_and_replayed_without_a_question_to_the_host(tmp_path: Path) -> None:
    checkpoint = Checkpoint(make_internvl(tmp_path))
    with fake_gpu() as launched:
        with torch.inference_mode(mode=False):
            tower = load_tower(checkpoint, config.read(checkpoint), GPU, torch.bfloat16, "triton")
        assert isinstance(tower, InternVLTower)
        capture, unit = Recording(), tower.granularity.patches
        graphs = GraphedTower(tower, (unit, 4 * unit), capture, max_bytes=1, device=GPU, dtype=torch.bfloat16)
        assert capture.on_host == []
        assert "_varlen_attention" in launched
        side = math.isqrt(unit)
        ready = graphs.prepare([Grid(1, side, side), Grid(2, side, side)], GPU)
        assert isinstance(ready, Replay)
        projection = tower.embeddings.patch_embeddings["projection"]
        assert isinstance(projection, Linear)
        patches = torch.empty(3 * unit, projection.weight.shape[1], dtype=torch.bfloat16, device=GPU)
        graphs.run(patches, ready)  # a table is laid out once
        with OnHost() as watch:
            rows = graphs.run(patches, ready)
        assert watch.seen == []
        assert rows.shape[0] == 3 * tower.granularity.rows


def test_sounds_are_computed_without_a_question_to_the_host(tmp_path: Path) -> None:
    """But for what is prepared, beside earlier passes."""
    checkpoint = Checkpoint(make_audio_checkpoint(tmp_path))
    with fake_gpu() as launched:
        with torch.inference_mode(mode=False):
            tower = load_tower(checkpoint, config.read(checkpoint), GPU, torch.bfloat16, "triton")
        assert isinstance(tower, Qwen2AudioTower)
        bands = tower.conv1.weight.shape[1] // 3
        frames = torch.empty(2 * (20 + 12) + 2, bands, dtype=torch.bfloat16, device=GPU)
        assert isinstance(tower, StagedTower)
        ready = tower.prepare([Grid(1, 1, 20), Grid(1, 1, 12)], GPU)
        with OnHost() as watch:
            tower.run(frames, ready)
        assert watch.seen == []
        assert "_varlen_attention" in launched


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of transformers' processors
@pytest.mark.parametrize("kind", ["llava", "gemma3"])
def test_towers_of_transformers_are_captured_without_a_question_to_the_host(kind: str, tmp_path: Path) -> None:
    """Such as look at no grid: fake tensors have no numbers."""
    folder = make(kind, tmp_path)
    found, processor = hf_models.describe(folder), ItemProcessor(folder)
    shown = picture((64, 48), 0)
    inputs, tokens = processor.inputs(shown), sum(part.rows for part in processor.replacement(shown))
    tower = HfTower(folder, found, torch.bfloat16, torch.device("cpu"))
    with fake_gpu(), torch.inference_mode(mode=False), torch.no_grad():
        tower._model.to(GPU)
        tower._device = GPU
        made = Made("image", tower.placed(tower.known(inputs, "image"), "image"))
        capture = Recording()
        graph = ShapeGraphs(tower, capture, max_bytes=1)._captured([made], tokens)
        assert capture.on_host == []
        assert graph.trace.looks == []
        assert len(graph.trace) > 100
        assert graph.rows.device == GPU
