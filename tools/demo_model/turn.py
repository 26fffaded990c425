"""A question with its answer, and how a thing is called in one."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tools.demo_model.scene import Scene, Thing


@dataclass(frozen=True, slots=True)
class Turn:
    """One question, its one right answer, and the kind that it is counted under."""

    kind: str
    question: str
    answer: str


Asker = Callable[[Random, Scene], Turn | None]
HERE = ("", "", "", " in the picture", " in the image")


def known_as(rng: Random, scene: Scene) -> tuple[Thing, str] | None:
    """A thing and a name that fits no other: its shape where that is unique, else colour and shape."""
    shapes = Counter(thing.shape for thing in scene.things)
    names = Counter(thing.name for thing in scene.things)
    able = [thing for thing in scene.things if names[thing.name] == 1]
    if not able:
        return None
    thing = rng.choice(able)
    return thing, thing.shape if shapes[thing.shape] == 1 and rng.random() < 0.5 else thing.name
