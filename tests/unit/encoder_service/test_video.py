"""Videos as the decode process reads them: whole ones alone, upright, at the times that they say."""

from __future__ import annotations

import io
import os
import random
import shutil
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import av
import msgspec._core
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.media.item import Modality
from common.shm.arena import SharedBuffer
from encoder_service.item import Inspection
from encoder_service.media import container, video
from encoder_service.media.__main__ import Desk
from encoder_service.media.limits import MediaLimits
from encoder_service.media.messages import Decode, Decoded, DecoderSettings, Inspect, Refused
from encoder_service.media.modalities import SPECS
from tests import bad_files, pictures


def shown(data: bytes) -> np.ndarray:
    """All frames, [count, height, width, 3]."""
    reader = video.open_reader(data)
    seen = video.inspect(reader)
    out = np.empty((seen.frames, seen.height, seen.width, 3), np.uint8)
    assert [*video.decode(reader, range(seen.frames), out)][-1] == seen.frames
    return out


@pytest.mark.parametrize("degrees", [90, 180, 270])
@pytest.mark.parametrize(("width", "height"), [(64, 4), (64, 20), (64, 96), (96, 126), (96, 128), (160, 210)])
def test_a_turned_video_is_shown_upright(degrees, width, height):
    plain = pictures.video(np.random.default_rng(height).integers(0, 256, (10, height, width, 3), np.uint8))
    upright = np.rot90(shown(plain), -degrees // 90, (1, 2))
    assert np.array_equal(shown(bad_files.turned(plain, degrees)), upright)


@pytest.mark.parametrize("width", [32, 48, 96, 144, 192, 240])
def test_every_frame_of_a_width_that_is_padded_is_shown_whole(width):
    pixels = pictures.frames(10, width, 40, 5)
    plain = pictures.video(pixels)
    seen = shown(plain)
    assert seen.shape == (10, 40, width, 3)
    with av.open(io.BytesIO(plain)) as file:
        expected = np.stack([frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)])
    assert np.abs(seen.astype(int) - expected).mean() < 3


class Counting:
    """A reader that knows which frames it was asked for."""

    def __init__(self, reader: Any) -> None:
        self.reader = reader
        self.asked: list[int] = []

    def __getitem__(self, number: int) -> Any:
        self.asked.append(number)
        return self.reader[number]

    def get_batch(self, numbers: list[int]) -> Any:
        self.asked += numbers
        return self.reader.get_batch(numbers)


@pytest.mark.parametrize("width", [96, 256])
def test_only_the_frames_that_are_wanted_are_decoded(width):
    plain = pictures.video(pictures.frames(60, width, 96))
    reader, wanted = Counting(video.open_reader(plain)), [*range(0, 60, 6), 59]
    out = np.empty((len(wanted), 96, width, 3), np.uint8)
    assert [*video.decode(reader, wanted, out)] == [8, 11]
    assert reader.asked == wanted
    assert np.array_equal(out, shown(plain)[wanted])


def test_frames_that_stand_unevenly_are_counted_one_by_one():
    data, drawn = bad_files.uneven()
    frames = shown(data)
    apart = np.abs(frames[:, None].astype(np.int16) - drawn[None]).mean((2, 3, 4))
    assert apart.argmin(1).tolist() == list(range(12))


@pytest.mark.parametrize(
    ("container", "codec", "cut"),
    [
        ("mp4", "libx264", 0),
        ("mp4", "mpeg2video", 0),
        ("matroska", "mpeg4", 0),
        ("mpegts", "mpeg2video", 0),
        ("avi", "mpeg4", 0),
        ("avi", "libx264", 0),
        ("flv", "libx264", 0),
        ("mp4", "libx264", 3),
        ("mp4", "libx264", 15),
        ("mp4", "mpeg4", 15),
    ],
)
def test_each_frame_is_found_wherever_it_stands_in_the_file(container, codec, cut):
    data = bad_files.reordered(container, codec, cut)
    with av.open(io.BytesIO(data)) as file:
        expected = np.stack([frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)])
    assert len(expected) == 40 - cut
    chance = random.Random(0)
    for wanted in ([0], [39 - cut], *(sorted(chance.sample(range(40 - cut), 5)) for _ in range(6)), [9, 9, 4]):
        reader = video.open_reader(data)
        assert len(reader) == 40 - cut
        out = np.empty((len(wanted), 96, 128, 3), np.uint8)
        assert [*video.decode(reader, wanted, out)] == [len(wanted)]
        assert np.array_equal(out, expected[wanted]), wanted


