"""Questions about one picture and their answers, taken from the scene and never from its pixels.

A question is asked only where its answer is clear: a thing near the border of two places is not asked for its place.
Each asker returns a turn, or None where the scene offers no such question.
"""

from collections import Counter
from itertools import pairwise
from random import Random

from tools.demo_model.ask_place import compare, place, relation, where, who_is_there
from tools.demo_model.scene import Scene, Thing
from tools.demo_model.turn import HERE, Asker, Turn, known_as
from tools.demo_model.words import COLOURS, NUMBERS, SHAPES, article, listing, plural


def ordered(scene: Scene) -> list[Thing] | None:
    """The things from left to right, or None where two that differ stand too close in x to say."""
    things = sorted(scene.things, key=lambda thing: thing.x)
    for one, two in pairwise(things):
        if one.name != two.name and two.x - one.x < 0.035 * scene.unit:
            return None
    return things


def contents(scene: Scene) -> str | None:
    """a red circle, a blue square and the text "A7"; None where the order is not clear."""
    things = ordered(scene)
    if things is None:
        return None
    parts = [article(thing.name) for thing in things]
    if scene.print is not None:
        parts.append(f'the text "{scene.print.text}"')
    return listing(parts) if parts else "nothing"


def what(rng: Random, scene: Scene) -> Turn | None:
    """What is there at all."""
    found = contents(scene)
    if found is None:
        return None
    # fmt: off
    question = rng.choice(
        (
            "What is in the picture?", "What is in the picture?", "What is in the image?", "What do you see?",
            "What is here?", "What can you see?", "What is this?", "What does the picture show?",
            "Which shapes are in the picture?", "List the shapes.",
        )
    )
    # fmt: on
    return Turn("what", question, f"There is {found}.")


def describe(rng: Random, scene: Scene) -> Turn | None:
    """What is there, and on what."""
    found = contents(scene)
    if found is None:
        return None
    question = rng.choice(
        ("Describe the picture.", "Describe the image.", "Describe this picture.", "Describe what you see.")
    )
    return Turn("what", question, f"There is {found} on {article(scene.background)} background.")


def ground_colour(rng: Random, scene: Scene) -> Turn:
    """What colour the background has."""
    word = rng.choice(("colour", "color"))
    return Turn("background", f"What {word} is the background?", f"The background is {scene.background}.")


def count(rng: Random, scene: Scene) -> Turn:
    """How many things of a colour, a shape, both, or at all."""
    seen = rng.choice(scene.things) if scene.things and rng.random() < 0.8 else None
    shape = seen.shape if seen else rng.choice(SHAPES)
    colour = seen.colour if seen else rng.choice(tuple(COLOURS))
    kind = rng.choices(("all", "shape", "colour", "both"), (2, 4, 2, 2))[0]
    wanted = [
        thing
        for thing in scene.things
        if (kind in ("all", "colour") or thing.shape == shape) and (kind in ("all", "shape") or thing.colour == colour)
    ]
    if kind == "both":
        shape = f"{colour} {shape}"
    noun = {"all": rng.choice(("shape", "object")), "colour": f"{colour} {rng.choice(('shape', 'object'))}"}.get(
        kind, shape
    )
    form = rng.choice(
        (
            "How many {} are there{}?",
            "How many {} are there{}?",
            "How many {} do you see{}?",
            "Count the {}{}.",
            "How many {} can you count{}?",
        )
    )
    answer = number_of(len(wanted), noun)
    return Turn("count", form.format(plural(noun), rng.choice(HERE)), answer)


def number_of(number: int, noun: str) -> str:
    """There is one star. / There are two stars."""
    return f"There is one {noun}." if number == 1 else f"There are {NUMBERS[number]} {plural(noun)}."


def colour(rng: Random, scene: Scene) -> Turn | None:
    """The colour of the only thing of its shape."""
    shapes = Counter(thing.shape for thing in scene.things)
    able = [thing for thing in scene.things if shapes[thing.shape] == 1]
    if not able:
        return None
    thing, word = rng.choice(able), rng.choice(("colour", "color"))
    form = rng.choice(
        (
            "What {} is the {}?",
            "What {} is the {}?",
            "What is the {} of the {}?",
            "Which {} does the {} have?",
            "Tell me the {} of the {}.",
        )
    )
    return Turn("colour", form.format(word, thing.shape), f"The {thing.shape} is {thing.colour}.")


