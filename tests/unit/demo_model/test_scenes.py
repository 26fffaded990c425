"""Scenes and drawings: the same for the same seed, within their limits, and clear enough to be asked about."""

from __future__ import annotations

import math
from random import Random

import numpy as np
import pytest

from tools.demo_model import film, other
from tools.demo_model.cases import Draw
from tools.demo_model.draw import draw
from tools.demo_model.letters import print_boxes
from tools.demo_model.scene import FULL, Scene, distance, random_scene, random_text

SIZES = ((96, 96), (160, 120), (128, 256), (512, 300))


def scenes(seed: int, number: int) -> list[Scene]:
    rng = Random(seed)
    return [random_scene(rng, FULL, *rng.choice(SIZES)) for _ in range(number)]


def test_the_same_seed_gives_the_same_scene_and_the_same_pixels() -> None:
    for one, two in zip(scenes(3, 6), scenes(3, 6), strict=True):
        assert one == two
        assert np.array_equal(np.asarray(draw(one)), np.asarray(draw(two)))
    assert scenes(3, 6) != scenes(4, 6)


def test_a_drawing_has_the_size_of_its_scene() -> None:
    for scene in scenes(5, 8):
        for picture in (draw(scene), other.draw(scene)):
            assert picture.size == (scene.width, scene.height)
            assert picture.mode == "RGB"


def test_things_lie_within_the_picture_apart_from_each_other_and_stand_out() -> None:
    for scene in scenes(6, 200):
        assert len(scene.things) <= 5
        assert scene.things or scene.print
        for k, thing in enumerate(scene.things):
            assert thing.radius <= thing.x <= scene.width - thing.radius
            assert thing.radius <= thing.y <= scene.height - thing.radius
            assert distance(thing.rgb, scene.rgb) > 50
            for later in scene.things[k + 1 :]:
                assert math.hypot(thing.x - later.x, thing.y - later.y) > thing.radius + later.radius


@pytest.mark.parametrize("drawer", [draw, other.draw])
def test_a_thing_has_its_colour_at_its_centre(drawer: Draw) -> None:
    seen = 0
    for scene in scenes(7, 60):
        pixels = np.asarray(drawer(scene), np.float32)
        for thing in scene.things:
            if thing.shape in ("ring", "star"):
                continue
            x, y = int(thing.x), int(thing.y)
            middle = pixels[y - 1 : y + 2, x - 1 : x + 2].mean(axis=(0, 1))
            assert np.abs(middle - np.array(thing.rgb)).max() < 45, (thing, middle)
            seen += 1
    assert seen > 60


def test_printed_text_is_one_to_four_letters_or_digits_never_both() -> None:
    rng = Random(8)
    for text in [random_text(rng) for _ in range(500)]:
        assert 1 <= len(text) <= 4
        assert text.isupper() or text.isdigit()
        assert text not in ("O", "I", "0", "1")


def test_printed_characters_stay_inside_the_picture() -> None:
    for scene in scenes(9, 200):
        if scene.print is None:
            continue
        boxes = print_boxes(scene.print)
        assert len(boxes) == len(scene.print.text)
        slack = 0.05 * scene.unit  # wide bold letters
        assert boxes[0][0] > -slack
        assert boxes[-1][2] < scene.width + slack
        assert min(box[1] for box in boxes) > 0
        assert max(box[3] for box in boxes) < scene.height


def test_a_film_moves_its_actor_the_way_it_says() -> None:
    rng, moves = Random(10), 0
    for _ in range(60):
        shot = film.random_film(rng, FULL, 128, 96, 6)
        assert len(shot.frames) == 6
        first = next((t for t in shot.frames[0].things if t.style == shot.actor.style), None)
        last = next((t for t in shot.frames[-1].things if t.style == shot.actor.style), None)
        match shot.event:
            case "move":
                assert first is not None
                assert last is not None
                dx, dy = last.x - first.x, last.y - first.y
                right_way = {"left": dx < -20, "right": dx > 20, "up": dy < -20, "down": dy > 20}
                assert right_way[shot.way]
                moves += 1
            case "appear":
                assert (first, last) == (None, shot.actor)
            case "vanish":
                assert (first, last) == (shot.actor, None)
            case "colour":
                assert first is not None
                assert last is not None
                assert (first.colour, last.colour) == (shot.actor.colour, shot.way)
    assert moves > 15
