"""Items of one shape in one pass of a tower that transformers computes, and what a trial says of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from common.media.item import Grid
from encoder_service.worker.hf.batches import ByShape, Made, joined, patches_of, shape_of, why_apart

CPU = torch.device("cpu")
SIDE = 28
PATCHES = 4
"""Of an item of `SIDE` pixels a side."""


class Toy:
    """Two rows of two levels for each item; `change` of the rows of a pass [items, 2, levels, width]."""

    def __init__(self, change: Callable[[Tensor], Tensor] = lambda rows: rows) -> None:
        self._change = change
        self.passes: list[int] = []

    def rows(self, inputs: Mapping[str, Any], tokens: int, modality: str = "image") -> Tensor:
        pixels: Tensor = inputs["pixel_values"]
        self.passes.append(len(pixels))
        halves = pixels.flatten(1).unflatten(1, (2, -1))[:, :, :6].unflatten(2, (2, 3))
        return self._change(halves + inputs["sizes"].view(-1, 1, 1, 1)).flatten(0, 1)


def item(seed: int, size: int = 5, side: int = SIDE, kind: str = "image") -> Made:
    pixels = torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(seed))
    inputs = {"pixel_values": pixels, "sizes": torch.tensor([size]), "counts": [1]}
    return Made(kind, inputs, shape=shape_of(kind, inputs))


def computed(tower: ByShape, items: list[Made]) -> Tensor:
    return tower.run(items, tower.prepare([Grid(1, 1, 2)] * len(items), CPU))


def test_items_of_one_shape_share_a_pass_and_rows_come_in_their_order() -> None:
    items = [item(0), item(1, size=7), item(2), item(3, side=14), item(4), item(5, kind="audio"), item(6, size=7)]
    toy = Toy()
    expected = torch.cat([computed(ByShape(Toy()), [each]) for each in items])
    assert torch.equal(computed(ByShape(toy, ["image"], 100 * PATCHES), items), expected)
    assert toy.passes == [1, 3, 2, 1], "what goes with nothing goes first"


@pytest.mark.parametrize(("most", "passes"), [(3 * PATCHES, [3, 2]), (2 * PATCHES, [2, 2, 1]), (PATCHES - 1, [1] * 5)])
def test_a_pass_has_no_more_patches_than_it_may(most: int, passes: list[int]) -> None:
    toy, items = Toy(), [item(seed) for seed in range(5)]
    assert patches_of(items[0].inputs) == PATCHES
    rows = computed(ByShape(toy, ["image"], most), items)
    assert toy.passes == passes
    assert torch.equal(rows, torch.cat([computed(ByShape(Toy()), [each]) for each in items]))


def test_what_is_there_goes_at_once_while_somebody_waits_for_it() -> None:
    tower, read = ByShape(Toy(), ["image"], 3 * PATCHES), []

    def items() -> Iterator[tuple[Made, int]]:
        for seed in range(6):
            read.append(seed)
            yield item(seed), 2

    found = [(places, len(read)) for places in tower.groups(items(), lambda: len(read) in (1, 3))]
    assert found == [([0], 1), ([1, 2], 3), ([3, 4, 5], 6)]


def test_items_whose_shape_is_not_known_are_computed_alone() -> None:
    toy, items = Toy(), [Made("image", item(seed).inputs) for seed in range(2)]
    computed(ByShape(toy, ["image"], 100), items)
    assert toy.passes == [1, 1]


def test_shapes_tell_all_but_floats_apart() -> None:
    made = {"pixels": torch.zeros(1, 3), "grid": torch.tensor([[1, 2]]), "counts": [[1], 2], "scale": torch.tensor(0.5)}
    assert shape_of("image", made) == shape_of("image", {**made, "pixels": torch.ones(1, 3)})
    others: list[dict[str, Any]] = [
        {"pixels": torch.zeros(1, 4)},
        {"pixels": torch.zeros(1, 3, dtype=torch.bfloat16)},
        {"grid": torch.tensor([[2, 1]])},
        {"counts": [[1], 3]},
        {"scale": torch.tensor(0.25)},
    ]
    shapes = [shape_of("image", {**made, **other}) for other in others]
    assert len({shape_of("image", made), shape_of("video", made), *shapes}) == 2 + len(others)
    assert shape_of("image", {**made, "about": object()}) is None


def test_tensors_are_joined_along_their_first_axis_and_lists_put_together() -> None:
    one, other = ({"pixels": torch.full((2, 3), n), "counts": [n], "rate": torch.tensor(8)} for n in (1.0, 2.0))
    made = joined([one, other])
    assert made["pixels"].tolist() == [[1.0] * 3] * 2 + [[2.0] * 3] * 2
    assert (made["counts"], made["rate"].item()) == ([1.0, 2.0], 8)


def mixes(rows: Tensor) -> Tensor:
    return rows + rows.mean(0)


def interleaves(rows: Tensor) -> Tensor:
    return rows.transpose(0, 1).reshape(rows.shape)


def flips(rows: Tensor) -> Tensor:
    """The rows of each item, where there are several."""
    return rows.flip(1) if len(rows) > 1 else rows


def rounds(rows: Tensor) -> Tensor:
    """As another order of sums does it where there are more of them."""
    return rows * (1 + 1e-6 * (len(rows) - 1))


def one_alone(rows: Tensor) -> Tensor:
    if len(rows) > 1:
        raise RuntimeError("it takes one")
    return rows


@pytest.mark.parametrize(
    ("change", "exact", "why"),
    [
        (lambda rows: rows, True, ""),
        (rounds, False, ""),
        (rounds, True, "not those that it gets alone"),
        (flips, False, "not those that it gets alone"),
        (interleaves, False, "depend on those beside it"),
        (mixes, False, "depend on those beside it"),
        (lambda rows: 0 * rows, False, "shows nothing"),
        (one_alone, False, "does not compute several at once"),
        (lambda rows: rows[:, :, 3], False, "does not compute one"),
    ],
)
def test_a_trial_tells_towers_that_items_may_share(change: Any, *, exact: bool, why: str) -> None:
    found = why_apart(Toy(change), [item(seed) for seed in range(3)], 2, exact=exact)
    assert why in found
    assert bool(why) == bool(found)


def test_a_trial_needs_items_of_one_shape() -> None:
    assert "of one shape" in why_apart(Toy(), [item(0), item(1), item(2, size=6)], 2, exact=True)
