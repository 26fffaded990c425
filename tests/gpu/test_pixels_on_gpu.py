"""What makes patches of pictures, compiled, against torch there and on a CPU; and their way there. `make gpu-check`."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from encoder_service.families.qwen_processors import ImageProcessor
from encoder_service.worker import patches
from encoder_service.worker.pixel_ring import CudaLoader, PixelRing, way_into
from testkit import pixel_cases

pytestmark = pytest.mark.gpu

each_type = pytest.mark.parametrize("dtype", pixel_cases.TYPES, ids=str)
LARGE = (((1, 3024, 4032), (1036, 1400)), ((4, 720, 1280), (448, 448)))
THERE = torch.device("cuda:0")


@pytest.mark.parametrize(("shape", "size"), pixel_cases.SIZES + LARGE)
def test_pictures_are_resized_to_the_same_bits(shape: tuple[int, int, int], size: tuple[int, int]) -> None:
    pixel_cases.check_resize(shape, size, "cuda")


@each_type
@pytest.mark.parametrize(("patch", "temporal", "frames"), pixel_cases.PATCHES)
def test_patches_have_the_same_bits(patch: int, temporal: int, frames: int, dtype: torch.dtype) -> None:
    pixel_cases.check_patches(patch, temporal, frames, dtype, "cuda")


@each_type
@pytest.mark.parametrize(("down", "across"), pixel_cases.TILES)
def test_tiles_have_the_same_bits(down: int, across: int, dtype: torch.dtype) -> None:
    pixel_cases.check_tiles(down, across, dtype, "cuda")


@each_type
def test_they_are_what_a_worker_chooses_and_make_the_patches_of_a_cpu(dtype: torch.dtype) -> None:
    processor = ImageProcessor(pixel_cases.settings(14, 2))
    writer = patches.preprocess.writer(processor, dtype, THERE)
    assert writer is not None
    pixels = pixel_cases.noise(1, 301, 500, device="cpu")
    expected = patches.preprocess(pixels, (280, 448), processor).to(dtype)
    writer.write(way_into(THERE).bring(pixels), (280, 448), found := torch.empty_like(expected, device=THERE))
    assert torch.equal(found.cpu(), expected)


def test_pixels_arrive_whole_while_the_device_computes() -> None:
    """More bytes than the ring holds, on a stream of their own."""
    ring = PixelRing(CudaLoader(THERE), buffers=2, size=1 << 16)
    large, small = (pixel_cases.noise(1, side, side, device="cpu") for side in (700, 30))
    ring.bring(small)
    torch.cuda.synchronize(THERE)
    busy = torch.randn(4096, 4096, device=THERE)
    side = torch.cuda.Stream(THERE)
    for _ in range(3):
        busy = busy @ busy / 64
        with torch.cuda.stream(side):
            there = [ring.bring(each) for each in (large, small)]
        side.synchronize()
        assert all(torch.equal(one.cpu(), other) for one, other in zip(there, (large, small), strict=True))


def test_a_picture_of_a_known_size_asks_the_host_for_nothing() -> None:
    processor = ImageProcessor(pixel_cases.settings(14, 2))
    writer, ring = patches.preprocess.writer(processor, torch.bfloat16, THERE), way_into(THERE)
    assert writer is not None
    pixels, out = pixel_cases.noise(1, 301, 500, device="cpu"), torch.empty(640, writer.numbers).to(THERE).bfloat16()
    writer.write(ring.bring(pixels), (280, 448), out)
    torch.cuda.synchronize(THERE)
    torch.cuda.set_sync_debug_mode("error")
    try:
        writer.write(ring.bring(pixels), (280, 448), out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
