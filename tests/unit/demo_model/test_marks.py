"""Hints of the training: what a patch shows, which words name a thing and where it stands, and the losses on them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import torch
from tokenizers import Tokenizer

from tools.demo_model.batches import Maker
from tools.demo_model.hints import SIZES, Hints, telling, words
from tools.demo_model.marks import NONE, SEEN_SHAPES, Names, in_patch_order, patch_marks, patch_marks_of_pair
from tools.demo_model.scene import FULL, Print, Scene, Thing, random_scene
from tools.demo_model.words import CHARACTERS, COLOURS, SHAPES

TOKENIZER = Path(__file__).parents[3] / "models" / "demo" / "tokenizer.json"


def thing(shape: str, colour: str, x: float, y: float) -> Thing:
    return Thing(shape, colour, (0, 0, 0), x, y, 14.0, 0.0, 1)


def scene(*things: Thing) -> Scene:
    return replace(random_scene(Random(1), FULL, 160, 128, text=False), things=things, print=None)


def named(text: str, *scenes: Scene, start: int = 1) -> dict[str, tuple[float, float]]:
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    ids = tokenizer.encode(text).ids
    found = Names(tokenizer).spots(ids, start, list(scenes))
    return {tokenizer.decode(ids[first : last + 1]).strip(): spot for first, last, spot in found}


def test_a_name_tells_the_place_of_the_one_thing_that_it_fits() -> None:
    one = scene(thing("star", "red", 80, 32), thing("ring", "blue", 40, 64), thing("ring", "red", 120, 96))
    text = "Is the red star left of the blue ring? It is a red ring, not the ring."
    assert named(text, one) == {"red star": (0.25, 0.5), "blue ring": (0.5, 0.25), "red ring": (0.75, 0.75)}
    assert named("What colour is the star?", one) == {"star": (0.25, 0.5)}


def test_a_name_that_fits_none_or_that_stood_in_two_places_tells_nothing() -> None:
    here, there = scene(thing("star", "red", 80, 32)), scene(thing("star", "red", 40, 32))
    assert named("Is there a blue star?", here) == {}
    assert named("Where is the red star?", here, there) == {}
    assert named("Where is the red star?", here, here) == {"red star": (0.25, 0.5)}


def test_names_before_the_pictures_tell_nothing() -> None:
    assert named("the star and the star", scene(thing("star", "red", 80, 32)), start=3) == {"star": (0.25, 0.5)}
    assert named("star", scene(thing("star", "red", 80, 32)), start=9) == {}


def test_two_frames_that_are_seen_as_one_are_unclear_where_they_differ() -> None:
    still, moved = thing("ring", "blue", 24, 24), thing("star", "red", 120, 64)
    first, second = scene(still, moved), scene(still, replace(moved, y=104.0))
    pair, alone = patch_marks_of_pair(first, second, 128, 160), patch_marks(first, 128, 160)
    assert pair[0, 1, 1] == SHAPES.index("ring")
    assert alone[0, 4, 7] == SHAPES.index("star")
    assert pair[0, 4, 7] == NONE
    assert pair[0, 7, 0] == SEEN_SHAPES.index("nothing")


def marks_of(*scenes: Scene) -> torch.Tensor:
    return torch.from_numpy(np.stack([in_patch_order(patch_marks(one, 128, 160)) for one in scenes], axis=1))


def test_scores_that_name_what_a_row_shows_lose_least() -> None:
    marks = marks_of(scene(thing("star", "red", 80, 64)))
    cells = marks.unflatten(-1, (-1, 4))
    right = torch.full((1, 20, sum(SIZES)), -16.0)
    right[0, (cells[0, 0] == SHAPES.index("star")).any(-1), SHAPES.index("star")] = 16.0
    right[0, (cells[1, 0] == list(COLOURS).index("red")).any(-1), len(SHAPES) + list(COLOURS).index("red")] = 16.0
    wrong = right.roll(1, dims=-1)
    assert telling(right, marks) < 0.05 < 5 < telling(wrong, marks)


def test_rows_are_asked_for_what_the_picture_before_showed() -> None:
    first, second = scene(thing("star", "red", 80, 64)), scene(thing("ring", "blue", 24, 24))
    hints = Hints(8, sum(SIZES), words(Tokenizer.from_file(str(TOKENIZER))))
    with torch.no_grad():
        hints.before.weight.copy_(torch.eye(sum(SIZES)) * 8)
        hints.before.bias.zero_()
    marks, early = marks_of(first, second), torch.zeros(2, 20, sum(SIZES))
    early[1, marks.unflatten(-1, (-1, 4))[0, 0].eq(SHAPES.index("star")).any(-1), SHAPES.index("star")] = 1.0
    one_told = hints.recalling(early, marks, 2)
    assert one_told < hints.recalling(early, marks.flip(1), 2)
    assert one_told < hints.recalling(torch.zeros_like(early), marks, 2)


def test_a_batch_points_at_names_behind_its_pictures_only() -> None:
    maker, names = Maker(TOKENIZER, seed=5, size=2), Names(Tokenizer.from_file(str(TOKENIZER)))
    named = {*names.shapes, *names.characters}
    kinds = set()
    for step in range(5000, 5040):
        batch = maker[step]
        kinds.add(batch.alike)
        flat, labels = batch.ids.flatten(), batch.labels.flatten()
        assert all(int(flat[point]) in named for point in batch.points[0])
        for told, before in batch.points.T.tolist():
            assert (before >= 0) == (labels[told - 1] >= 0)
            assert before < 0 or labels[before] in (flat[told], flat[told - 1])
        assert ((batch.spots > 0) & (batch.spots < 1)).all()
        if batch.hints is not None:
            assert batch.hints.shape[1] % (2 * batch.alike) == 0
            last = batch.slots.view(2, -1)[:, -1]
            assert all(int(point) > int(last[point // batch.ids.shape[1]]) for point in batch.points[0])
    assert {1, 2, 4} <= kinds


def printed(text: str, x: float = 80.0, height: float = 32.0) -> Scene:
    return replace(scene(), print=Print(text, (0, 0, 0), x, 64.0, height, 0, 0.1))


def test_each_character_of_a_text_tells_its_place_and_two_alike_their_own() -> None:
    tokenizer, one = Tokenizer.from_file(str(TOKENIZER)), printed("ABA")
    ids = tokenizer.encode('It says "ABA". It says "AB".').ids
    found = list(Names(tokenizer).spots(ids, 1, [one, scene()]))
    assert [tokenizer.decode([ids[first]]) for first, _, _ in found] == ["A", "B", "A"]
    (_, first), (_, second), (_, third) = spots = [spot for _, _, spot in found]
    assert {high for high, _ in spots} == {0.5}
    assert 0.2 < first < second < third < 0.8
    assert list(Names(tokenizer).spots(ids, 1, [one, replace(one, width=320)])) == [], "it could be either"


def test_a_patch_may_show_the_middles_of_two_characters() -> None:
    marks = patch_marks(printed("I1", x=88.0, height=12.0), 128, 160)
    (row,), (column,) = np.nonzero(marks[3] < len(CHARACTERS))
    assert [CHARACTERS[mark] for mark in marks[2:, row, column]] == ["I", "1"]
    rows = torch.from_numpy(in_patch_order(marks)).unsqueeze(1)
    right = torch.full((1, 20, sum(SIZES)), -16.0)
    seat = (rows[3].view(20, 4) < len(CHARACTERS)).any(-1)
    both = [len(SHAPES) + len(COLOURS) + CHARACTERS.index(character) for character in "I1"]
    right[0, seat.nonzero(), torch.tensor(both)] = 16.0
    one = right.clone()
    one[0, seat.nonzero(), both[0]] = -16.0
    assert telling(right, rows) < 0.05 < 5 < telling(one, rows)
