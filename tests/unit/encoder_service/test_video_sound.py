"""A video's own sound in the decode process: every container, videos without, and tracks that are broken."""

from __future__ import annotations

import numpy as np
import pytest

from common.errors import InvalidInput
from common.media.item import Modality
from common.shm.arena import SharedBuffer
from encoder_service.item import SAMPLE_RATE
from encoder_service.media.__main__ import Desk
from encoder_service.media.audio import read
from encoder_service.media.complexity import TooComplex
from encoder_service.media.limits import MediaLimits, check_video
from encoder_service.media.messages import Decode, Decoded, DecoderSettings, Inspect, Inspected
from encoder_service.media.modalities import SPECS
from encoder_service.media.video_sound import SoundingVideoFile
from tests import pictures, sounds
from tests.bad_sounds import BAD_TRACKS

TUNE = sounds.tune(1.5, 7)
LIMITS = MediaLimits(max_audio_seconds=5.0)
DECODERS = sorted(SPECS[Modality.VIDEO].decoders)


def settings(limits: MediaLimits = LIMITS, staging: int = 0) -> DecoderSettings:
    return DecoderSettings(staging, memory_bytes=0, threads=1, bounds=limits.bounds, decoders=DECODERS)


def opened(data: bytes, limits: MediaLimits = LIMITS) -> SoundingVideoFile:
    return SoundingVideoFile(data, settings(limits))


@pytest.mark.parametrize("kind", sounds.FILMS)
def test_the_track_of_every_container_is_heard(kind: str) -> None:
    rate = 44_100 if kind in ("flv", "mpegts") else SAMPLE_RATE
    wave = sounds.tune(1.5, 7, rate)
    file = opened(sounds.film(wave, kind, rate, count=30))
    seen, found = file.inspect(), file.samples
    plain = read(sounds.encoded(wave, "wav", rate), LIMITS.bounds)[1]
    assert seen.track is not None
    assert (seen.width, seen.height, seen.track.frames) == (64, 64, len(found))
    assert (seen.track.fps, seen.track.channels) == (rate, 1)
    if kind in ("matroska", "avi"):
        assert np.array_equal(found, plain)
    assert abs(len(found) - len(plain)) < 0.2 * SAMPLE_RATE
    length = min(len(found), len(plain))
    assert max(np.corrcoef(np.roll(found[:length], -by), plain[:length])[0, 1] for by in range(-1600, 1601, 8)) > 0.7


@pytest.mark.parametrize("rate", [SAMPLE_RATE, 44_100, 48_000])
def test_a_track_of_one_channel_is_what_a_sound_is(rate: int) -> None:
    wave = sounds.tune(1.2, 1, rate)
    plain = read(sounds.encoded(wave, "wav", rate), LIMITS.bounds)[1]
    assert np.array_equal(opened(sounds.film(wave, "matroska", rate)).samples, plain)


@pytest.mark.parametrize("kind", ["matroska", "avi"])
@pytest.mark.parametrize("rate", [SAMPLE_RATE, 44_100])
def test_two_channels_are_mixed_as_the_library_has_it(kind: str, rate: int) -> None:
    """Its decoder, torchcodec, gives FFmpeg's mix, which is louder than the mean by a factor of √2."""
    both = np.stack([sounds.tune(1.2, 1, rate), sounds.tune(1.2, 2, rate)])
    mean = read(sounds.encoded(both, "wav", rate), LIMITS.bounds)[1]
    np.testing.assert_allclose(opened(sounds.film(both, kind, rate)).samples, 2**0.5 * mean, atol=1e-5)


def test_a_video_without_sound_is_as_any_other() -> None:
    file = opened(pictures.video(pictures.frames(4, 64, 64)))
    assert (file.inspect().track, len(file.samples)) == (None, 0)


@pytest.mark.parametrize("kept", [True, False], ids=["kept open", "opened again"])
def test_sound_lies_before_the_frames(kept: bool) -> None:
    data = sounds.film(TUNE, "matroska")
    staging = SharedBuffer.create("test", 1 << 20)
    staging.view[: len(data)] = data
    desk, place = Desk(staging, settings(staging=staging.size)), 1 << 19
    plain, sounding = SPECS[Modality.VIDEO].decoder, SPECS[Modality.VIDEO].sound_decoder
    (seen,) = desk.answers(Inspect(b"x", sounding, 0, len(data)))
    assert isinstance(seen, Inspected)
    assert seen.seen.track is not None
    samples = seen.seen.track.frames
    key = b"x" if kept else b""
    *_, done = desk.answers(Decode(key, sounding, 0, len(data), place, [0, 3], 64, 64, samples=samples))
    assert isinstance(done, Decoded)
    behind = place + 4 * samples
    heard = np.frombuffer(staging.view, np.float32, samples, place).copy()
    shown = bytes(staging.view[behind : behind + 2 * 64 * 64 * 3])
    assert np.array_equal(heard, TUNE / np.float32(32768))
    list(desk.answers(Decode(b"", plain, 0, len(data), place, [0, 3], 64, 64)))
    assert bytes(staging.view[place : place + len(shown)]) == shown
    staging.close()


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_audio_seconds": 1.0}, "AUDIO_TOO_LONG"),
        ({"max_audio_rate": 8000}, "AUDIO_FORMAT"),
        ({"max_audio_channels": 1}, "AUDIO_FORMAT"),
        ({"max_scanned_frames": 3}, "VIDEO_TOO_LONG"),
        ({"max_side": 32}, "IMAGE_TOO_LARGE"),
    ],
)
def test_the_limits_of_both_hold(limits: dict[str, int], reason: str) -> None:
    tight = MediaLimits(**limits)
    with pytest.raises(InvalidInput) as error:
        check_video(opened(sounds.film(np.stack([TUNE, TUNE])), tight).inspect(), "here", tight)
    assert (error.value.reason, error.value.field) == (reason, "here")


def test_packets_without_end_are_too_many() -> None:
    with pytest.raises(TooComplex):
        opened(sounds.film(sounds.tune(4.0), "mp4"), MediaLimits(max_video_chunks=64))


def said(data: bytes) -> str:
    try:
        check_video(opened(data).inspect(), "here", LIMITS)
    except InvalidInput as error:
        return error.reason
    except (OSError, ValueError):
        return "MEDIA_UNREADABLE"
    return ""


@pytest.mark.parametrize("name", BAD_TRACKS)
def test_bad_tracks_are_answered_as_they_should_be(name: str) -> None:
    data, reason = BAD_TRACKS[name]
    assert said(data) == ("" if reason == "AUDIO_TOO_SHORT" else reason), "the model says what is too short"
