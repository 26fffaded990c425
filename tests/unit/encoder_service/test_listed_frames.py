"""Videos that are lists of pictures: each is a frame, and none is left out."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from encoder_service.item import Inspection
from encoder_service.media.complexity import TooComplex
from encoder_service.media.limits import MediaLimits
from encoder_service.media.listed_frames import ListedFrames
from encoder_service.media.messages import Bounds, DecoderSettings
from encoder_service.media.video import VideoFile
from encoder_service.media.video_sound import SoundingVideoFile
from tests import pictures

BOUNDS = MediaLimits().bounds
PICTURES = [pictures.encoded(pictures.noise(30, 20, seed), "JPEG", quality=60 + 10 * seed) for seed in range(3)]
LIST = b"".join(PICTURES)
OTHERS = [pictures.encoded(pictures.noise(30, 20, seed), kind) for seed, kind in enumerate(("PNG", "WEBP", "JPEG"))]


def settings(bounds: Bounds = BOUNDS) -> DecoderSettings:
    return DecoderSettings(staging_bytes=1 << 20, memory_bytes=1 << 30, threads=1, bounds=bounds, decoders=[])


@pytest.mark.parametrize("file", [VideoFile, SoundingVideoFile])
@pytest.mark.parametrize("frames", [PICTURES, OTHERS, OTHERS[::-1]], ids=["JPEG", "PNG first", "PNG last"])
def test_frames_are_what_each_picture_is_alone(file: type[VideoFile | SoundingVideoFile], frames: list[bytes]) -> None:
    read = file(b"".join(frames), settings())
    assert read.inspect() == Inspection(30, 20, 3, 2.0, listed=True)
    out = np.empty((4, 20, 30, 3), np.uint8)
    assert list(read.decode((0, 1, 2, 2), out)) == [1, 2, 3, 4]
    expected = [np.asarray(Image.open(io.BytesIO(each)).convert("RGB")) for each in (*frames, frames[2])]
    assert np.array_equal(out, np.stack(expected))


def test_pictures_are_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = pictures.encoded(pictures.noise(30, 20), "JPEG", exif=exif)
    assert ListedFrames(turned * 2, BOUNDS).inspect() == Inspection(20, 30, 2, 2.0, listed=True)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (LIST[:-1], "cut off"),
        (LIST[: len(PICTURES[0]) + 100], "cut off"),
        (PICTURES[0] + b"\0" + PICTURES[1], "something else"),
        (PICTURES[0] + pictures.encoded(pictures.noise(30, 20), "BMP"), "something else"),
        (LIST + OTHERS[0][:-1], "cut off"),
        (LIST + OTHERS[0][:-12], "cut off"),
        (LIST + OTHERS[1][:-1], "cut off"),
        (OTHERS[0] + b"\0" + OTHERS[1], "something else"),
    ],
    ids=[
        "no end mark",
        "half a frame",
        "a byte between",
        "a BMP",
        "half a PNG",
        "no end",
        "half a WebP",
        "behind a PNG",
    ],
)
def test_what_is_no_whole_list_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        ListedFrames(data, BOUNDS)


def test_frames_of_several_sizes_are_refused() -> None:
    other = pictures.encoded(pictures.noise(20, 30), "JPEG")
    with pytest.raises(ValueError, match="size changed"):
        list(ListedFrames(PICTURES[0] + other, BOUNDS).decode((0, 1), np.empty((2, 20, 30, 3), np.uint8)))


def test_too_many_frames_are_refused() -> None:
    with pytest.raises(TooComplex):
        ListedFrames(LIST, MediaLimits(max_video_chunks=2).bounds)


def test_chunks_of_frames_count_together() -> None:
    frames = b"".join(pictures.encoded(pictures.noise(30, 20, seed)) for seed in range(3))
    with pytest.raises(TooComplex):
        ListedFrames(frames, MediaLimits(max_video_chunks=8).bounds)
