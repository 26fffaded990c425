"""Videos that are made of too many parts, that lack a part, or that are transport streams."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Sequence
from typing import Any

import av
import numpy as np
import pytest

from encoder_service.media import container, mp4, transport_stream, video
from encoder_service.media.complexity import TooComplex
from tests import bad_files, pictures

PATH = (b"moov", b"trak", b"mdia", b"minf", b"stbl")
LIMIT = 10_000


def box(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", 8 + len(body)) + kind + body


def film(count: int = 10, **settings: Any) -> bytes:
    return pictures.video(pictures.frames(count, 64, 64), **settings)


def grown(whole: bytes, path: Sequence[bytes], more: bytes) -> bytes:
    """An MP4 with more boxes at the end of a nested one."""
    data, end = bytearray(whole), len(whole)
    heads = []
    for kind in path:
        at = data.index(kind) - 4
        heads.append(at)
        end = at + int.from_bytes(data[at : at + 4], "big")
    data[end:end] = more
    for at in heads:
        struct.pack_into(">I", data, at, int.from_bytes(data[at : at + 4], "big") + len(more))
    return bytes(data)


def edited(edits: int, samples: int) -> bytes:
    """A track whose list of edits shows all of its samples, again and again."""
    head = box(b"hdlr", bytes(8) + b"vide" + bytes(12))
    sizes = box(b"stsz", struct.pack(">III", 0, 0, samples) + struct.pack(">I", 1) * samples)
    table = box(b"elst", struct.pack(">II", 0, edits) + struct.pack(">III", 100 * samples, 0, 65536) * edits)
    track = box(b"edts", table) + box(b"mdia", head + box(b"minf", box(b"stbl", sizes)))
    return box(b"ftyp", b"isom") + box(b"moov", box(b"trak", track))


def fragment(samples: int) -> bytes:
    run = box(b"trun", struct.pack(">II", 1, samples) + bytes(4))
    return box(b"ftyp", b"isom") + box(b"moof", box(b"traf", run))


def element(kind: bytes, body: bytes) -> bytes:
    return kind + b"\x01" + len(body).to_bytes(7, "big") + body


def matroska(more: bytes) -> bytes:
    whole = film(container="matroska")
    at = whole.index(b"\x18\x53\x80\x67")
    begin = at + 4 + 9 - whole[at + 4].bit_length()
    return whole[:at] + element(b"\x18\x53\x80\x67", whole[begin:] + more)


def avi(more: bytes) -> bytes:
    whole = film(container="avi")
    return whole[:4] + struct.pack("<I", len(whole) - 8 + len(more)) + whole[8:] + more


TAG = b"\x09\0\0\1\0\0\0\0\0\0\0\x22" + struct.pack(">I", 12)
LACED = b"\xa3\x85\x81\0\0\x84\xff"
"""A block of 256 frames that are empty."""
MANY = LIMIT + 1
CROWDED: dict[str, Callable[[], bytes]] = {
    "boxes at the end": lambda: film() + box(b"free", b"") * MANY,
    "boxes at the beginning": lambda: box(b"free", b"") * MANY + film(),
    "boxes in boxes": lambda: grown(film(), PATH, box(b"stts", bytes(8)) * MANY),
    "boxes nested": lambda: film() + b"".join(struct.pack(">I", 8 * (MANY - n)) + b"moov" for n in range(MANY)),
    "boxes of words": lambda: grown(film(), PATH[:1], box(b"udta", box(b"abcd", b"") * MANY)),
    "edits": lambda: edited(MANY, 1),
    "edits that show all again": lambda: edited(300, 1000),
    "samples of a fragment": lambda: fragment(100_000_000),
    "fragments": lambda: film() + box(b"moof", b"") * MANY,
    "gaps": lambda: matroska(b"\xec\x80" * MANY),
    "tags": lambda: matroska(element(b"\x12\x54\xc3\x67", b"\x73\x73\x80" * MANY)),
    "seek heads": lambda: matroska(b"\x11\x4d\x9b\x74\x80" * MANY),
    "attachments": lambda: matroska(element(b"\x19\x41\xa4\x69", b"\x61\xa7\x80" * MANY)),
    "blocks": lambda: matroska(element(b"\x1f\x43\xb6\x75", b"\xa3\x85\x81\0\0\x80a" * MANY)),
    "laced blocks": lambda: matroska(element(b"\x1f\x43\xb6\x75", LACED * 40)),
    "clusters without an end": lambda: matroska(b"\x1f\x43\xb6\x75\xff" * MANY),
    "nothing": lambda: matroska(bytes(MANY)),
    "chunks": lambda: avi(b"JUNK\0\0\0\0" * MANY),
    "flash tags": lambda: film(container="flv", codec="flv") + TAG * MANY,
}


@pytest.mark.parametrize("name", CROWDED)
def test_no_decoder_sees_a_video_of_too_many_parts(name, monkeypatch):
    monkeypatch.setattr(video, "library", lambda: pytest.fail("the decoder was asked"))
    with pytest.raises(TooComplex):
        video.open_reader(CROWDED[name](), max_parts=LIMIT)


@pytest.mark.parametrize("form", ["mp4", "mov", "matroska", "webm", "avi", "flv", "mpegts"])
def test_an_ordinary_video_is_far_from_the_limit(form):
    codec = {"flv": "flv", "mpegts": "mpeg2video", "webm": "vp8"}.get(form, "mpeg4")
    seen = video.inspect(video.open_reader(film(20, container=form, codec=codec), max_parts=400))
    assert (seen.frames, seen.fps) == (20, 10.0)


def test_plain_sound_may_have_any_number_of_samples_under_its_edits():
    """A second of it has 48 000, which the library does not list."""
    head, times = box(b"hdlr", bytes(8) + b"soun" + bytes(12)), box(b"stts", struct.pack(">IIII", 0, 1, 1 << 28, 1))
    sizes = box(b"stsz", struct.pack(">III", 0, 4, 1 << 28))
    edits = box(b"edts", box(b"elst", struct.pack(">II", 0, 3) + bytes(36)))
    media = box(b"mdia", head + box(b"minf", box(b"stbl", times + sizes)))
    mp4.count(box(b"ftyp", b"isom") + box(b"moov", box(b"trak", edits + media)), LIMIT)


def fragments() -> bytes:
    """As it is sent while it grows, one group of frames after the other."""
    options = {"movflags": "frag_keyframe+empty_moov"}
    file = io.BytesIO()
    with av.open(file, "w", format="mp4", options=options) as out:
        stream: Any = out.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt, stream.gop_size = 64, 64, "yuv420p", 4
        for frame in pictures.frames(30, 64, 64):
            out.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        out.mux(stream.encode())
    return file.getvalue()


def endless() -> bytes:
    """An MP4 whose last box is its samples, and goes on to the file's end, whatever that is."""
    whole = bytearray(bad_files.index_first(30))
    struct.pack_into(">I", whole, whole.index(b"mdat") - 4, 0)
    return bytes(whole)


