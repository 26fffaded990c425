"""Held-out questions for measuring the model: pictures as files, a question, the right answer, and its kind."""

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from PIL import Image

from tools.demo_model import ask, ask_many, ask_place, film, other
from tools.demo_model.draw import draw
from tools.demo_model.scene import FULL, Scene, random_scene
from tools.demo_model.sizes import random_source, random_target
from tools.demo_model.turn import Asker, Turn

Draw = Callable[[Scene], Image.Image]
DRAWERS: dict[str, Draw] = {"own": draw, "other": other.draw}

SINGLE: dict[str, tuple[Asker, ...]] = {
    "colour": (ask.colour,),
    "shape": (ask.shape,),
    "count": (ask.count,),
    "relation": (ask_place.relation, ask_place.compare),
    "where": (ask_place.where, ask_place.who_is_there),
    "exists": (ask.exists,),
    "what": (ask.what, ask.describe),
    "read": (ask.read,),
}
KINDS = (*SINGLE, "differs", "pictures", "video")


@dataclass(frozen=True, slots=True)
class Case:
    """`files` are PNG or JPEG pictures, or the frames of one film at two a second where `kind` is video."""

    kind: str
    files: tuple[bytes, ...]
    question: str
    answer: str


def encoded(image: Image.Image, rng: Random) -> bytes:
    """PNG, or JPEG in one of three."""
    file = io.BytesIO()
    if rng.random() < 0.33:
        image.save(file, "JPEG", quality=rng.randint(80, 95))
    else:
        image.save(file, "PNG")
    return file.getvalue()


def one_picture(kind: str, rng: Random, drawer: Draw) -> Case | None:
    """A case about one picture, or None where the dice gave a scene without such a question."""
    height, width = random_source(rng, random_target(rng))
    scene = random_scene(rng, FULL, width, height, text=True if kind == "read" else None)
    turn = rng.choice(SINGLE[kind])(rng, scene)
    if turn is None or (kind == "read" and scene.print is None):
        return None
    return Case(kind, (encoded(drawer(scene), rng),), turn.question, turn.answer)


def two_pictures(kind: str, rng: Random, drawer: Draw) -> Case:
    """A case about two pictures."""
    height, width = random_source(rng, random_target(rng))
    if kind == "differs":
        scenes, turn = ask_many.differing(rng, FULL, width, height)
    else:
        again = random_source(rng, random_target(rng))
        scenes = [random_scene(rng, FULL, width, height), random_scene(rng, FULL, again[1], again[0])]
        turn = ask_many.ask_many(rng, scenes)
    return Case(kind, tuple(encoded(drawer(scene), rng) for scene in scenes), turn.question, turn.answer)


def one_film(rng: Random, drawer: Draw) -> Case:
    """A case about a film of four to eight frames."""
    frames = rng.choice((4, 6, 8))
    height, width = random_source(rng, random_target(rng, frames), frames)
    shot = film.random_film(rng, FULL, width, height, frames)
    turn: Turn = film.ask_film(rng, shot)
    images = film.show(shot) if drawer is draw else [drawer(scene) for scene in shot.frames]
    files = []
    for image in images:
        file = io.BytesIO()
        image.save(file, "PNG")
        files.append(file.getvalue())
    return Case("video", tuple(files), turn.question, turn.answer)


def cases(kind: str, number: int, seed: int, renderer: str = "own") -> Iterator[Case]:
    """`number` cases of `kind`, each from a scene of its own: the same for the same seed and renderer."""
    rng, drawer, made = Random(f"{seed} {kind}"), DRAWERS[renderer], 0
    while made < number:
        if kind == "video":
            case: Case | None = one_film(rng, drawer)
        elif kind in SINGLE:
            case = one_picture(kind, rng, drawer)
        else:
            case = two_pictures(kind, rng, drawer)
        if case is not None:
            made += 1
            yield case
