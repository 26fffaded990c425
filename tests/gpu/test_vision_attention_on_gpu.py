"""The towers' attention back ends, compiled and at the sizes of real towers, against torch's own. `make gpu-check`."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from common.checkpoints.checkpoint import Checkpoint
from common.media.item import Grid
from encoder_service.families import config
from encoder_service.models.attention import BACKENDS, Sdpa, candidates, choose
from encoder_service.models.tower import load_tower
from encoder_service.models.varlen_attention import tile_rows, tiles, varlen_attention
from testkit.checkpoints import TOWERS

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
NEAR = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
MIXES = ([4096], [1024, 4, 300, 1, 64, 2047], [64] * 40 + [32, 16, 4], [7] * 100)


def drawn(count: int, heads: int, head: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator(GPU).manual_seed(count)
    return list(torch.randn(count, 3, heads, head, generator=generator, device=GPU).clamp(-2, 2).to(dtype).unbind(1))


@pytest.mark.parametrize("lengths", MIXES, ids=len)
@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("head", [64, 72, 80, 128])
def test_our_kernel_equals_torch_s_attention_in_float64(head, dtype, lengths):
    parts = drawn(sum(lengths), 4, head, dtype)
    rows = tile_rows(max(lengths))
    table = torch.tensor(tiles(lengths, rows) + [(0, 0, 0)] * 50, dtype=torch.int32, device=GPU)
    ours = varlen_attention(*parts, table, rows)
    expected = Sdpa().over(lengths, GPU)(*(part.double() for part in parts))
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=NEAR[dtype])


def test_what_is_not_finite_stays_in_its_segment():
    lengths = [100, 200, 300]
    q, k, v = drawn(600, 4, 72, torch.bfloat16)
    expected = Sdpa().over(lengths, GPU)(q, k, v)
    q[100:300], k[100:300], v[100:300] = torch.nan, torch.inf, torch.nan
    table = torch.tensor(tiles(lengths, 128), dtype=torch.int32, device=GPU)
    ours = varlen_attention(q, k, v, table, 128)
    for start, end in ((0, 100), (300, 600)):
        torch.testing.assert_close(ours[start:end], expected[start:end], rtol=0, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head", [64, 72, 80, 128])
def test_what_is_preferred_passes_its_trial(head, dtype):
    assert choose("auto", GPU, dtype, head).name == candidates(GPU, dtype)[0]


@pytest.mark.parametrize("name", BACKENDS)
def test_stable_segments_do_what_they_were_filled_with_last(name):
    dtype = torch.bfloat16
    if name not in candidates(GPU, dtype):
        pytest.skip("not installed")
    stable = BACKENDS[name]().stable(4096, 4096, GPU)
    if stable is None:
        assert name == "sdpa"
        return
    for lengths in ([4096], [1000, 24, 16], [256] * 16):
        parts = drawn(sum(lengths), 4, 72, dtype)
        assert stable.holds(lengths)
        stable.fill(stable.table(lengths))
        expected = Sdpa().over(lengths, GPU)(*parts)
        torch.testing.assert_close(stable(*parts)[: sum(lengths)], expected, rtol=0, atol=2e-2)


@pytest.mark.parametrize("family", TOWERS)
@torch.inference_mode()
def test_every_back_end_gives_the_tower_the_same_rows(family, checkpoints):
    checkpoint = Checkpoint(checkpoints(family))
    settings = config.read(checkpoint)
    grids = [Grid(1, 20, 28), Grid(2, 6, 8), Grid(1, 2, 2)]
    rows = {}
    for name in candidates(GPU, torch.bfloat16):
        tower = load_tower(checkpoint, settings, GPU, torch.bfloat16, name)
        inputs = tower.patch_embed.proj.weight.shape[1]
        generator = torch.Generator().manual_seed(1)
        patches = torch.randn(sum(grid.patches for grid in grids), inputs, generator=generator)
        rows[name] = tower(patches.to(GPU, torch.bfloat16), grids).float()
    assert len(rows) >= 2, "there is nothing to compare"
    for one, other in pairwise(rows.values()):
        assert (one - other).norm() / other.norm() < 0.03
