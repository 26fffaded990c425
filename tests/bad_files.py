"""Files that no decoder may be trusted with, and unusual ones that it must get right: made byte by byte where no
library would write them."""

from __future__ import annotations

import io
import struct
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

from tests import pictures

GREY, COLOUR, GREY_ALPHA, COLOUR_ALPHA = 0, 2, 4, 6
"""Colour types of PNG."""


def chunk(kind: bytes, body: bytes) -> bytes:
    """A chunk of a PNG file."""
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width: int, height: int, body: bytes = b"", *, extra: bytes = b"", depth: int = 8, kind: int = COLOUR) -> bytes:
    """A PNG file whose header says this size, whatever its body holds."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + extra + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def deep_png(values: np.ndarray, kind: int) -> bytes:
    """A PNG of 16 bits a channel: values [height, width, channels] uint16."""
    height, width = values.shape[:2]
    lines = b"".join(b"\0" + line.astype(">u2").tobytes() for line in values)
    return png(width, height, zlib.compress(lines), depth=16, kind=kind)


def jpeg(width: int, height: int) -> bytes:
    """A JPEG file whose frame header says this size; its scan is empty."""
    frame = struct.pack(">HBHHB", 17, 8, height, width, 3) + bytes([1, 0x11, 0, 2, 0x11, 0, 3, 0x11, 0])
    table = b"\xff\xdb" + struct.pack(">HB", 67, 0) + bytes([1] * 64)
    return b"\xff\xd8" + table + b"\xff\xc0" + frame + b"\xff\xda\0\x0c\x03\x01\0\x02\0\x03\0\0\x3f\0\xff\xd9"


def gif(width: int, height: int, frame: tuple[int, int] | None = None) -> bytes:
    """A GIF file with a screen of this size and one frame, of the same size unless told otherwise; it has no pixels."""
    shown = frame or (width, height)
    head = b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + bytes(6)
    return head + b"\x2c" + struct.pack("<HHHHB", 0, 0, *shown, 0) + b"\x02\x01\x44\0\x3b"


def webp(width: int, height: int) -> bytes:
    """A WebP file without loss whose header says this size, of at most 16384 a side; it has no pixels."""
    sides = (width - 1) | (height - 1) << 14
    stream = b"\x2f" + sides.to_bytes(4, "little") + bytes(9)
    body = b"WEBPVP8L" + struct.pack("<I", len(stream)) + stream
    return b"RIFF" + struct.pack("<I", len(body)) + body


def bmp(width: int, height: int) -> bytes:
    """A BMP file whose header says this size; it has no pixels."""
    about = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 54, 0, 0, 54) + about


def tiff(tags: Mapping[int, tuple[int, Sequence[int]]], body: bytes = b"\0\0", *, order: str = "<") -> bytes:
    """A TIFF file of one page: the type of each tag, 1, 3 or 4, and its values. Its body begins at byte 8."""
    at, entries, behind = 8 + len(body), b"", b""
    for tag, (kind, values) in sorted(tags.items()):
        packed = struct.pack(f"{order}{len(values)}{ {1: 'B', 3: 'H', 4: 'I'}[kind] }", *values)
        if len(packed) > 4:
            place = at + 2 + 12 * len(tags) + 4 + len(behind)
            behind += packed
            packed = struct.pack(order + "I", place)
        entries += struct.pack(order + "HHI", tag, kind, len(values)) + packed.ljust(4, b"\0")
    head = (b"II" if order == "<" else b"MM") + struct.pack(order + "HI", 42, at)
    return head + body + struct.pack(order + "H", len(tags)) + entries + bytes(4) + behind


def packed_tiff(width: int, height: int) -> bytes:
    """A TIFF file that says to be of this size, in one strip of two bytes."""
    one = {256: width, 257: height, 258: 8, 259: 5, 262: 1, 273: 8, 277: 1, 278: height, 279: 2}
    return tiff({tag: (4, [value]) for tag, value in one.items()})


BOMBS: dict[str, Callable[[int, int], bytes]] = {
    "PNG": png,
    "JPEG": jpeg,
    "GIF": gif,
    "WebP": webp,
    "BMP": bmp,
    "TIFF": packed_tiff,
}
"""By format: a file of some hundred bytes that says to be of any size."""


def with_bad_checksum() -> bytes:
    """A PNG whose pixels can be read, though their checksum is wrong."""
    whole = bytearray(pictures.encoded(pictures.noise(64, 64)))
    whole[whole.index(b"IEND") - 5] ^= 0xFF  # the last byte of the data chunk's checksum
    return bytes(whole)


def packed_words(kind: bytes, head: bytes) -> bytes:
    """A PNG of a few kilobytes with 80 MB of packed metadata in one chunk."""
    packed = zlib.compress(b"a" * (80 << 20), 9)
    return png(64, 64, zlib.compress(b"\0" * (64 * 193)), extra=chunk(kind, head + packed))


def sound_alone() -> bytes:
    """A Matroska file without a picture."""
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as out:
        stream: Any = out.add_stream("pcm_s16le", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), format="s16", layout="mono")
        frame.rate = 8000
        out.mux(stream.encode(frame))
        out.mux(stream.encode())
    return file.getvalue()


def broadcast(shown: np.ndarray) -> bytes:
    """Frames as they are sent to televisions: MPEG-TS, with sound beside them."""
    file = io.BytesIO()
    with av.open(file, "w", format="mpegts") as out:
        stream: Any = out.add_stream("mpeg2video", rate=10)
        stream.height, stream.width = shown.shape[1:3]
        stream.pix_fmt = "yuv420p"
        sound: Any = out.add_stream("mp2", rate=48000)
        for pixels in shown:
            out.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        out.mux(stream.encode())
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 2 * 1152), np.int16), format="s16", layout="stereo")
        frame.rate = 48000
        out.mux(sound.encode(frame))
        out.mux(sound.encode())
    return file.getvalue()


def without_index() -> bytes:
    """An MP4 that breaks off before the table of its frames."""
    whole = pictures.video(pictures.frames(10))
    return whole[: whole.index(b"moov") - 4]


def index_first(count: int = 60) -> bytes:
    """An MP4 that can be played while it is downloaded: the table of its frames is at the beginning."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "film.mp4"
        with av.open(str(path), "w", options={"movflags": "faststart"}) as out:
            stream: Any = out.add_stream("mpeg4", rate=10)
            stream.width, stream.height, stream.pix_fmt = 128, 96, "yuv420p"
            for frame in pictures.frames(count):
                out.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
            out.mux(stream.encode())
        return path.read_bytes()


