"""Real CUDA graphs of the towers against eager passes: any mix, after any other. `make gpu-check`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from common.checkpoints.checkpoint import Checkpoint
from common.gpu.graphs import CudaCapture
from common.media.item import Grid
from encoder_service.families import config
from encoder_service.models.attention import candidates
from encoder_service.models.tower import PackedTower, load_tower
from encoder_service.worker.graphs import LADDER, GraphedTower, budgets_for
from testkit.checkpoints import TOWERS
from tests import pictures
from tests.launch import encoder_server
from tests.rpc.encoder_client import Client, film, image
from tests.scrape import scrape

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
BUDGETS = (64, 256, 1024)
MIXES = (
    [Grid(1, 20, 28)],
    [Grid(1, 2, 2)],
    [Grid(2, 6, 8), Grid(1, 10, 12), Grid(1, 2, 4)],
    [Grid(1, 32, 32)],
    [Grid(4, 4, 4)],
    [Grid(1, 8, 8)] * 5,
)
KINDS = [(torch.float32, "triton"), (torch.bfloat16, "triton"), (torch.bfloat16, "flash"), (torch.float16, "triton")]
SHARE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Padding changes the shapes of products, and so the order of sums."""


def load(folder, dtype: torch.dtype, attention: str) -> PackedTower:
    if attention not in candidates(GPU, dtype):
        pytest.skip(f"{attention} is not installed")
    checkpoint = Checkpoint(folder)
    return load_tower(checkpoint, config.read(checkpoint), GPU, dtype, attention)


def drawn(tower: PackedTower, grids: list[Grid], dtype: torch.dtype, seed: int) -> torch.Tensor:
    inputs = tower.patch_embed.proj.weight.shape[1]
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sum(grid.patches for grid in grids), inputs, generator=generator).to(GPU, dtype)


def graphed(tower: PackedTower, dtype: torch.dtype, max_bytes: int = 8 << 30) -> GraphedTower:
    return GraphedTower(tower, BUDGETS, CudaCapture(GPU), max_bytes=max_bytes, device=GPU, dtype=dtype)


@pytest.mark.parametrize(("dtype", "attention"), KINDS)
@pytest.mark.parametrize("family", TOWERS)
@torch.inference_mode()
def test_replays_equal_eager_passes_whatever_came_before(family, dtype, attention, checkpoints):
    tower = load(checkpoints(family), dtype, attention)
    graphs = graphed(tower, dtype)
    assert graphs.budgets == list(BUDGETS)
    for seed, grids in enumerate(MIXES * 2):
        for each in (graphs._buffers.x, graphs._buffers.cos, graphs._buffers.sin, graphs._buffers.rows):
            each.fill_(torch.nan)
        patches = drawn(tower, grids, dtype, seed)
        eager, replayed = tower(patches, grids).float(), graphs(patches, grids).float()
        assert replayed.isfinite().all()
        assert (eager - replayed).norm() / eager.norm() < SHARE[dtype], grids
    assert (graphs.replays, graphs.eager) == (2 * len(MIXES), 0)


@torch.inference_mode()
def test_a_batch_above_the_largest_budget_runs_eagerly(checkpoints):
    tower = load(checkpoints("qwen3_vl"), torch.float32, "triton")
    graphs, grids = graphed(tower, torch.float32), [Grid(1, 40, 40)]
    patches = drawn(tower, grids, torch.float32, 0)
    torch.testing.assert_close(graphs(patches, grids), tower(patches, grids), rtol=1e-4, atol=1e-4)
    assert (graphs.replays, graphs.eager) == (0, 1)


@torch.inference_mode()
def test_a_bound_on_memory_leaves_graphs_out(checkpoints):
    tower = load(checkpoints("qwen3_vl"), torch.bfloat16, "triton")
    assert graphed(tower, torch.bfloat16, max_bytes=0).budgets == []


def test_the_ladder_is_the_default(checkpoints):
    tower = load(checkpoints("qwen3_vl"), torch.bfloat16, "triton")
    assert budgets_for(None, tower, GPU, 16_384) == list(LADDER)


@pytest.mark.parametrize("family", TOWERS)
def test_the_service_replays_and_gives_the_same_rows(family, checkpoints):
    folder = checkpoints(family)
    items = [image(pictures.encoded(pictures.noise(*size, seed=3))) for size in ((64, 64), (200, 300), (90, 400))]
    items.append(film(pictures.frames(30)))
    found = {}
    for graphs in ("off", "256,1024"):
        flags = {"device": "cuda", "dtype": "float32", "graphs": graphs, "metrics_listen": "127.0.0.1:0"}
        with encoder_server(folder, light=False, **flags) as service, Client(service) as client:
            found[graphs] = client.encode(*items)
            replays = scrape(service.metrics)['twinlens_encoder_vit_calls_total{mode="graph"}']
            assert (replays > 0) == (graphs != "off")
    for one, other in zip(found["off"], found["256,1024"], strict=True):
        np.testing.assert_allclose(one.rows, other.rows, rtol=1e-3, atol=1e-3)
