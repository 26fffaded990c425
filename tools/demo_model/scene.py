"""A scene: what stands where in a picture, and how to draw one at random. No pixels here.

Lengths are pixels of the picture; the *unit* of a picture is the square root of its area, since the preprocessing
brings every picture to about the same area whatever its size.
"""

import math
from dataclasses import dataclass
from random import Random

from tools.demo_model.words import ALONE, BACKGROUNDS, COLOURS, DIGITS, LETTERS, PRINTED, SHAPES

Colour = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Thing:
    """One object; `radius` is that of the circle around it, `style` seeds its shading and outline."""

    shape: str
    colour: str
    rgb: Colour
    x: float
    y: float
    radius: float
    angle: float
    style: int

    @property
    def name(self) -> str:
        return f"{self.colour} {self.shape}"


@dataclass(frozen=True, slots=True)
class Print:
    """Printed characters, centred at (x, y), capitals `height` pixels high; `font` is modulo the fonts there are."""

    text: str
    rgb: Colour
    x: float
    y: float
    height: float
    font: int
    spacing: float

    @property
    def width(self) -> float:
        """An estimate before any font is asked; only a row of wide bold letters is a little wider."""
        return len(self.text) * self.height * (1.05 + self.spacing)


@dataclass(frozen=True, slots=True)
class Scene:
    """One picture: its size, its background, what stands on it, and how it was taken."""

    width: int
    height: int
    background: str
    rgb: Colour
    things: tuple[Thing, ...]
    print: Print | None
    texture: str
    noise: float
    blur: float
    jpeg: int
    seed: int

    @property
    def unit(self) -> float:
        return math.sqrt(self.width * self.height)


@dataclass(frozen=True, slots=True)
class Level:
    """How hard the scenes are: a curriculum raises these. A text's length is drawn from `lengths`."""

    most_things: int = 5
    print_share: float = 0.45
    lengths: tuple[int, ...] = (1, 2, 2, 3, 3, 4, 4)
    smallest: float = 0.062
    plain: float = 0.3


EASY = Level(most_things=2, print_share=0.25, smallest=0.11, plain=0.7)
FULL = Level()
READING = Level(print_share=0.7, lengths=(1, 2, 3, 3, 4, 4, 4))


def shifted(rng: Random, colour: Colour, spread: int) -> Colour:
    """`colour` with each channel moved by at most `spread`."""
    red, green, blue = (min(255, max(0, c + rng.randint(-spread, spread))) for c in colour)
    return red, green, blue


def distance(a: Colour, b: Colour) -> float:
    """Difference as the eye has it, roughly: green counts most."""
    red, green, blue = (x - y for x, y in zip(a, b, strict=True))
    return math.sqrt(0.6 * red * red + 1.2 * green * green + 0.5 * blue * blue)


def random_text(rng: Random, lengths: tuple[int, ...] = FULL.lengths) -> str:
    """A word, a number, or letters that mean nothing: 1-4 characters, letters and digits never mixed."""
    kind = rng.random()
    if kind < 0.25:
        return rng.choice(PRINTED)
    length = rng.choice(lengths)
    if length == 1:
        return rng.choice(ALONE)
    return "".join(rng.choice(LETTERS if kind < 0.65 else DIGITS) for _ in range(length))


def random_thing(rng: Random, level: Level, width: int, height: int, ground: Colour) -> Thing | None:
    """A thing that fits in the picture and stands out from `ground`, or None where the dice fell badly."""
    colour = rng.choice(tuple(COLOURS))
    rgb = shifted(rng, COLOURS[colour], 12 if colour in ("black", "white") else 18)
    if distance(rgb, ground) < 75:
        return None
    unit = math.sqrt(width * height)
    radius = min(unit * math.exp(rng.uniform(math.log(level.smallest), math.log(0.21))), 0.45 * min(width, height))
    shape = rng.choice(SHAPES)
    angle = rng.uniform(-18, 18)
    if shape == "cross" and rng.random() < 0.25:
        angle += 45
    elif shape in ("triangle", "star") and rng.random() < 0.3:
        angle = rng.uniform(-60, 60)
    x, y = rng.uniform(radius, width - radius), rng.uniform(radius, height - radius)
    return Thing(shape, colour, rgb, x, y, radius, angle, rng.getrandbits(30))