def claims_frames(count: int) -> bytes:
    """An MP4 of ten frames whose tables of sizes and times claim `count`, all of one size."""
    whole = bytearray(pictures.video(pictures.frames(10)))
    sizes, times = whole.index(b"stsz"), whole.index(b"stts")
    struct.pack_into(">II", whole, sizes + 8, 100, count)
    struct.pack_into(">I", whole, times + 12, count)
    return bytes(whole)


def lies_about_time(ticks: int) -> bytes:
    """An MP4 of ten frames, each of which claims to last this many ticks (of 1/10240 of a second)."""
    whole = bytearray(pictures.video(pictures.frames(10)))
    struct.pack_into(">I", whole, whole.index(b"stts") + 16, ticks)
    return bytes(whole)


def turned(video: bytes, degrees: int) -> bytes:
    """An MP4 as phones write it: its header says that it is to be shown turned clockwise."""
    whole = bytearray(video)
    turns = {90: (0, 1, 0, -1, 0), 180: (-1, 0, 0, 0, -1), 270: (0, -1, 0, 1, 0)}[degrees]
    matrix = [65536 * number for number in (*turns, 0, 0, 0, 16384)]
    struct.pack_into(">9i", whole, whole.index(b"tkhd") + 44, *matrix)
    return bytes(whole)


def uneven() -> tuple[bytes, np.ndarray]:
    """A Matroska file whose frames stand closer and closer together, and its frames."""
    shown, file = pictures.frames(12), io.BytesIO()
    with av.open(file, "w", format="matroska") as out:
        stream: Any = out.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 128, 96, "yuv420p"
        stream.codec_context.time_base = Fraction(1, 1000)
        for number, pixels in enumerate(shown):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = 10 * number * (40 - number), Fraction(1, 1000)
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    return file.getvalue(), shown


def reordered(container: str, codec: str, cut: int = 0) -> bytes:
    """40 frames, of which some are shown before others that they are made from, and before key frames behind which they
    stand, where the codec has that. An edit list cuts the first ones off an MP4, so many."""
    file = io.BytesIO()
    with av.open(file, "w", format=container, options={"avoid_negative_ts": "disabled"} if cut else {}) as out:
        stream: Any = out.add_stream(codec, rate=25)
        stream.width, stream.height, stream.pix_fmt = 128, 96, "yuv420p"
        stream.gop_size, stream.codec_context.max_b_frames = 10, 2
        for pixels in (*pictures.frames(40), None):
            for packet in stream.encode(pixels if pixels is None else av.VideoFrame.from_ndarray(pixels)):
                back = round(cut / 25 / packet.time_base)
                packet.pts, packet.dts = packet.pts - back, packet.dts - back
                out.mux(packet)
    return file.getvalue()
