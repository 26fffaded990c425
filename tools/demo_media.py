"""The demo's media: a drawing and a short film of our own, and a photograph that scikit-image ships.

python -m tools.demo_media FOLDER      # writes them there: drawing.png, film.mp4, photograph.png
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

import av
import numpy as np
import skimage
from PIL import Image, ImageDraw

_SOUND_RATE = 16_000
_WHITE, _RED, _BLUE, _GREEN = (250, 250, 250), (220, 50, 47), (40, 90, 210), (40, 160, 60)


def photograph() -> bytes:
    """A cat, 451 × 300, as a PNG file."""
    return (Path(skimage.__file__).parent / "data" / "chelsea.png").read_bytes()


def drawing() -> bytes:
    """A red circle left of a blue square, 320 × 224, as a PNG file."""
    picture = Image.new("RGB", (320, 224), _WHITE)
    draw = ImageDraw.Draw(picture)
    draw.ellipse((40, 62, 140, 162), fill=_RED)
    draw.rectangle((190, 67, 280, 157), fill=_BLUE)
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def film(seconds: float = 2.0, rate: int = 8, sound: np.ndarray | None = None) -> bytes:
    """A green circle that crosses from left to right, 224 × 160, as an MP4 file; with a `sound` of its own, int16 [n],
    16,000 a second, as a Matroska file, which takes every sample as it is."""
    count = round(seconds * rate)
    file = io.BytesIO()
    with av.open(file, "w", format="mp4" if sound is None else "matroska") as container:
        stream = container.add_stream("mpeg4", rate=rate)
        stream.width, stream.height, stream.pix_fmt = 224, 160, "yuv420p"
        stream.bit_rate = 1_000_000
        track = None if sound is None else container.add_stream("pcm_s16le", rate=_SOUND_RATE, layout="mono")
        for number in range(count):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(_frame(number / (count - 1)))))
        container.mux(stream.encode())
        if track is not None and sound is not None:
            heard = av.AudioFrame.from_ndarray(sound[None], "s16", "mono")
            heard.sample_rate = _SOUND_RATE
            container.mux([*track.encode(heard), *track.encode()])
    return file.getvalue()


def _frame(progress: float) -> np.ndarray:
    """One frame, [160, 224, 3] uint8; `progress` goes from 0 at the left edge to 1 at the right."""
    picture = Image.new("RGB", (224, 160), _WHITE)
    left = 8 + progress * (224 - 16 - 64)
    ImageDraw.Draw(picture).ellipse((left, 48, left + 64, 112), fill=_GREEN)
    return np.asarray(picture)


def main() -> None:
    """Writes all three to the folder that the command line names, by default this one."""
    parser = argparse.ArgumentParser(prog="python -m tools.demo_media", description="Writes media for the demo.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path(), help="default: this one")
    folder = parser.parse_args().folder
    if not folder.is_dir():
        parser.error(f"{folder} is not a folder")
    for name, content in (("drawing.png", drawing()), ("film.mp4", film()), ("photograph.png", photograph())):
        (folder / name).write_bytes(content)
        print(folder / name)


if __name__ == "__main__":
    main()
