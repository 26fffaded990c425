"""Short films: a scene in which one thing happens, as frames, and the questions about it."""

from dataclasses import dataclass, replace
from random import Random

from PIL import Image

from tools.demo_model.ask import casual
from tools.demo_model.draw import draw, paper
from tools.demo_model.scene import Level, Scene, Thing, apart, distance, random_scene, shifted
from tools.demo_model.turn import Turn
from tools.demo_model.words import COLOURS, DIRECTIONS, SHAPES, article


@dataclass(frozen=True, slots=True)
class Film:
    """A scene for each frame; `event` is move, appear, vanish, colour or none, and it happens to `actor`."""

    frames: tuple[Scene, ...]
    event: str
    actor: Thing
    way: str

    @property
    def sentence(self) -> str:
        return {
            "move": f"The {self.actor.name} moves {self.way}.",
            "appear": f"{article(self.actor.name).capitalize()} appears.",
            "vanish": f"The {self.actor.name} disappears.",
            "colour": f"The {self.actor.name} turns {self.way}.",
            "none": "Nothing happens.",
        }[self.event]


def random_film(rng: Random, level: Level, width: int, height: int, frames: int) -> Film:
    """A film of `frames` frames of `width` x `height` pixels."""
    while True:
        few = replace(level, most_things=min(3, level.most_things), smallest=max(0.1, level.smallest))
        scene = random_scene(rng, few, width, height, text=False)
        if not scene.things or len({thing.name for thing in scene.things}) < len(scene.things):
            continue
        event = rng.choices(("move", "appear", "vanish", "colour", "none"), (8, 2, 2, 3, 1))[0]
        film = acted(rng, scene, event, frames)
        if film is not None:
            return film


def acted(rng: Random, scene: Scene, event: str, frames: int) -> Film | None:
    """`event` happening to one thing of `scene`, or None where there is no room for it."""
    at = rng.randrange(len(scene.things))
    actor = scene.things[at]
    rest = [thing for k, thing in enumerate(scene.things) if k != at]
    cut = rng.randint(1, frames - 1)
    if event == "move":
        return moving(rng, scene, actor, rest, frames)
    if event == "colour":
        colour = rng.choice([colour for colour in COLOURS if colour != actor.colour])
        rgb = shifted(rng, COLOURS[colour], 12)
        if distance(rgb, scene.rgb) < 75 or any(thing.name == f"{colour} {actor.shape}" for thing in rest):
            return None
        stages = [actor] * cut + [replace(actor, colour=colour, rgb=rgb)] * (frames - cut)
        return Film(tuple(replace(scene, things=(*rest, stage)) for stage in stages), event, actor, colour)
    with_it, without = replace(scene, things=(*rest, actor)), replace(scene, things=tuple(rest))
    order = {"appear": (without, with_it), "vanish": (with_it, without), "none": (with_it, with_it)}[event]
    return Film((order[0],) * cut + (order[1],) * (frames - cut), event, actor, "")


def moving(rng: Random, scene: Scene, actor: Thing, rest: list[Thing], frames: int) -> Film | None:
    """The actor travels at least a third of the way across, touching nothing."""
    way = rng.choice(tuple(DIRECTIONS))
    dx, dy = DIRECTIONS[way]
    length = scene.width if dx else scene.height
    travel = rng.uniform(0.33, 0.75) * length
    if travel > length - 2 * actor.radius:
        return None
    start = rng.uniform(actor.radius, length - actor.radius - travel)
    begin = start if dx + dy > 0 else start + travel
    first, last = rng.choice(((0, frames - 1), (0, frames - 1), (1, frames - 1), (0, frames - 2)))
    stages = []
    for k in range(frames):
        done = min(1.0, max(0.0, (k - first) / max(1, last - first)))
        along = begin + (dx + dy) * done * travel
        stage = replace(actor, x=along) if dx else replace(actor, y=along)
        if not apart(stage, rest, None):
            return None
        stages.append(replace(scene, things=(*rest, stage)))
    return Film(tuple(stages), "move", actor, way)


def show(film: Film) -> list[Image.Image]:
    """The frames as pictures; the background is painted once, so that it stands still."""
    backdrop = paper(film.frames[0])
    return [draw(scene, moment, backdrop) for moment, scene in enumerate(film.frames)]


def ask_film(rng: Random, film: Film) -> Turn:
    """A question of `film_turn`'s, sometimes as people type it."""
    return casual(rng, film_turn(rng, film))


def film_turn(rng: Random, film: Film) -> Turn:
    """A question about what happens; each answer needs more than one frame, or tells that none would do."""
    actor, shapes = film.actor, [thing.shape for thing in film.frames[0].things]
    kind = rng.random()
    if kind < 0.6:
        form = rng.choice(("What happens?", "What happens in the video?", "What happens here?", "Describe the video."))
        if film.event == "move" and rng.random() < 0.12:
            return Turn("video", rng.choice(("What moves?", "Which shape moves?")), f"The {actor.name} moves.")
        return Turn("video", form, film.sentence)
    if film.event == "move" and kind < 0.85:
        form = rng.choice(
            ("Which way does the {} move?", "Where does the {} go?", "In which direction does the {} move?")
        )
        name = actor.shape if shapes.count(actor.shape) == 1 and rng.random() < 0.5 else actor.name
        if rng.random() < 0.3:
            form = rng.choice(("Which way does it move?", "Where does it go?", "In which direction does it move?"))
        return Turn("video", form.format(name), f"It moves {film.way}.")
    if film.event == "colour" and kind < 0.85:
        return Turn("video", f"Which colour does the {actor.name} become?", f"It turns {film.way}.")
    if film.event in ("move", "none") and kind < 0.93:
        return Turn("video", "Does anything move?", "Yes, it does." if film.event == "move" else "No, nothing moves.")
    everything = {noun for scene in film.frames for thing in scene.things for noun in (thing.shape, thing.name)}
    noun = rng.choice(SHAPES) if rng.random() < 0.5 else rng.choice(sorted(everything))
    answer = f"Yes, there is {article(noun)}." if noun in everything else f"No, there is no {noun}."
    return Turn("video", f"Is there {article(noun)} in the video?", answer)