@pytest.mark.parametrize("degrees", [90, 180, 270])
def test_a_turned_video_is_shown_upright_where_its_frames_are_found_by_their_times(degrees):
    plain = bad_files.reordered("mp4", "mpeg2video")
    assert np.array_equal(shown(bad_files.turned(plain, degrees)), np.rot90(shown(plain), -degrees // 90, (1, 2)))


def test_a_video_of_a_codec_that_nobody_knows_is_not_read():
    unknown = bad_files.reordered("avi", "libx264").replace(b"H264", b"ZZZZ")
    with pytest.raises(ValueError, match="no decodable video"):
        video.open_reader(unknown)


def test_a_file_that_is_opened_again_shows_what_it_did_when_it_was_kept_open():
    data, decoder = bad_files.reordered("mp4", "mpeg4", cut=15), SPECS[Modality.VIDEO].decoder
    staging = SharedBuffer.create("test", 1 << 20)
    settings = DecoderSettings(staging.size, memory_bytes=0, threads=1, bounds=MediaLimits().bounds, decoders=[decoder])
    staging.view[: len(data)] = data
    file, found = (b"x", decoder, 0, len(data)), []
    for kept_open in (True, False):
        desk = Desk(staging, settings)
        if kept_open:
            assert len([*desk.answers(Inspect(*file))]) == 1
        assert [*desk.answers(Decode(*file, 1 << 19, [3, 9, 17], 96, 128))][-1] == Decoded()
        found.append(bytes(staging.view[1 << 19 :][: 3 * 96 * 128 * 3]))
    staging.close()
    assert found[0] == found[1]


CONTAINERS = {
    "MP4": bad_files.index_first,
    "Matroska": lambda: pictures.video(pictures.frames(60), container="matroska"),
    "AVI": lambda: pictures.video(pictures.frames(60), container="avi"),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_video_that_is_cut_off_anywhere_is_not_read(name):
    whole = CONTAINERS[name]()
    assert container.is_whole(whole)
    assert video.inspect(video.open_reader(whole)) == Inspection(128, 96, 60, 10.0)
    for end in (len(whole) * 9 // 10, len(whole) // 2, len(whole) // 5, len(whole) - 1):
        with pytest.raises((ValueError, RuntimeError)):
            video.open_reader(whole[:end])


@pytest.mark.parametrize("width", [96, 128])
def test_damaged_frames_are_refused_and_do_not_end_the_process(width):
    """The decoder makes do with some damage; of the rest it says so in ways that a decode process knows."""
    whole = pictures.video(np.random.default_rng(0).integers(0, 256, (24, 96, width, 3), np.uint8))
    start = whole.find(b"mdat") + 8
    staging, ends = SharedBuffer.create("test", 1 << 21), Counter[type]()
    decoder = SPECS[Modality.VIDEO].decoder
    settings = DecoderSettings(staging.size, memory_bytes=0, threads=1, bounds=MediaLimits().bounds, decoders=[decoder])
    for seed in range(40):
        chance, damaged = random.Random(seed), bytearray(whole)
        for _ in range(chance.choice((40, 2000))):
            damaged[chance.randrange(start, len(whole) - 1000)] = chance.randrange(256)
        staging.view[: len(damaged)] = damaged
        desk, job = Desk(staging, settings), (b"x", decoder, 0, len(damaged))
        answers = [*desk.answers(Inspect(*job)), *desk.answers(Decode(*job, 1 << 20, [0, 8, 16, 23], 96, width))]
        ends[type(answers[-1])] += 1
    staging.close()
    assert ends.keys() == {Refused, Decoded}


def test_a_container_that_grows_as_it_is_sent_may_end_anywhere():
    streamed = pictures.video(pictures.frames(60), container="mpegts", codec="mpeg2video")
    assert container.is_whole(streamed[: len(streamed) // 2])


def box(kind: bytes, body: bytes, size: int | None = None) -> bytes:
    return struct.pack(">I", 8 + len(body) if size is None else size) + kind + body


@pytest.mark.parametrize(
    ("boxes", "whole"),
    [
        (box(b"ftyp", b"isom") + box(b"mdat", b"x" * 100), True),
        (box(b"ftyp", b"isom") + box(b"mdat", b"x" * 100, size=109), False),
        (box(b"ftyp", b"isom") + box(b"mdat", b"x" * 100, size=0), True),
        (box(b"ftyp", b"isom") + box(b"mdat", struct.pack(">Q", 116) + b"x" * 100, size=1), True),
        (box(b"ftyp", b"isom") + box(b"mdat", struct.pack(">Q", 117) + b"x" * 100, size=1), False),
        (box(b"ftyp", b"isom") + box(b"free", b"x", size=500), True),
        (box(b"ftyp", b"isom") + b"\0\0\0", True),
    ],
)
def test_boxes_of_an_mp4(boxes, whole):
    assert container.is_whole(boxes) is whole


@pytest.mark.parametrize(
    ("size", "whole"), [(b"\x84", True), (b"\x85", False), (b"\xff", True), (b"\x40\x04", True), (b"\x40\x05", False)]
)
def test_a_segment_of_matroska_has_a_size_or_goes_on_to_the_end(size, whole):
    assert container.is_whole(b"\x1a\x45\xdf\xa3\x84webm\x18\x53\x80\x67" + size + b"four") is whole


@given(
    st.binary(max_size=200),
    st.sampled_from([b"\0\0\0\x10ftyp", b"\x1a\x45\xdf\xa3\x84webm", b"RIFF\xff\xff\xff\xffAVI "]),
)
def test_no_bytes_break_it(data, head):
    assert container.is_whole(head + data) in (True, False)


SESSION = b"\nv=0\no=- 0 0 IN IP4 127.0.0.1\ns=t\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 15004 RTP/AVP 96\n" + 600 * b"#"


@pytest.mark.parametrize(
    "head", [b"FLV\x01", b"\x1a\x45\xdf\xa3", b"\x1a\x45\xdf\xa3\x81 webm", b"G" + 187 * b"#" + b"G"]
)
def test_what_only_begins_as_a_container_never_reaches_the_library(head):
    """It would look for itself, and find a description of streams that it is to fetch."""
    with pytest.raises(ValueError, match="supported format"):
        video.open_reader(head + SESSION)


@pytest.mark.parametrize("ticks", [0, 1, 3, 1 << 20, (1 << 31) - 1, (1 << 32) - 1])
def test_a_video_that_lies_about_its_time_has_finite_figures(ticks):
    seen = video.inspect(video.open_reader(bad_files.lies_about_time(ticks)))
    assert seen.frames <= 10
    assert np.isfinite(seen.fps)


def test_a_video_of_no_frames_is_not_read():
    with pytest.raises((ValueError, RuntimeError)):
        video.inspect(video.open_reader(bad_files.claims_frames(0)))


def test_the_library_loads_no_cuda_libraries_beside_itself(tmp_path):
    """One stands where those of GPU builds of torch do. Others find it there afterwards."""
    folder = tmp_path / "nvidia" / "blas" / "lib"
    folder.mkdir(parents=True)
    shutil.copy(msgspec._core.__file__, folder / "libblas.so.1")
    program = (
        "from pathlib import Path; from encoder_service.media import video; "
        "video.library(); import nvidia; print(Path('/proc/self/maps').read_text())"
    )
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).resolve().parents[3])])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "libdecord" in done.stdout
    assert "/nvidia/" not in done.stdout
