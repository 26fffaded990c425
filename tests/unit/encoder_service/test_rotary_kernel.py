"""The towers' rotary kernel, interpreted where there is no GPU, against torch's operators; and whole towers with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from common.checkpoints.checkpoint import Checkpoint
from common.hardware import cuda_device_count
from common.media.item import Grid
from encoder_service.families import config
from encoder_service.models import blocks, rotary_kernel
from encoder_service.models.tower import Rotary, load_tower, rotary
from testkit.checkpoints import TOWERS
from tests import kernel_layout

DEVICE = torch.device("cuda" if cuda_device_count() else "cpu")
NEAR = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""The interpreter cuts off where a GPU rounds: a last digit of values up to 2.8."""


@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize(("heads", "head"), [(2, 64), (16, 72), (5, 80), (1, 128), (20, 8)])
def test_queries_and_keys_are_turned_as_by_torch_and_values_stay(heads: int, head: int, dtype: torch.dtype) -> None:
    table = rotary([Grid(1, 2, 4)], 2, head, 10_000.0, DEVICE)
    packed = torch.randn(8, 3, heads, head, generator=torch.Generator().manual_seed(head)).clamp(-2, 2)
    packed = packed.to(DEVICE, dtype)
    both, values = packed[:, :2].flatten(1, 2), packed[:, 2].clone()
    expected = blocks.apply_rotary(both, table)
    turned = rotary_kernel.turn(both, table)
    assert turned.data_ptr() == packed.data_ptr(), "in place"
    torch.testing.assert_close(turned, expected, rtol=0, atol=NEAR[dtype])
    assert torch.equal(packed[:, 2], values)


@pytest.mark.parametrize("dtype", NEAR, ids=str)
def test_halves_of_heads_may_turn_by_angles_of_their_own_into_a_fresh_tensor(dtype: torch.dtype) -> None:
    cos, sin = torch.rand(2, 9, 1, 80, device=DEVICE)
    packed = torch.randn(9, 3, 5, 80).clamp(-2, 2).to(DEVICE, dtype)
    before, keys = packed.clone(), packed[:, 1]
    x = keys.float()
    behind = torch.cat([-x[..., 40:], x[..., :40]], dim=-1)
    for found in (
        rotary_kernel.turn(keys, Rotary(cos, sin), fresh=True),
        blocks.apply_rotary(keys, Rotary(cos, sin)),
    ):
        torch.testing.assert_close(found.float(), x * cos + behind * sin, rtol=0, atol=2 * NEAR[dtype])
    assert torch.equal(packed, before)


@pytest.mark.parametrize("layout", kernel_layout.LAYOUTS)
def test_tables_of_angles_need_not_lie_in_order(layout: str) -> None:
    x, *both = torch.randn(9, 5, 80, device=DEVICE), *torch.rand(2, 9, 1, 40, device=DEVICE)
    lying = Rotary(*map(kernel_layout.LAYOUTS[layout], both))
    torch.testing.assert_close(rotary_kernel.turn(x, lying, fresh=True), blocks.apply_rotary(x, Rotary(*both)))


@pytest.mark.parametrize("family", TOWERS)
@torch.inference_mode()
def test_towers_give_the_same_rows_with_it(
    family: str, checkpoints: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = Checkpoint(checkpoints(family))
    settings = config.read(checkpoint)
    tower = load_tower(checkpoint, settings, DEVICE, torch.float32)
    grids = [Grid(2, 2, 4), Grid(1, 2, 2)]
    patches = torch.randn(20, 3 * 2 * settings.tower["patch_size"] ** 2, device=DEVICE)
    expected, calls = tower(patches, grids), []

    def turn(*given: object, fresh: bool) -> torch.Tensor:
        calls.append(given)
        return rotary_kernel.turn(*given, fresh=fresh)

    monkeypatch.setattr(blocks, "_kernel", lambda _: turn)
    torch.testing.assert_close(tower(patches, grids), expected, rtol=1e-5, atol=1e-5)
    assert len(calls) == len(tower.blocks), "once a layer"