def random_print(rng: Random, level: Level, width: int, height: int, ground: Colour) -> Print | None:
    """A text that fits, in a colour that can be read on `ground`, or None."""
    rgb = shifted(rng, rng.choice(tuple(COLOURS.values())), 15)
    if distance(rgb, ground) < 110:
        return None
    text, spacing = random_text(rng, level.lengths), rng.uniform(0.0, 0.25)
    unit = math.sqrt(width * height)
    size = unit * math.exp(rng.uniform(math.log(0.11), math.log(0.3)))
    size = min(size, 0.9 * width / (len(text) * (1.05 + spacing)), 0.8 * height)
    if size < 0.085 * unit:
        return None
    half = 0.5 * len(text) * size * (1.05 + spacing)
    x, y = rng.uniform(half, width - half), rng.uniform(0.62 * size, height - 0.62 * size)
    return Print(text, rgb, x, y, size, rng.getrandbits(16), spacing)


def apart(thing: Thing, others: list[Thing], text: Print | None) -> bool:
    """Whether `thing` touches neither the others nor the printed text."""
    for other in others:
        if math.hypot(thing.x - other.x, thing.y - other.y) < 1.08 * (thing.radius + other.radius):
            return False
    if text is None:
        return True
    dx = max(0.0, abs(thing.x - text.x) - text.width / 2)
    dy = max(0.0, abs(thing.y - text.y) - 0.6 * text.height)
    return math.hypot(dx, dy) > thing.radius


def random_scene(rng: Random, level: Level, width: int, height: int, text: bool | None = None) -> Scene:
    """A scene of `width` x `height` pixels; `text` forces printed text in or out."""
    background = rng.choice(tuple(BACKGROUNDS))
    ground = shifted(rng, BACKGROUNDS[background], 8)
    printed = None
    if text if text is not None else rng.random() < level.print_share:
        for _ in range(20):
            if (printed := random_print(rng, level, width, height, ground)) is not None:
                break
    things: list[Thing] = []
    few = 0 if printed is not None and rng.random() < 0.3 else 1
    wanted = rng.randint(few, max(few, level.most_things - (printed is not None)))
    same = rng.random() < 0.35
    for _ in range(12 * wanted):
        if len(things) == wanted:
            break
        thing = random_thing(rng, level, width, height, ground)
        if thing is None or not apart(thing, things, printed):
            continue
        if same and things and rng.random() < 0.7:
            thing = like(thing, rng.choice(things), rng)
        things.append(thing)
    plain = rng.random() < level.plain
    texture = "plain" if plain else rng.choice(("plain", "slope", "stripes", "checks", "clouds", "speckle"))
    noise = 0.0 if plain else rng.choice((0.0, 3.0, 6.0, 10.0))
    blur = rng.uniform(0.3, 0.9) if not plain and rng.random() < 0.15 else 0.0
    jpeg = rng.randint(60, 95) if rng.random() < 0.3 else 0
    return Scene(
        width, height, background, ground, tuple(things), printed, texture, noise, blur, jpeg, rng.getrandbits(30)
    )


def like(thing: Thing, other: Thing, rng: Random) -> Thing:
    """`thing` at its place with the shape of `other`, its colour, or both: so that there is something to count."""
    both = rng.random()
    shape = other.shape if both < 0.7 else thing.shape
    colour, rgb = (other.colour, other.rgb) if both > 0.35 else (thing.colour, thing.rgb)
    return Thing(shape, colour, rgb, thing.x, thing.y, thing.radius, thing.angle, thing.style)
