"""What decode processes, and code that has taken one over, can do: decode all formats, and answer their parent."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import numpy as np
import pytest
from structlog.testing import capture_logs

from common.media.item import Modality
from common.process import seccomp
from common.process.children import Child
from common.shm.arena import SharedBuffer
from encoder_service.item import Inspection
from encoder_service.media.__main__ import Desk
from encoder_service.media.limits import MediaLimits
from encoder_service.media.messages import (
    Decode,
    Decoded,
    DecoderSettings,
    Decoding,
    Inspect,
    Inspected,
    Ready,
    Refused,
)
from encoder_service.media.modalities import SPECS
from encoder_service.media.processes import DecodeProcesses
from encoder_service.media.sniff import IMAGES
from tests import pictures, sounds
from tests.unit.encoder_service import escapes

pytestmark = pytest.mark.usefixtures("forked_children")

ESCAPE = f"{escapes.__name__}:Escape"
STAGING, PIXELS_AT = 8 << 20, 4 << 20
IMAGE, VIDEO, AUDIO = (SPECS[each].decoder for each in (Modality.IMAGE, Modality.VIDEO, Modality.AUDIO))
SOUNDING = SPECS[Modality.VIDEO].sound_decoder
FRAMES = pictures.frames(12)
STEREO = np.stack([sounds.tune(0.5, 1, 44_100)] * 2)


def film(container: str, codec: str) -> tuple[str, Callable[[], bytes]]:
    return VIDEO, lambda: pictures.video(FRAMES, container=container, codec=codec)


def picture(kind: str, **options: object) -> tuple[str, Callable[[], bytes]]:
    return IMAGE, lambda: pictures.encoded(pictures.noise(60, 40), kind, **options)


def sound(kind: str) -> tuple[str, Callable[[], bytes]]:
    rate = {"opus": 48_000, "webm": 48_000}.get(kind, sounds.RATE)
    return AUDIO, lambda: sounds.encoded(sounds.tune(0.5, 1, rate), kind, rate)


FILES = {
    **{kind: picture(kind) for kind in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "AVIF")},
    "TIFF": picture("TIFF"),
    **{
        f"TIFF by {packing}": picture("TIFF", compression=packing)
        for packing in ("tiff_lzw", "tiff_adobe_deflate", "jpeg")
    },
    **({"HEIF": picture("HEIF")} if "HEIF" in IMAGES else {}),
    "a fax": (IMAGE, lambda: pictures.encoded(pictures.noise(60, 40).convert("1"), "TIFF", compression="group4")),
    "progressive JPEG": picture("JPEG", progressive=True),
    "lossless WEBP": picture("WEBP", lossless=True),
    "h264": film("mp4", "h264"),
    "mov": film("mov", "mpeg4"),
    "hevc": film("matroska", "hevc"),
    "vp8": film("webm", "vp8"),
    "vp9": film("webm", "libvpx-vp9"),
    "av1": film("mp4", "libsvtav1"),
    "avi": film("avi", "mpeg4"),
    "flv": film("flv", "flv"),
    "mpegts": film("mpegts", "mpeg2video"),
    **{kind: sound(kind) for kind in sounds.KINDS},
    "vorbis": (AUDIO, lambda: sounds.encoded(STEREO, "vorbis", 44_100)),
    **{
        f"sound of {kind}": (SOUNDING, lambda kind=kind: sounds.film(sounds.tune(0.5, 1), kind))
        for kind in sounds.FILMS
    },
}


@asynccontextmanager
async def one(*decoders: str) -> AsyncIterator[tuple[Child, SharedBuffer, DecoderSettings]]:
    """A process, set up as all are."""
    arena = SharedBuffer.create("test", STAGING)
    settings = DecoderSettings(
        staging_bytes=arena.size,
        memory_bytes=2 << 30,
        threads=2,
        bounds=MediaLimits().bounds,
        decoders=[*decoders],
    )
    processes = DecodeProcesses(arena.fd, settings, 1, start_seconds=600.0, on_change=lambda: None)
    try:
        await processes.start()
        yield await processes.take(b""), arena, settings
    finally:
        await processes.stop()
        arena.close()


async def test_code_in_a_decode_process_reaches_neither_files_nor_sockets_nor_other_processes():
    async with one(ESCAPE) as (child, _, _):
        child.send(Inspect(b"", ESCAPE, 0, 1))
        answer = await child.receive()
    assert isinstance(answer, Refused)
    found: dict[str, str] = json.loads(answer.why.partition(": ")[2])
    assert "38" in found.pop("none of any number"), "ENOSYS, as of what the kernel does not know"
    assert {name: how for name, how in found.items() if how != "EPERM"} == {
        "a signal to itself": "done: None",
        "a signal that it catches": "done: 'True'",
        "a thread": "done: 'work'",
        "memory": f"done: {1 << 20}",
        "its limits": "done: (3, 3)",
    }


async def test_all_formats_are_decoded_to_what_a_process_makes_of_them_that_may_do_all():
    async with one(IMAGE, VIDEO, AUDIO, SOUNDING) as (child, arena, settings):
        free = SharedBuffer.create("free", STAGING)
        desk = Desk(free, settings)
        for name, (decoder, make) in FILES.items():
            data = make()
            for each in (arena, free):
                each.view[: len(data)] = data
            job = Inspect(b"", decoder, 0, len(data))
            child.send(job)
            (expected,) = desk.answers(job)
            assert isinstance(expected, Inspected), name
            assert await child.receive() == expected, name
            decoding = _decode(decoder, expected.seen, len(data))
            child.send(decoding)
            assert isinstance(list(desk.answers(decoding))[-1], Decoded), name
            while isinstance(answer := await child.receive(), Decoding):
                pass
            assert isinstance(answer, Decoded), (name, answer)
            assert bytes(arena.view[PIXELS_AT:]) == bytes(free.view[PIXELS_AT:]), name
        del desk
        free.close()


def _decode(decoder: str, seen: Inspection, size: int) -> Decode:
    """All of a file; of a video that sounds, its sound besides."""
    shape = {"frames": list(range(seen.frames)), "height": seen.height, "width": seen.width}
    if decoder == AUDIO:
        shape = {"frames": [0], "height": 1, "width": seen.frames, "depth": 4}
    if decoder == IMAGE:
        shape["frames"] = [0]
    return Decode(b"", decoder, 0, size, PIXELS_AT, samples=seen.track.frames if seen.track else 0, **shape)


async def test_where_the_kernel_confines_nobody_it_is_said_once_and_all_goes_on(monkeypatch):
    class Unconfined:
        has_ended = False

        def send(self, _: DecoderSettings) -> None: ...

        async def receive(self) -> Ready:
            return Ready(unconfined="seccomp: Function not implemented")

        async def stop(self, grace: float) -> None: ...

    async def start(*_: object, **__: object) -> Unconfined:
        return Unconfined()

    monkeypatch.setattr(Child, "start", start)
    settings = DecoderSettings(1 << 16, 2 << 30, 1, MediaLimits().bounds, [])
    processes = DecodeProcesses(0, settings, 3, start_seconds=600.0, on_change=lambda: None)
    with capture_logs() as logs:
        await processes.start()
        assert isinstance(await processes.take(b""), Unconfined)
        await processes.stop()
    assert [(each["log_level"], each["cause"]) for each in logs] == [("warning", "seccomp: Function not implemented")]


def test_an_unknown_machine_is_not_confined(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert seccomp.confine() == "there is no filter for riscv64"
