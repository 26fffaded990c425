"""Scenes to pixels. A small picture is drawn at twice its size and reduced, so that edges are smooth."""

import io
import math
from random import Random

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter

from tools.demo_model.letters import put_print
from tools.demo_model.scene import Scene, Thing

Corners = list[tuple[float, float]]


def turned(points: Corners, thing: Thing, scale: float) -> Corners:
    """Points of the unit circle's frame to canvas pixels: turned, grown, moved."""
    turn = math.radians(thing.angle)
    cos, sin = math.cos(turn) * thing.radius, math.sin(turn) * thing.radius
    return [((thing.x + x * cos - y * sin) * scale, (thing.y + x * sin + y * cos) * scale) for x, y in points]


def corners(shape: str, rng: Random) -> Corners:
    """The outline of a shape with corners, within the unit circle, upright."""
    if shape == "square":
        h = 0.8
        return [(-h, -h), (h, -h), (h, h), (-h, h)]
    if shape == "triangle":
        top, foot, wide = -1.0, rng.uniform(0.5, 0.75), rng.uniform(0.75, 0.95)
        return [(0, top), (wide, foot), (-wide, foot)]
    if shape == "star":
        inner = rng.uniform(0.38, 0.52)
        reach = [1.0 if k % 2 == 0 else inner for k in range(10)]
        return [(r * math.sin(k * math.pi / 5), -r * math.cos(k * math.pi / 5)) for k, r in enumerate(reach)]
    a, w = 0.95, rng.uniform(0.22, 0.36)
    return [(-w, -a), (w, -a), (w, -w), (a, -w), (a, w), (w, w), (w, a), (-w, a), (-w, w), (-a, w), (-a, -w), (-w, -w)]


def paint(draw: ImageDraw.ImageDraw, thing: Thing, scale: float, fill: int | tuple[int, int, int], rng: Random) -> None:
    """Fill the thing's shape on `draw`."""
    if thing.shape in ("circle", "ring"):
        x, y, r = thing.x * scale, thing.y * scale, 0.95 * thing.radius * scale
        box = (x - r, y - r, x + r, y + r)
        if thing.shape == "circle":
            draw.ellipse(box, fill=fill)
        else:
            draw.ellipse(box, outline=fill, width=max(2, round(r * rng.uniform(0.28, 0.46))))
    else:
        draw.polygon(turned(corners(thing.shape, rng), thing, scale), fill=fill)


def put_thing(canvas: Image.Image, thing: Thing, scale: float) -> None:
    """Draw `thing` on the canvas: flat, or lit from one side."""
    rng = Random(thing.style)
    lit, seed = rng.random() < 0.4, rng.getrandbits(30)
    if not lit:
        paint(ImageDraw.Draw(canvas), thing, scale, thing.rgb, Random(seed))
        return
    mask = Image.new("L", canvas.size)
    paint(ImageDraw.Draw(mask), thing, scale, 255, Random(seed))
    box = mask.getbbox()
    if box is None:
        return
    turn, strength = rng.uniform(0, 2 * math.pi), rng.uniform(8, 26)
    across = np.linspace(-1, 1, box[2] - box[0], dtype=np.float32)[None, :] * math.cos(turn)
    down = np.linspace(-1, 1, box[3] - box[1], dtype=np.float32)[:, None] * math.sin(turn)
    light = (across + down)[..., None] * strength + np.asarray(thing.rgb, np.float32)
    canvas.paste(Image.fromarray(light.clip(0, 255).astype(np.uint8)), box[:2], mask.crop(box))


def ground(scene: Scene) -> NDArray[np.float32]:
    """The background [height, width, 3] as floats."""
    rng = np.random.default_rng(scene.seed)
    high, wide = scene.height, scene.width
    flat = np.empty((high, wide, 3), np.float32)
    flat[:] = scene.rgb
    if scene.texture == "plain":
        return flat
    amount = float(rng.uniform(6, 20))
    x = np.arange(wide, dtype=np.float32)[None, :] / scene.unit
    y = np.arange(high, dtype=np.float32)[:, None] / scene.unit
    turn, period = float(rng.uniform(0, 2 * math.pi)), float(rng.uniform(0.05, 0.25))
    along = x * math.cos(turn) + y * math.sin(turn)
    if scene.texture == "slope":
        wave = along * 1.6
    elif scene.texture == "stripes":
        wave = np.sign(np.sin(along * (2 * math.pi / period)))
    elif scene.texture == "checks":
        wave = np.sign(np.sin(x * (math.pi / period))) * np.sign(np.sin(y * (math.pi / period)))
    else:
        cells = 6 if scene.texture == "clouds" else 48
        coarse = Image.fromarray(rng.integers(0, 256, (cells, cells), dtype=np.uint8))
        wave = np.asarray(coarse.resize((wide, high), Image.Resampling.BILINEAR), np.float32) / 128 - 1
    flat += (amount * np.broadcast_to(wave, (high, wide)))[..., None]
    return flat


def finish(canvas: Image.Image, scene: Scene, moment: int = 0) -> Image.Image:
    """What a camera and a file do: blur, noise and JPEG."""
    if scene.blur:
        canvas = canvas.filter(ImageFilter.GaussianBlur(scene.blur * scene.unit / 160))
    if scene.noise:
        rng = np.random.default_rng((scene.seed, moment))
        grain = rng.standard_normal((scene.height, scene.width, 1 + 2 * (scene.seed % 2)), dtype=np.float32)
        noisy = np.asarray(canvas, np.float32) + scene.noise * grain
        canvas = Image.fromarray(noisy.clip(0, 255).astype(np.uint8))
    if scene.jpeg:
        file = io.BytesIO()
        canvas.save(file, "JPEG", quality=scene.jpeg)
        canvas = Image.open(file).convert("RGB")
    return canvas


def draw(scene: Scene, moment: int = 0, backdrop: Image.Image | None = None) -> Image.Image:
    """The picture of `scene`, RGB of its width and height; `moment` varies the grain between a film's frames."""
    scale = 2 if max(scene.width, scene.height) <= 280 else 1
    canvas = backdrop.copy() if backdrop is not None else paper(scene)
    if scale != 1:
        canvas = canvas.resize((scene.width * scale, scene.height * scale), Image.Resampling.NEAREST)
    for thing in scene.things:
        put_thing(canvas, thing, scale)
    if scene.print is not None:
        put_print(canvas, scene.print, scale)
    if scale != 1:
        canvas = canvas.reduce(scale)
    return finish(canvas, scene, moment)


def paper(scene: Scene) -> Image.Image:
    """The empty background of `scene`, to be shared by a film's frames."""
    return Image.fromarray(ground(scene).clip(0, 255).astype(np.uint8))
