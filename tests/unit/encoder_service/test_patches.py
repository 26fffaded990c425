"""What makes patches of pictures on a GPU, on a device without numbers: what it asks of the host."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from encoder_service.families.pixel_settings import PixelSettings
from encoder_service.families.qwen2_audio import ClipProcessor
from encoder_service.families.qwen_processors import ImageProcessor
from encoder_service.worker import fixed_point
from encoder_service.worker.log_mel import log_mel
from encoder_service.worker.patches import preprocess
from tests.fake_gpu import OnHost

THERE = torch.device("meta")
SETTINGS = PixelSettings(1, 1 << 30, patch=14, temporal=2, merge=2, mean=(0.4,) * 3, std=(0.3,) * 3, rescale=1 / 255)


def test_of_a_picture_s_size_the_device_is_told_once() -> None:
    """A copy from ordinary memory is waited for, however small."""
    pixels = torch.empty(1, 90, 70, 3, dtype=torch.uint8, device=THERE)
    asked = []
    for _ in range(2):
        with OnHost() as watch:
            assert preprocess(pixels, (56, 84), ImageProcessor(SETTINGS)).shape == (24, 1176)
        asked.append(len(watch.seen))
    assert asked[0] > 0 == asked[1]


def test_mel_bands_are_sent_to_a_device_once() -> None:
    clips = ClipProcessor(bands=16, window=400, hop=160, seconds=2)
    asked = []
    for _ in range(2):
        with OnHost() as watch:
            log_mel(torch.empty(3200, device=THERE), 21, clips)
        asked.append(len(watch.seen))
    assert asked[0] > 0 == asked[1]


def test_lines_that_a_device_keeps_are_bounded() -> None:
    for size in range(4, 4 + 2 * fixed_point._KEPT):
        fixed_point.line_on(size, 8, THERE)
    assert fixed_point.line_on.cache_info().currsize == fixed_point._KEPT
