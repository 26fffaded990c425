"""The kernels of pictures in Triton's interpreter: the very bits that torch gives; and how many a batch is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

from common.media.item import Modality
from common.shm.arena import SharedBuffer
from encoder_service.families.internvl import PictureTiles, TileSettings
from encoder_service.families.qwen_processors import ImageProcessor
from encoder_service.worker import patches, pixel_kernels, tiles
from encoder_service.worker.messages import Batch, Piece, WorkerSettings
from encoder_service.worker.patches import PatchWriter
from encoder_service.worker.runner import Runner
from testkit import pixel_cases
from tests import kernel_layout
from tests.fake_gpu import OnHost

ROOM = 1 << 20
VIEWS = {"split_with_sizes", "slice", "select", "view", "new_empty", "empty", "detach", "alias"}
THERE = torch.device("meta")


def in_types(cases: Sequence[tuple[int, ...]]) -> list[tuple[Any, ...]]:
    """The smallest in every type, the others in one: a kernel computes in float32 whatever it stores."""
    return [(*case, dtype) for case in cases for dtype in pixel_cases.TYPES[: None if case is cases[0] else 1]]


@pytest.mark.parametrize(("shape", "size"), pixel_cases.SIZES)
def test_pictures_are_resized_to_the_same_bits(shape: tuple[int, int, int], size: tuple[int, int]) -> None:
    pixel_cases.check_resize(shape, size, "cpu")


class Operators(TorchDispatchMode):
    """Those that were called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.__name__.partition(".")[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("patch", "temporal", "frames", "dtype"), in_types(pixel_cases.PATCHES), ids=str)
def test_patches_have_the_same_bits(patch: int, temporal: int, frames: int, dtype: torch.dtype) -> None:
    pixel_cases.check_patches(patch, temporal, frames, dtype, "cpu")


@pytest.mark.parametrize(("down", "across", "dtype"), in_types(pixel_cases.TILES), ids=str)
def test_tiles_have_the_same_bits(down: int, across: int, dtype: torch.dtype) -> None:
    pixel_cases.check_tiles(down, across, dtype, "cpu")


def test_frames_of_which_no_whole_patches_can_be_made_are_refused() -> None:
    """A plan has the last frame of a video there again, until they can."""
    writer = PatchWriter(pixel_kernels, patches.preprocess.cuts, ImageProcessor(pixel_cases.settings(14, 2)))
    with pytest.raises(RuntimeError):
        writer.write(torch.zeros(3, 28, 28, 3, dtype=torch.uint8), (28, 28), torch.zeros(8, writer.numbers))


@pytest.mark.parametrize("temporal", [1, 2])
def test_kernels_are_tried_before_they_are_used(temporal: int) -> None:
    given = pixel_cases.settings(14, temporal), torch.float32, torch.device("cpu")
    patches.try_out(pixel_kernels, *given)
    other = SimpleNamespace(resize=pixel_kernels.resize, write_patches=lambda _, out, *__: out.zero_())
    with pytest.raises(ValueError, match="other patches"):
        patches.try_out(other, *given)


def test_where_they_do_not_run_torch_makes_patches(capsys: pytest.CaptureFixture[str]) -> None:
    """As on a GPU that this process cannot use."""
    processor = ImageProcessor(pixel_cases.settings(12, 2))
    assert patches.preprocess.writer(processor, torch.float32, torch.device("cuda:0")) is None
    assert "kernels of pictures do not run" in capsys.readouterr().out
    assert patches.preprocess.writer(processor, torch.float32, torch.device("cpu")) is None


def piece(at: int, size: tuple[int, int, int], resized: tuple[int, int], modality: Modality) -> Piece:
    grid = (max(1, size[0] // 2), resized[0] // 16, resized[1] // 16)
    return Piece(modality, at, *size, resized, grid, grid[0] * grid[1] * grid[2] // 4, 0)


def test_a_batch_of_pictures_and_of_a_video_has_the_same_patches(checkpoints: Callable[..., Path]) -> None:
    arenas = [SharedBuffer.create(name, ROOM) for name in ("staging", "store")]
    given = WorkerSettings(str(checkpoints("qwen3_vl")), "cpu", "bfloat16", 0, ROOM, ROOM)
    runner = Runner(given, *arenas)
    arenas[0].view[:] = torch.randint(0, 256, (ROOM,), generator=torch.Generator().manual_seed(0)).byte().numpy()
    batch = Batch(
        [
            piece(0, (1, 64, 64), (64, 64), Modality.IMAGE),
            piece(40_000, (4, 32, 96), (32, 96), Modality.VIDEO),
            piece(90_000, (1, 32, 64), (32, 64), Modality.IMAGE),
        ]
    )
    expected = runner.prepare(batch).patches
    kinds = runner._config.processors.items()
    runner._writers = {kind: PatchWriter(pixel_kernels, patches.preprocess.cuts, each) for kind, each in kinds}
    found = runner.prepare(batch).patches
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected)
    for each in arenas:
        each.close()


@pytest.mark.parametrize("processor", [ImageProcessor(pixel_cases.settings(14, 2)), None], ids=["whole", "tiles"])
def test_a_picture_is_three_kernels_and_nothing_else_once_its_size_is_known(
    processor: ImageProcessor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device without numbers: no operator, and nothing that the host is asked for. The copy of a picture that is
    cut into tiles is three more."""
    launched: list[str] = []

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **constants: Any) -> None:
        kernel_layout.check(self.fn.__name__, self.arg_names, args, constants)
        launched.append(self.fn.__name__)

    monkeypatch.setattr(InterpretedFunction, "run", launch)
    kernels = ["line_kernel", "column_kernel", "patch_kernel"]
    if processor is None:
        given = PictureTiles(TileSettings(56, pixel_cases.settings(14, 1)))
        writer, size, count = PatchWriter(pixel_kernels, tiles.preprocess.cuts, given), (56, 112), 48
        kernels *= 2
    else:
        writer, size, count = PatchWriter(pixel_kernels, patches.preprocess.cuts, processor), (56, 112), 32
    pixels = torch.empty(1, 90, 70, 3, dtype=torch.uint8, device=THERE)
    out = torch.empty(count, writer.numbers, dtype=torch.bfloat16, device=THERE)
    writer.write(pixels, size, out)
    launched.clear()
    with OnHost() as host, Operators() as operators:
        writer.write(pixels, size, out)
    assert launched == kernels
    assert host.seen == []
    assert set(operators.seen) <= VIEWS
