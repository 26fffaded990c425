"""Each limit at its edge: the last value that is allowed and the first that is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.errors import InvalidInput
from common.media.item import Grid, Modality, Options, Pixels
from encoder_service.item import Inspection, Item, Plan
from encoder_service.media import checks, limits
from encoder_service.media.limits import MediaLimits

JPEG, MP4, WAV = b"\xff\xd8\xff", b"\0\0\0\x18ftyp", b"RIFF\0\0\0\0WAVE"
LIMITS = MediaLimits()


def reason(check, *args) -> str:
    """The reason of the refusal; empty where there is none."""
    try:
        check(*args)
    except InvalidInput as error:
        return error.reason if error.field.startswith("items[0]") else "without its field"
    return ""


def item(source, modality: Modality = Modality.IMAGE, **options) -> Item:
    return Item(modality, source, Options(**options), field="items[0]")


@pytest.mark.parametrize(
    ("what", "refused"),
    [
        (item(JPEG.ljust(LIMITS.max_image_bytes, b"\0")), ""),
        (item(JPEG.ljust(LIMITS.max_image_bytes + 1, b"\0")), "IMAGE_TOO_LARGE"),
        (item(MP4.ljust(LIMITS.max_video_bytes, b"\0"), Modality.VIDEO), ""),
        (item(MP4.ljust(LIMITS.max_video_bytes + 1, b"\0"), Modality.VIDEO), "VIDEO_TOO_LARGE"),
        (item(JPEG, min_pixels=1, max_pixels=1), ""),
        (item(JPEG, min_pixels=2, max_pixels=1), "BAD_OPTION"),
        (item(JPEG, max_pixels=LIMITS.max_video_area), ""),
        (item(JPEG, max_pixels=LIMITS.max_video_area + 1), "BAD_OPTION"),
        (item(MP4, Modality.VIDEO, fps=1000.0, max_frames=768), ""),
        (item(MP4, Modality.VIDEO, fps=1000.1), "BAD_OPTION"),
        (item(MP4, Modality.VIDEO, fps=0.0), "BAD_OPTION"),
        (item(MP4, Modality.VIDEO, max_frames=769), "BAD_OPTION"),
        (item(JPEG, max_frames=1), "BAD_OPTION"),
        (item(Pixels(bytes(48), 1, 4, 4)), ""),
        (item(Pixels(bytes(96), 2, 4, 4)), "BAD_PIXELS"),
        (item(Pixels(bytes(96), 2, 4, 4, (0.0, 0.0)), Modality.VIDEO), ""),
        (item(Pixels(bytes(96), 2, 4, 4, (1.0, 0.0)), Modality.VIDEO), "BAD_PIXELS"),
        (item(Pixels(bytes(96), 2, 4, 4, (0.0, float("inf"))), Modality.VIDEO), "BAD_PIXELS"),
        (item(Pixels(bytes(96), 2, 4, 4, (0.0, limits.MAX_SECONDS)), Modality.VIDEO), ""),
        (item(Pixels(bytes(96), 2, 4, 4, (0.0, 1e306)), Modality.VIDEO), "VIDEO_TOO_LONG"),
        (item(Pixels(bytes(27), 1, 3, 3)), "IMAGE_TOO_SMALL"),
    ],
)
def test_items(what, refused):
    assert reason(checks.check_item, what, LIMITS) == refused


@pytest.mark.parametrize(("modality", "file"), [(Modality.AUDIO, WAV), (Modality.VIDEO, MP4)])
@pytest.mark.parametrize(("more", "refused"), [(0, ""), (1, "AUDIO_TOO_LARGE")])
def test_files_that_are_heard(modality, file, more, refused):
    heard = {"with_sound": True} if modality is Modality.VIDEO else {}
    tight = MediaLimits(max_audio_bytes=100)
    assert reason(checks.check_item, item(file.ljust(100 + more, b"\0"), modality, **heard), tight) == refused


@pytest.mark.parametrize(
    ("width", "height", "refused"),
    [
        (4, 4, ""),
        (3, 4, "IMAGE_TOO_SMALL"),
        (4, 800, ""),
        (4, 801, "IMAGE_RATIO"),
        (16384, 1025, ""),
        (16384, 1026, "IMAGE_TOO_LARGE"),
        (16385, 100, "IMAGE_TOO_LARGE"),
        (4000, 4200, ""),
        (0, 0, "IMAGE_TOO_SMALL"),
        (-5, 10, "IMAGE_TOO_SMALL"),
    ],
)
def test_pictures(width, height, refused):
    assert reason(limits.check_picture, Inspection(width, height), "items[0]", LIMITS) == refused


@pytest.mark.parametrize(
    ("frames", "fps", "refused"),
    [
        (100_000, 30.0, ""),
        (100_001, 30.0, "VIDEO_TOO_LONG"),
        (10**9, 30.0, "VIDEO_TOO_LONG"),
        (0, 30.0, "VIDEO_UNREADABLE"),
        (10, 0.0, "VIDEO_UNREADABLE"),
        (10, float("nan"), "VIDEO_UNREADABLE"),
        (10, -1.0, "VIDEO_UNREADABLE"),
        (10, float("inf"), "VIDEO_UNREADABLE"),
        (10, 1000.0, ""),
    ],
)
def test_videos(frames, fps, refused):
    assert reason(limits.check_video, Inspection(64, 64, frames, fps), "items[0]", LIMITS) == refused


@pytest.mark.parametrize(
    ("plan", "refused"),
    [
        (Plan(Grid(32, 4, 4), 128, tuple(range(64)), 1000, 2000, (56, 56)), ""),
        (Plan(Grid(33, 4, 4), 132, tuple(range(66)), 1000, 2000, (56, 56)), "VIDEO_TOO_LARGE"),
        (Plan(Grid(9, 10, 10), 225, tuple(range(18)), 10, 10, (140, 140)), ""),
        (Plan(Grid(1, 10, 12), 30, (0,), 10, 10, (140, 168)), "TOO_MANY_PATCHES"),
        (Plan(Grid(2, 2, 2), 2, (0, 1, 2, 3), 10, 10, (28, 28), (0.0, 1e7), 1.0), ""),
        (Plan(Grid(2, 2, 2), 2, (0, 1, 2, 3), 10, 10, (28, 28), (0.0, 1.1e7), 1.0), "VIDEO_TOO_LONG"),
        (Plan(Grid(1, 2, 2), 1, (0, 1), 10, 10, (28, 28), (0.0,), 1e300), "VIDEO_TOO_LONG"),
    ],
)
def test_plans(plan, refused):
    assert reason(limits.check_plan, plan, "items[0]", LIMITS, 100) == refused


def test_frames_are_resized_as_they_come_where_they_are_too_large_together():
    large = Plan(Grid(33, 4, 4), 132, tuple(range(66)), 1000, 2000, (56, 64))
    assert limits.fitted(large, LIMITS) == replace(large, height=56, width=64, whole=(1000, 2000))
    assert reason(limits.check_plan, limits.fitted(large, LIMITS), "items[0]", LIMITS, 100) == ""
    for fits in (
        replace(large, frames=large.frames[:64]),
        replace(large, frames=(0,), height=20_000, width=20_000),
        replace(large, resized=(1000, 2000)),
    ):
        assert limits.fitted(fits, LIMITS) is fits


def test_a_mime_type_may_have_parameters_and_capitals():
    assert reason(checks.check_item, replace(item(JPEG), mime_type="Image/JPEG; charset=binary"), LIMITS) == ""
    assert reason(checks.check_item, replace(item(JPEG), mime_type="image/png"), LIMITS) == "MIME_MISMATCH"