WHOLE: dict[str, Callable[[], bytes]] = {
    "index last": lambda: film(30),
    "index first": lambda: bad_files.index_first(30),
    "samples to the end": endless,
    "fragments": fragments,
}


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("missing", [1, 9, 64])
def test_an_mp4_that_lacks_its_last_bytes_is_refused(name, missing):
    whole = WHOLE[name]()
    assert container.is_whole(whole)
    assert video.inspect(video.open_reader(whole)).frames == 30
    with pytest.raises(ValueError, match="cut off"):
        video.open_reader(whole[:-missing])


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("one_size", [False, True])
def test_the_end_of_a_track_is_that_of_its_last_sample(wide, one_size):
    """Three chunks, of 3, 3 and 1 samples of 10 bytes: those of the second end at 2010."""
    begins, last = [100, 1980, 500], 2010
    numbers = struct.pack(">II3Q" if wide else ">II3I", 0, 3, *begins)
    offsets = box(b"co64" if wide else b"stco", numbers)
    sizes = struct.pack(">III", 0, 10, 7) if one_size else struct.pack(">III7I", 0, 0, 7, *[10] * 7)
    table = offsets + box(b"stsz", sizes) + box(b"stsc", struct.pack(">II6I", 0, 2, 1, 3, 1, 3, 1, 1))
    media = box(b"mdia", box(b"hdlr", bytes(8) + b"vide" + bytes(12)) + box(b"minf", box(b"stbl", table)))
    head = box(b"ftyp", b"isom") + box(b"moov", box(b"trak", media))
    assert mp4.is_whole(head + bytes(last - len(head)))
    assert not mp4.is_whole(head + bytes(last - len(head) - 1))


@pytest.mark.parametrize("codec", ["mpeg2video", "mpeg4", "h264", "hevc"])
@pytest.mark.parametrize("count", [1, 2, 8, 30])
def test_every_frame_of_a_transport_stream_is_shown_in_its_place(codec, count):
    drawn = pictures.frames(count)
    reader = video.open_reader(pictures.video(drawn, container="mpegts", codec=codec))
    seen = video.inspect(reader)
    assert (seen.frames, seen.fps) == (count, 10.0)
    out = np.empty((count, 96, 128, 3), np.uint8)
    assert [*video.decode(reader, range(count), out)][-1] == count
    apart = np.abs(out[:, None].astype(np.int16) - drawn[None]).mean((2, 3, 4))
    assert apart.argmin(1).tolist() == list(range(count))


def test_transport_streams_in_a_row_are_one_video():
    whole = pictures.video(pictures.frames(12), container="mpegts", codec="h264")
    seen = video.inspect(video.open_reader(whole + whole))
    assert (seen.frames, seen.fps) == (24, 10.0)


def test_a_transport_stream_of_too_many_packets_is_refused():
    whole = pictures.video(pictures.frames(30), container="mpegts", codec="mpeg2video")
    with pytest.raises(TooComplex):
        transport_stream.as_matroska(whole, 100)


@pytest.mark.parametrize("body", [b"", b"\x1f\xff\x10" + b"\xff" * 184, bytes(187)])
def test_what_only_looks_like_a_transport_stream_is_refused(body):
    with pytest.raises(ValueError, match=r"transport stream|no video"):
        transport_stream.as_matroska(b"\x47" + (body + b"\x47") * 50, 1000)
