"""Printed text to pixels, character by character, in faces of many kinds: sans and serif, light and bold, narrow."""

import math
from functools import lru_cache
from importlib.resources import as_file, files

from PIL import Image, ImageDraw, ImageFont

from tools.demo_model.scene import Print

FACES = (
    *(("matplotlib", f"mpl-data/fonts/ttf/{name}.ttf") for name in (
        "DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSerif",
        "DejaVuSerif-Bold", "STIXGeneral", "STIXGeneralBol", "cmss10", "cmb10", "cmr10", "cmtt10",
    )),
    *(("font_source_sans_pro", f"files/SourceSansPro-{weight}.ttf") for weight in (
        "Light", "Regular", "Semibold", "Bold", "Black",
    )),
    *(("font_manrope", f"files/Manrope-{weight}.ttf") for weight in ("Light", "Medium", "ExtraBold")),
    *(("font_caladea", f"files/Caladea-{weight}.ttf") for weight in ("Regular", "Bold")),
    ("", ""), ("", ""), ("", ""),
)  # fmt: skip
"""Package and file of each face; an empty name is the face that Pillow carries. It comes more often than others, since
most screens print in a plain sans serif."""

STRETCHES = (1.0, 1.0, 1.0, 0.87, 0.75)
"""Widths of characters as shares of the face's own."""

Face = ImageFont.FreeTypeFont | ImageFont.ImageFont


@lru_cache(maxsize=2048)
def face(index: int, size: int) -> Face:
    """Face `index` modulo the faces there are, at `size` pixels to the em."""
    package, name = FACES[index % len(FACES)]
    if not package:
        return ImageFont.load_default(size)
    with as_file(files(package).joinpath(name)) as path:
        return ImageFont.truetype(str(path), size)


def face_of(text: Print, scale: float) -> tuple[Face, float]:
    """The face whose capitals are `text.height` high on the canvas (capitals are about 0.7 em), and its stretch."""
    stretch = STRETCHES[text.font // len(FACES) % len(STRETCHES)]
    return face(text.font % len(FACES), max(6, round(text.height * scale / 0.72))), stretch


def print_boxes(text: Print, scale: float = 1.0) -> list[tuple[float, float, float, float]]:
    """The box (left, top, right, bottom) of each character in canvas pixels."""
    letters, stretch = face_of(text, scale)
    widths = [letters.getlength(c) * stretch for c in text.text]
    gap = text.spacing * text.height * scale
    x = text.x * scale - (sum(widths) + gap * (len(widths) - 1)) / 2
    half = text.height * scale / 2
    boxes = []
    for wide in widths:
        boxes.append((x, text.y * scale - half, x + wide, text.y * scale + half))
        x += wide + gap
    return boxes


def put_print(canvas: Image.Image, text: Print, scale: float) -> None:
    """Draw the printed text, character by character."""
    draw, (letters, stretch) = ImageDraw.Draw(canvas), face_of(text, scale)
    for character, (left, top, _, bottom) in zip(text.text, print_boxes(text, scale), strict=True):
        if stretch == 1.0:
            draw.text((left, bottom), character, fill=text.rgb, font=letters, anchor="ls")
            continue
        margin = math.ceil(0.3 * (bottom - top))  # of strokes that reach past a character's box
        wide, high = math.ceil(letters.getlength(character)) + 2 * margin, math.ceil(bottom - top) + 2 * margin
        mask = Image.new("L", (wide, high))
        ImageDraw.Draw(mask).text((margin, high - margin), character, fill=255, font=letters, anchor="ls")
        narrow = mask.resize((max(1, round(wide * stretch)), high), Image.Resampling.BOX)
        canvas.paste(text.rgb, (round(left - margin * stretch), round(bottom) - high + margin), narrow)
