"""Pictures and videos for tests: real photographs, drawn ones, and the same in every encoding."""

from __future__ import annotations

import io
from functools import lru_cache
from typing import Any

import numpy as np
from PIL import Image
from skimage import data


@lru_cache
def photograph(name: str = "astronaut") -> Image.Image:
    """A photograph that scikit-image ships: astronaut (512 × 512), coffee (600 × 400), chelsea (451 × 300), rocket."""
    return Image.fromarray(getattr(data, name)()).convert("RGB")


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    """A picture of random pixels; each seed gives another."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def encoded(image: Image.Image, kind: str = "PNG", **settings: Any) -> bytes:
    """A picture as a file."""
    file = io.BytesIO()
    image.save(file, kind, **settings)
    return file.getvalue()


def frames(count: int, width: int = 128, height: int = 96, seed: int = 0) -> np.ndarray:
    """A moving square over a fixed pattern, [count, height, width, 3] uint8."""
    ground = np.random.default_rng(seed).integers(0, 120, (height, width, 3), dtype=np.uint8)
    out = np.repeat(ground[None], count, axis=0)
    for index in range(count):
        left = (3 * index) % (width - 24)
        out[index, 20:60, left : left + 24] = (250, 30 + 5 * (index % 40), 40)
    return out


def video(pixels: np.ndarray, fps: int = 10, container: str = "mp4", codec: str = "mpeg4") -> bytes:
    """Frames [T, H, W, 3] as a video file."""
    import av  # tests that write no video do without

    file = io.BytesIO()
    with av.open(file, "w", format=container) as out:
        stream: Any = out.add_stream(codec, rate=fps)
        stream.height, stream.width = pixels.shape[1:3]
        stream.pix_fmt = "yuv420p"
        for frame in pixels:
            out.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        out.mux(stream.encode())
    return file.getvalue()
