"""Questions about several pictures, and a second picture that differs from the first in one thing."""

from dataclasses import replace
from random import Random

from tools.demo_model.ask import casual, contents, number_of
from tools.demo_model.ask_place import place
from tools.demo_model.scene import FULL, Level, Scene, Thing, apart, distance, random_scene, random_thing, shifted
from tools.demo_model.turn import Turn, known_as
from tools.demo_model.words import COLOURS, ORDINALS, SHAPES, article, listing, plural


def which(rng: Random, scenes: list[Scene]) -> Turn:
    """Which picture has the triangle? One of them, both, or none."""
    everything = [thing for scene in scenes for thing in scene.things]
    seen = rng.choice(everything) if everything and rng.random() < 0.9 else None
    shape = seen.shape if seen else rng.choice(SHAPES)
    colour = seen.colour if seen else rng.choice(tuple(COLOURS))
    noun = rng.choice((shape, f"{colour} {shape}"))
    has = [k for k, scene in enumerate(scenes) if any(noun in (thing.shape, thing.name) for thing in scene.things)]
    form = rng.choice(("Which picture has {}?", "Which image has {}?", "Which picture shows {}?", "Where is {}?"))
    article_or_the = article(noun) if rng.random() < 0.4 else f"the {noun}"
    return Turn("pictures", form.format(article_or_the), holders(has))


def holders(has: list[int]) -> str:
    """It is in the first picture. / It is in the first and second picture. / It is in no picture."""
    return f"It is in the {listing([ORDINALS[k] for k in has])} picture." if has else "It is in no picture."


def which_text(_: Random, scenes: list[Scene]) -> Turn | None:
    """Which pictures have printed text."""
    has = [k for k, scene in enumerate(scenes) if scene.print is not None]
    return Turn("pictures", "Which picture has text?", holders(has)) if has else None


def inside(rng: Random, scenes: list[Scene]) -> Turn | None:
    """What one picture of several holds."""
    k = rng.randrange(len(scenes))
    found = contents(scenes[k])
    return None if found is None else Turn("pictures", f"What is in the {ORDINALS[k]} picture?", f"There is {found}.")


def count_in(rng: Random, scenes: list[Scene]) -> Turn:
    """How many of a shape one picture of several holds."""
    k = rng.randrange(len(scenes))
    things = scenes[k].things
    shape = rng.choice(things).shape if things and rng.random() < 0.8 else rng.choice(SHAPES)
    number = sum(thing.shape == shape for thing in things)
    return Turn("pictures", f"How many {plural(shape)} are in the {ORDINALS[k]} picture?", number_of(number, shape))


def colour_in(rng: Random, scenes: list[Scene]) -> Turn | None:
    """The colour of a shape in one picture of several."""
    k = rng.randrange(len(scenes))
    known = known_as(rng, scenes[k])
    if known is None or known[1] != known[0].shape:
        return None
    thing, shape = known
    word = rng.choice(("colour", "color"))
    return Turn(
        "pictures", f"What {word} is the {shape} in the {ORDINALS[k]} picture?", f"The {shape} is {thing.colour}."
    )


def more(_: Random, scenes: list[Scene]) -> Turn | None:
    """Which picture holds the most."""
    numbers = [len(scene.things) for scene in scenes]
    most = [k for k, number in enumerate(numbers) if number == max(numbers)]
    if len(most) > 1:
        return None
    return Turn("pictures", "Which picture has the most shapes?", f"It is the {ORDINALS[most[0]]} picture.")


def ask_many(rng: Random, scenes: list[Scene]) -> Turn:
    """A question that several pictures can answer."""
    askers = (which, which, which, inside, count_in, colour_in, more, which_text)
    while (turn := rng.choice(askers)(rng, scenes)) is None:
        pass
    return casual(rng, turn)


def altered(rng: Random, scene: Scene, level: Level = FULL) -> tuple[Scene, str] | None:
    """A copy of `scene` with one change, and the sentence that tells the change; None where none can be told."""
    again = replace(scene, seed=rng.getrandbits(30))
    kind = rng.choice(("colour", "colour", "gone", "new", "moved", "shape", "same"))
    if kind == "same":
        return again, "They are the same."
    if kind == "new":
        thing = random_thing(rng, level, scene.width, scene.height, scene.rgb)
        if thing is None or not apart(thing, list(scene.things), scene.print):
            return None
        if any(thing.name == other.name for other in scene.things):
            return None
        return replace(again, things=(*scene.things, thing)), f"The second picture also has {article(thing.name)}."
    known = known_as(rng, scene)
    if known is None:
        return None
    thing, name = known[0], known[0].name
    rest = tuple(other for other in scene.things if other is not thing)
    if kind == "gone":
        return replace(again, things=rest), f"The second picture has no {name}."
    if kind == "moved":
        changed = moved(rng, scene, thing)
        sentence = "" if changed is None else f"The {name} is {changed[1]} in the second picture."
        thing_now = None if changed is None else changed[0]
    elif kind == "colour":
        thing_now, sentence = recoloured(rng, scene, thing)
    else:
        shape = rng.choice([shape for shape in SHAPES if shape != thing.shape])
        thing_now = replace(thing, shape=shape)
        sentence = f"The {name} is {article(shape)} in the second picture."
    if thing_now is None or any(thing_now.name == other.name for other in rest):
        return None
    return replace(again, things=tuple(thing_now if other is thing else other for other in scene.things)), sentence


def recoloured(rng: Random, scene: Scene, thing: Thing) -> tuple[Thing | None, str]:
    """`thing` in another colour that stands out."""
    colour = rng.choice([colour for colour in COLOURS if colour != thing.colour])
    rgb = shifted(rng, COLOURS[colour], 12)
    if distance(rgb, scene.rgb) < 75:
        return None, ""
    return replace(thing, colour=colour, rgb=rgb), f"The {thing.name} is {colour} in the second picture."


def moved(rng: Random, scene: Scene, thing: Thing) -> tuple[Thing, str] | None:
    """`thing` in another ninth of the picture, and the name of that place."""
    rest = [other for other in scene.things if other is not thing]
    for _ in range(8):
        x = rng.uniform(thing.radius, scene.width - thing.radius)
        y = rng.uniform(thing.radius, scene.height - thing.radius)
        there, now = place(scene, x, y), replace(thing, x=x, y=y)
        if there is not None and there != place(scene, thing.x, thing.y) and apart(now, rest, scene.print):
            return now, there
    return None


def differing(rng: Random, level: Level, width: int, height: int) -> tuple[list[Scene], Turn]:
    """Two pictures that differ in at most one thing, and the question for it."""
    while True:
        scene = random_scene(rng, replace(level, most_things=min(4, level.most_things)), width, height, text=False)
        if (change := altered(rng, scene, level)) is not None:
            form = rng.choice(
                ("What differs?", "What is different?", "What has changed?", "What differs between the pictures?")
            )
            return [scene, change[0]], Turn("differs", form, change[1])
