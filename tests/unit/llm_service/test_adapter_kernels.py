"""What adapters add by our kernels for GPUs, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from llm_service.layers.gpu import lora_kernels, lora_tiles
from llm_service.layers.lora.row_tiles import TILE, RowTiles
from testkit import adapter_cases


@pytest.mark.parametrize("dtype", adapter_cases.TYPES, ids=str)
@pytest.mark.parametrize("slots", adapter_cases.BATCHES, ids=len)
@pytest.mark.parametrize(("rank", "inputs", "parts"), adapter_cases.SIZES)
def test_each_row_gets_what_its_adapter_adds(
    rank: int, inputs: int, parts: tuple[int, ...], slots: list[int], dtype: torch.dtype
) -> None:
    adapter_cases.check_add(rank, inputs, parts, slots, dtype, "cpu")


def test_a_graph_s_room_holds_any_batch_that_fits() -> None:
    random, device = np.random.default_rng(5), torch.device("cpu")
    for tokens, kinds in ((1, 1), (16, 3), (50, 4), (64, 64)):
        room = RowTiles.nobody(tokens, kinds, device)
        assert (room.tiles[:, 0] == -1).all(), "of nobody"
        for _ in range(50):
            slots = random.integers(-1, kinds, random.integers(1, tokens + 1))
            numbers = room.numbers(slots)
            assert numbers.shape == room.packed.shape
            room.packed.copy_(torch.from_numpy(numbers))
            own = [(slot, begin, end) for slot, begin, end in room.tiles.tolist() if slot >= 0]
            found = {row: slot for slot, begin, end in own for row in room.rows[begin:end].tolist()}
            assert found == {row: slot for row, slot in enumerate(slots.tolist()) if slot >= 0}
            assert all(0 < end - begin <= TILE for _, begin, end in own)


@pytest.mark.parametrize("rank", [1, 5, 100])
@pytest.mark.parametrize("wrong", ["shrink_kernel", "expand_kernel"])
def test_kernels_that_are_wrong_are_not_used(rank: int, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a compiler makes wrong code of one for one kind of GPU."""
    given = rank, torch.float16, torch.device("cpu")
    assert lora_tiles.computes(*given)
    lora_tiles.computes.cache_clear()
    monkeypatch.setattr(lora_kernels, wrong, _Nothing())
    assert not lora_tiles.computes(*given)
    lora_tiles.computes.cache_clear()


class _Nothing:
    """A kernel that writes nothing."""

    def __getitem__(self, _: object) -> Callable[..., None]:
        return lambda *_, **__: None
