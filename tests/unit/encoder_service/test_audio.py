"""What the decode process makes of sound: every format, any rate, one channel or several, and files that are broken."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from common.errors import InvalidInput
from encoder_service.item import SAMPLE_RATE
from encoder_service.media.audio import AudioFile, read
from encoder_service.media.complexity import TooComplex
from encoder_service.media.limits import MediaLimits, check_sound
from tests import sounds

LIMITS = MediaLimits(max_audio_seconds=3.0)
TUNE = sounds.tune(1.5, 7)


def samples(data: bytes, limits: MediaLimits = LIMITS) -> np.ndarray:
    AudioFile.prepare()
    return read(data, limits.bounds)[1]


@pytest.mark.parametrize("kind", ["wav", "flac"])
def test_formats_that_lose_nothing_give_every_sample(kind):
    assert np.array_equal(samples(sounds.encoded(TUNE, kind)), TUNE / np.float32(32768))


@pytest.mark.parametrize("kind", ["mp3", "opus", "m4a", "webm", "vorbis"])
def test_other_formats_give_nearly_the_same(kind):
    rate = {"opus": 48_000, "webm": 48_000, "vorbis": 44_100}.get(kind, SAMPLE_RATE)
    wave = sounds.tune(1.5, 7, rate)
    wave = np.stack([wave, wave]) if kind == "vorbis" else wave
    found, plain = samples(sounds.encoded(wave, kind, rate)), samples(sounds.encoded(wave, "wav", rate))
    assert abs(len(found) - len(plain)) < 0.2 * SAMPLE_RATE
    length = min(len(found), len(plain))
    best = max(np.corrcoef(np.roll(found[:length], -shift), plain[:length])[0, 1] for shift in range(-1200, 1201, 8))
    assert best > 0.7


def test_a_videos_own_track_is_heard():
    found = samples(sounds.film(TUNE))
    assert abs(len(found) - len(TUNE)) < 0.2 * SAMPLE_RATE
    assert 0.05 < np.abs(found).max() < 1.5


@pytest.mark.parametrize("channels", [2, 6, 8])
@pytest.mark.parametrize("kind", ["wav", "flac"])
def test_channels_are_averaged(kind, channels):
    all_of_them = np.stack([sounds.tune(1.5, seed) for seed in range(channels)])
    expected = (all_of_them.astype(np.float32) / 32768).mean(0)
    np.testing.assert_allclose(samples(sounds.encoded(all_of_them, kind)), expected, atol=1e-6)


@pytest.mark.parametrize("wanted", [SAMPLE_RATE, 24_000])
@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100, 48_000])
def test_other_rates_are_resampled_to_the_one_that_the_model_takes(rate, wanted):
    at = np.arange(rate) / rate
    wave = np.round(np.sin(2 * np.pi * 440 * at) * 16_000).astype(np.int16)
    seen, found = read(sounds.encoded(wave, "wav", rate), structs.replace(LIMITS.bounds, sample_rate=wanted))
    assert (seen.fps, seen.rate) == (rate, wanted)
    assert abs(len(found) - wanted) <= 64
    spectrum = np.abs(np.fft.rfft(found[:wanted], wanted))
    assert spectrum.argmax() == 440


@pytest.mark.parametrize("wanted", [SAMPLE_RATE, 24_000])
def test_no_more_is_decoded_than_is_taken(wanted):
    seen, found = read(sounds.encoded(sounds.tune(9.0), "flac"), structs.replace(LIMITS.bounds, sample_rate=wanted))
    assert len(found) == seen.frames == 3 * wanted + 1
    check_sound(replace(seen, frames=3 * wanted), "here", LIMITS)
    with pytest.raises(InvalidInput) as error:
        check_sound(seen, "here", LIMITS)
    assert (error.value.reason, error.value.field) == ("AUDIO_TOO_LONG", "here")


@pytest.mark.parametrize("limits", [{"max_audio_rate": 8000}, {"max_audio_channels": 1}])
def test_more_than_is_taken_at_a_time_is_not_decoded(limits):
    tight = MediaLimits(**limits)
    seen, found = read(sounds.encoded(np.stack([TUNE, TUNE]), "wav"), tight.bounds)
    assert (len(found), seen.channels, seen.fps) == (0, 2, 16_000.0)
    with pytest.raises(InvalidInput) as error:
        check_sound(seen, "here", tight)
    assert error.value.reason == "AUDIO_FORMAT"


def test_packets_without_end_are_too_many():
    data = sounds.encoded(sounds.tune(8.0), "mp3")
    with pytest.raises(TooComplex):
        samples(data, MediaLimits(max_video_chunks=64))


@pytest.mark.parametrize("kind", ["wav", "flac", "m4a"])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
def test_a_file_that_is_cut_off_is_refused(kind, share):
    data = sounds.encoded(TUNE, kind)
    with pytest.raises(ValueError, match=r"cut off|cannot be read"):
        samples(data[: int(share * len(data))])


@pytest.mark.parametrize("stated", [0, 0x7FFFF000, 0x7FFFFFFE, 0x80000000, 0xFFFFFFFF])
def test_a_file_that_was_begun_before_its_length_was_known_is_heard_to_its_end(stated):
    data = bytearray(sounds.encoded(TUNE, "wav"))
    place = data.index(b"data") + 4
    data[place : place + 4] = stated.to_bytes(4, "little")
    assert np.array_equal(samples(bytes(data)), TUNE / np.float32(32768))


def test_a_sound_that_is_none_is_refused():
    data = bytearray(sounds.encoded(TUNE, "wav"))
    place = data.index(b"fmt ") + 8
    data[place : place + 2] = (3).to_bytes(2, "little")  # floating point
    data[place + 14 : place + 16] = (32).to_bytes(2, "little")
    data[place + 12 : place + 14] = (4).to_bytes(2, "little")
    data[-4000:] = np.full(1000, np.inf, np.float32).tobytes()
    with pytest.raises(ValueError, match="a sample is too large"):
        samples(bytes(data))