def shape(rng: Random, scene: Scene) -> Turn | None:
    """The shape of the only thing of its colour."""
    colours = Counter(thing.colour for thing in scene.things)
    able = [thing for thing in scene.things if colours[thing.colour] == 1]
    if not able:
        return None
    thing, noun = rng.choice(able), rng.choice(("object", "thing"))
    form = rng.choice(
        ("What shape is the {} {}?", "What is the {} {}?", "Which shape is {1} {0}?", "What is the shape of the {} {}?")
    )
    question = form.format(thing.colour, noun) if "{1}" not in form else f"Which shape is {thing.colour}?"
    return Turn("shape", question, f"It is {article(thing.shape)}.")


def exists(rng: Random, scene: Scene) -> Turn:
    """Whether there is such a thing."""
    seen = rng.choice(scene.things) if scene.things and rng.random() < 0.6 else None
    shape = seen.shape if seen and rng.random() < 0.8 else rng.choice(SHAPES)
    colour = seen.colour if seen and rng.random() < 0.8 else rng.choice(tuple(COLOURS))
    noun = rng.choice((shape, f"{colour} {shape}"))
    there = any(noun in (thing.shape, thing.name) for thing in scene.things)
    form = rng.choice(("Is there {}{}?", "Is there {}{}?", "Do you see {}{}?", "Can you see {}{}?"))
    if rng.random() < 0.1:
        return Turn("exists", f"Does the picture show {article(noun)}?", exists_answer(noun, there))
    return Turn("exists", form.format(article(noun), rng.choice(HERE)), exists_answer(noun, there))


def exists_answer(noun: str, there: bool) -> str:
    """The sentence for a yes or a no."""
    return f"Yes, there is {article(noun)}." if there else f"No, there is no {noun}."


def read(rng: Random, scene: Scene) -> Turn | None:
    """The printed text."""
    if scene.print is None:
        if rng.random() < 0.8:
            return None
        return Turn("read", "Read the text.", "There is no text.")
    noun = rng.choice(("text", "text", "word" if scene.print.text.isalpha() else "number"))
    form = rng.choice(
        (
            "Read the {}.",
            "Read the {}.",
            "What does the {} say?",
            "What is written here?",
            "What is the {}?",
            "What does it say?",
        )
    )
    return Turn("read", form.format(noun), f'It says "{scene.print.text}".')


ASKERS: tuple[tuple[Asker, float], ...] = (
    (what, 2.0), (describe, 0.5), (ground_colour, 0.2), (count, 3.0), (colour, 0.6), (shape, 0.6), (exists, 0.6),
    (relation, 4.0), (compare, 1.5), (where, 1.6), (who_is_there, 0.8), (read, 4.0),
)  # fmt: skip


def ask(rng: Random, scene: Scene, askers: tuple[tuple[Asker, float], ...] = ASKERS) -> Turn:
    """A question that the scene can answer, of a kind drawn by weight."""
    weights = [weight for _, weight in askers]
    while True:
        turn = rng.choices([asker for asker, _ in askers], weights)[0](rng, scene)
        if turn is not None:
            return casual(rng, turn)


def casual(rng: Random, turn: Turn) -> Turn:
    """Now and then the question as people type it: no capital, no question mark, or a please."""
    dice, question = rng.random(), turn.question
    if dice < 0.04:
        question = question[0].lower() + question[1:]
    elif dice < 0.08:
        question = question[:-1]
    elif dice < 0.1:
        question = question[0].lower() + question[1:-1]
    elif dice < 0.11 and question.endswith("."):
        question = f"Please {question[0].lower()}{question[1:]}"
    return Turn(turn.kind, question, turn.answer)


def follow_up(rng: Random, scene: Scene) -> list[Turn] | None:
    """Two turns of which the second says "it": only the first tells what is meant."""
    known = known_as(rng, scene)
    if known is None:
        return None
    thing, name = known
    first = Turn("exists", f"Is there {article(name)}?", f"Yes, there is {article(name)}.")
    there = place(scene, thing.x, thing.y)
    if there is not None and rng.random() < 0.5:
        return [first, Turn("follow", "Where is it?", f"It is {there}.")]
    if name != thing.shape:
        return None
    return [
        first,
        Turn("follow", rng.choice(("What colour is it?", "What color is it?")), f"The {name} is {thing.colour}."),
    ]
