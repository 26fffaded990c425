"""A second, independent renderer of the same scenes: for evaluation only, never for training.

It shares no drawing code with the first: four-fold supersampling, regular polygons, crosses as two bars, fonts of the
operating system. If the system has only the fonts of the training, it uses Pillow's own.
"""

import math
from functools import lru_cache
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from tools.demo_model.scene import Scene, Thing

FOLDERS = (Path("/usr/share/fonts"), Path("/Library/Fonts"), Path("C:/Windows/Fonts"))
PLAIN = ("liberation", "freesans", "freeserif", "freemono", "arial", "times", "roboto", "opensans", "notosans-")
SLANTED = ("italic", "oblique", "thin")
SCALE = 4


@lru_cache(maxsize=1)
def system_fonts() -> tuple[str, ...]:
    """Upright Latin text fonts of the system that training does not know."""
    found = sorted(path for folder in FOLDERS if folder.exists() for path in folder.rglob("*.ttf"))
    names = [(str(path), path.name.lower()) for path in found]
    return tuple(p for p, name in names if name.startswith(PLAIN) and not any(word in name for word in SLANTED))


def regular(thing: Thing, points: int, inner: float | None = None) -> list[tuple[float, float]]:
    """A polygon with `points` corners on the circle, the first one up; a star where `inner` is given."""
    steps = points if inner is None else 2 * points
    corners = []
    for k in range(steps):
        r = thing.radius * (inner if inner is not None and k % 2 else 1.0)
        turn = math.radians(thing.angle - 90 + 360 * k / steps + (45 if points == 4 else 0))
        corners.append(((thing.x + r * math.cos(turn)) * SCALE, (thing.y + r * math.sin(turn)) * SCALE))
    return corners


def bar(pen: ImageDraw.ImageDraw, thing: Thing, turn: float) -> None:
    """One bar of a cross."""
    angle = math.radians(thing.angle + turn)
    dx, dy = 0.92 * thing.radius * math.cos(angle) * SCALE, 0.92 * thing.radius * math.sin(angle) * SCALE
    x, y = thing.x * SCALE, thing.y * SCALE
    pen.line((x - dx, y - dy, x + dx, y + dy), fill=thing.rgb, width=round(0.55 * thing.radius * SCALE))


def put(pen: ImageDraw.ImageDraw, thing: Thing) -> None:
    """Draw one thing."""
    x, y, r = thing.x * SCALE, thing.y * SCALE, thing.radius * SCALE
    if thing.shape == "circle":
        pen.ellipse((x - r, y - r, x + r, y + r), fill=thing.rgb)
    elif thing.shape == "ring":
        pen.ellipse((x - r, y - r, x + r, y + r), outline=thing.rgb, width=round(0.33 * r))
    elif thing.shape == "cross":
        bar(pen, thing, 0)
        bar(pen, thing, 90)
    else:
        corners = {"square": (4, None), "triangle": (3, None), "star": (5, 0.42)}[thing.shape]
        pen.polygon(regular(thing, *corners), fill=thing.rgb)


def draw(scene: Scene) -> Image.Image:
    """The scene on a plain background."""
    canvas = Image.new("RGB", (scene.width * SCALE, scene.height * SCALE), scene.rgb)
    pen = ImageDraw.Draw(canvas)
    for thing in scene.things:
        put(pen, thing)
    if (text := scene.print) is not None:
        files, size = system_fonts(), round(text.height * SCALE / 0.72)
        face = ImageFont.truetype(files[text.font % len(files)], size) if files else ImageFont.load_default(size)
        pen.text((text.x * SCALE, text.y * SCALE), text.text, fill=text.rgb, font=face, anchor="mm")
    return canvas.resize((scene.width, scene.height), Image.Resampling.LANCZOS)
