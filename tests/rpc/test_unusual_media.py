"""Unusual pictures and videos that are fine: the rows are those of what they show."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image, ImageOps

from encoder_service.media.video import open_reader
from tests import bad_files, pictures
from tests.rpc.encoder_client import VIDEO, image, video
from twinlens.v1 import media_pb2


def small(name: str = "coffee", mode: str = "RGB") -> Image.Image:
    return pictures.photograph(name).resize((120, 80)).convert(mode)


def deep(channels: int, kind: int) -> bytes:
    """A PNG of 16 bits a channel, whose lower bytes say something else than the upper ones; nothing is transparent."""
    upper = np.asarray(small()).astype(np.uint16)[..., [0, 1, 2, 0][:channels]]
    values = upper * 256 + upper[::-1]
    if kind in (bad_files.GREY_ALPHA, bad_files.COLOUR_ALPHA):
        values[..., -1] = 0xFFFF
    return bad_files.deep_png(values, kind)


def upright(orientation: int, kind: str = "PNG") -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return pictures.encoded(small(), kind, exif=exif)


def animated(kind: str, **settings: object) -> bytes:
    frames = [small(name).quantize(64) if kind == "GIF" else small(name) for name in ("coffee", "chelsea")]
    return pictures.encoded(frames[0], kind, save_all=True, append_images=frames[1:], duration=100, **settings)


PICTURES: dict[str, Callable[[], bytes]] = {
    "CMYK": lambda: pictures.encoded(small(mode="CMYK"), "JPEG"),
    "a grey JPEG": lambda: pictures.encoded(small(mode="L"), "JPEG"),
    "a progressive JPEG": lambda: pictures.encoded(small(), "JPEG", progressive=True),
    "16-bit grey": lambda: deep(1, bad_files.GREY),
    "16-bit colour": lambda: deep(3, bad_files.COLOUR),
    "16-bit grey and alpha": lambda: deep(2, bad_files.GREY_ALPHA),
    "16-bit colour and alpha": lambda: deep(4, bad_files.COLOUR_ALPHA),
    "a palette with transparency": lambda: pictures.encoded(small().quantize(32), transparency=3),
    "grey and alpha": lambda: pictures.encoded(small(mode="LA")),
    "colour and alpha": lambda: pictures.encoded(small(mode="RGBA")),
    "bilevel": lambda: pictures.encoded(small(mode="1")),
    "an animated GIF": lambda: animated("GIF"),
    "a GIF with transparency": lambda: pictures.encoded(small().quantize(32), "GIF", transparency=3),
    "an animated PNG": lambda: animated("PNG"),
    "an animated WebP": lambda: animated("WEBP", lossless=True),
    "a WebP": lambda: pictures.encoded(small(), "WEBP"),
    "a WebP with alpha": lambda: pictures.encoded(small(mode="RGBA"), "WEBP", lossless=True),
    "an AVIF": lambda: pictures.encoded(small(), "AVIF"),
    "an AVIF with alpha": lambda: pictures.encoded(small(mode="RGBA"), "AVIF"),
    "an animated AVIF": lambda: animated("AVIF"),
    "an AVIF on its side": lambda: upright(6, "AVIF"),
    "a TIFF": lambda: pictures.encoded(small(), "TIFF"),
    "a TIFF with LZW": lambda: pictures.encoded(small(), "TIFF", compression="tiff_lzw"),
    "a TIFF of several pages": lambda: animated("TIFF"),
    "a TIFF on its side": lambda: upright(6, "TIFF"),
    "a TIFF with alpha": lambda: pictures.encoded(small(mode="RGBA"), "TIFF"),
    "a TIFF of CMYK": lambda: pictures.encoded(small(mode="CMYK"), "TIFF"),
    "a fax": lambda: pictures.encoded(small(mode="1"), "TIFF", compression="group4"),
    "a BMP": lambda: pictures.encoded(small(), "BMP"),
    "a BMP with a palette": lambda: pictures.encoded(small().quantize(16), "BMP"),
    **{f"orientation {number}": (lambda number=number: upright(number)) for number in range(1, 9)},
    "a JPEG on its side": lambda: upright(6, "JPEG"),
    "a WebP on its side": lambda: upright(8, "WEBP"),
}


@pytest.mark.parametrize("name", PICTURES)
def test_unusual_pictures_give_the_rows_of_what_they_show(strict, name):
    data = PICTURES[name]()
    ours, plain = strict.client.encode(image(data), image(pictures.encoded(shown(data, name))))
    assert ours.error is None
    assert ours.header.grid == plain.header.grid
    assert np.array_equal(ours.rows, plain.rows)


def shown(data: bytes, name: str) -> Image.Image:
    """The picture as transformers loads it: upright, RGB, on white; of 16-bit values, the upper byte."""
    if name.startswith("16-bit"):
        picture = np.asarray(small())
        return Image.fromarray(np.repeat(picture[..., :1], 3, 2) if "grey" in name else picture)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    if not upright.has_transparency_data:
        return upright.convert("RGB")
    return Image.alpha_composite(Image.new("RGBA", upright.size, "white"), upright.convert("RGBA")).convert("RGB")


@pytest.mark.parametrize("container", ["mp4", "mov", "matroska", "avi", "mpegts", "flv"])
def test_every_usual_container_is_read(strict, container):
    codec = {"mpegts": "mpeg2video", "flv": "flv"}.get(container, "mpeg4")
    found = strict.client.one(video(pictures.video(pictures.frames(20), 25, container, codec)))
    assert found.error is None
    assert (found.header.grid.t, len(found.rows)) == (2, found.header.tokens)


def test_a_transport_stream_gives_the_rows_of_the_same_frames_in_matroska(strict):
    frames = pictures.frames(8)
    stream, plain = (pictures.video(frames, 10, form, "mpeg2video") for form in ("mpegts", "matroska"))
    ours, expected = strict.client.encode(video(stream, fps=10.0), video(plain, fps=10.0))
    assert ours.error is None
    assert ours.header.grid == expected.header.grid
    assert np.array_equal(ours.rows, expected.rows)


@pytest.mark.parametrize("degrees", [90, 180, 270])
def test_a_video_that_a_phone_turned_gives_the_rows_of_the_upright_one(strict, degrees):
    plain = pictures.video(pictures.frames(8, 160, 96), fps=2)
    reader = open_reader(plain)
    frames = np.rot90(reader.get_batch(range(len(reader))).asnumpy(), -degrees // 90, (1, 2))
    count, height, width = frames.shape[:3]
    block = media_pb2.PixelBlock(data=np.ascontiguousarray(frames).tobytes(), frames=count, height=height, width=width)
    turned, upright = strict.client.encode(
        video(bad_files.turned(plain, degrees)), media_pb2.Media(modality=VIDEO, pixels=block)
    )
    assert turned.header.grid == upright.header.grid
    assert list(turned.header.timestamps) == list(upright.header.timestamps)
    assert np.array_equal(turned.rows, upright.rows)


def test_frames_that_stand_unevenly_are_sampled_by_their_number(strict):
    """As the reference does: seconds are a frame's number by the mean rate."""
    data, _ = bad_files.uneven()
    found = strict.client.one(video(data, fps=5))
    assert found.error is None
    assert found.header.grid.t * 2 == 6
    assert list(found.header.timestamps) == pytest.approx([0.1, 0.5, 0.9])
