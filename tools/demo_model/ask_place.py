"""Questions about where things are: beside each other, and in which ninth of the picture.

They are asked only where the answer is clear: not of a thing near a border between two places, or nearly level with
another.
"""

from itertools import pairwise
from random import Random

from tools.demo_model.scene import Scene, Thing
from tools.demo_model.turn import HERE, Turn, known_as
from tools.demo_model.words import PLACES, SIDES, article, listing


def place(scene: Scene, x: float, y: float) -> str | None:
    """Which ninth of the picture (x, y) is in, or None near a border between two."""
    cells = []
    for at, size in ((y, scene.height), (x, scene.width)):
        third = 3 * at / size
        if min(abs(third - 1), abs(third - 2)) < 0.12:
            return None
        cells.append(int(third))
    return PLACES[cells[0]][cells[1]]


def beside(scene: Scene, thing: Thing, side: str) -> list[Thing] | None:
    """The things on that side of `thing`, left to right; None where one stands too nearly level with it to say."""
    margin, found = 0.06 * scene.unit, []
    for other in scene.things:
        if other is thing:
            continue
        ahead = {
            "left": thing.x - other.x,
            "right": other.x - thing.x,
            "above": thing.y - other.y,
            "below": other.y - thing.y,
        }
        if abs(ahead[side]) < margin:
            return None
        if ahead[side] > 0:
            found.append(other)
    found.sort(key=lambda other: other.x)
    close = any(two.x - one.x < 0.035 * scene.unit for one, two in pairwise(found))
    return None if close and len(found) > 1 else found


def side_phrase(rng: Random, side: str) -> str:
    """left of, to the left of, above."""
    if side in ("left", "right"):
        return rng.choice((f"{side} of", f"to the {side} of"))
    return side


def relation(rng: Random, scene: Scene) -> Turn | None:
    """What is on one side of a thing."""
    known, side = known_as(rng, scene), rng.choice(SIDES)
    if known is None or len(scene.things) < 2:
        return None
    thing, name = known
    found = beside(scene, thing, side)
    if found is None or len(found) > 2:
        return None
    answers = {0: "There is nothing.", 1: "It is {}.", 2: "They are {}."}
    answer = answers[len(found)].format(listing([article(other.name) for other in found]) if found else "")
    verb = rng.choice(("What is", "What is", "What is", "Which shape is", "What do you see"))
    return Turn("relation", f"{verb} {side_phrase(rng, side)} the {name}?", answer)


def compare(rng: Random, scene: Scene) -> Turn | None:
    """Whether one thing is on that side of another."""
    first, second = known_as(rng, scene), known_as(rng, scene)
    if first is None or second is None or first[0] is second[0]:
        return None
    side = rng.choice(SIDES)
    (one, name), (two, other) = first, second
    gap = two.x - one.x if side in ("left", "right") else two.y - one.y
    if abs(gap) < 0.08 * scene.unit:
        return None
    is_so = (gap > 0) == (side in ("left", "above"))
    question = f"Is the {name} {side_phrase(rng, side)} the {other}?"
    return Turn("relation", question, "Yes, it is." if is_so else "No, it is not.")


def where(rng: Random, scene: Scene) -> Turn | None:
    """Which ninth of the picture a thing or the text is in."""
    if scene.print is not None and rng.random() < 0.2:
        x, y, name = (
            scene.print.x,
            scene.print.y,
            rng.choice(("text", "word" if scene.print.text.isalpha() else "number")),
        )
    elif (known := known_as(rng, scene)) is not None:
        x, y, name = known[0].x, known[0].y, known[1]
    else:
        return None
    there = place(scene, x, y)
    return None if there is None else Turn("where", f"Where is the {name}{rng.choice(HERE)}?", f"It is {there}.")


def who_is_there(rng: Random, scene: Scene) -> Turn | None:
    """The thing in a named corner or side."""
    if not scene.things:
        return None
    places = {id(thing): place(scene, thing.x, thing.y) for thing in scene.things}
    thing = rng.choice(scene.things)
    there = places[id(thing)]
    if there is None or None in places.values() or list(places.values()).count(there) != 1:
        return None
    return Turn("where", f"What is {there}?", f"It is {article(thing.name)}.")
