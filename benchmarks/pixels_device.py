"""`python -m benchmarks.pixels_device`: mean time from a decoded picture in pageable memory to its patches on a GPU.

Pictures are square; a side of 4032 pixels becomes 1400, others the next smaller multiple of 28. *torch* is the former
way: synchronous copies, including resize coefficients, torch's operators, and patches concatenated into a batch.
*ring* has the same operators with the ring of pinned buffers, for sizes that the device knows. *kernels* is the
worker's way. Each is timed over a batch, until the device is done and until the host is, in turns. Pictures are
*repeated*; sizes are the only cache. The peer is the copy alone, from pinned memory.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from benchmarks.device import Machine, add_options, head, line, machine, ms, timed
from encoder_service.families.pixel_settings import PixelSettings
from encoder_service.families.qwen_processors import ImageProcessor
from encoder_service.worker import fixed_point, patches
from encoder_service.worker.patches import PatchWriter, preprocess
from encoder_service.worker.pixel_ring import way_into

_BATCH, _FACTOR, _MOST = 2, 28, 1400
_SIDES, _TINY_SIDES = (448, 1024, 4032), (30,)


@torch.inference_mode()
def rows(here: Machine, sides: Sequence[int]) -> Iterator[str]:
    """The table's rows."""
    settings = PixelSettings(1, 1 << 30, 14, 2, 2, (0.48, 0.46, 0.41), (0.27, 0.26, 0.28), 1 / 255)
    processor, way_in = ImageProcessor(settings), way_into(here.device)
    writer = _writer(here, processor)
    for side in sides:
        made = min(side, _MOST) // _FACTOR * _FACTOR
        pictures = [torch.randint(0, 256, (1, side, side, 3), dtype=torch.uint8) for _ in range(_BATCH)]
        locked = [each.pin_memory() if here.device.type == "cuda" else each for each in pictures]
        count = (made // settings.patch) ** 2
        passes: dict[str, Callable[[], object]] = {
            "copy": lambda given=locked: [each.to(here.device, non_blocking=True) for each in given],  # type: ignore[misc]
            "torch": lambda given=pictures, made=made: _joined(  # type: ignore[misc]
                (preprocess(_forget(each).to(here.device), (made, made), processor) for each in given), here.dtype
            ),
            "ring": lambda given=pictures, made=made: _joined(  # type: ignore[misc]
                (preprocess(way_in.bring(each), (made, made), processor) for each in given), here.dtype
            ),
        }
        if writer is not None:

            def kernels(given: Sequence[Tensor] = pictures, made: int = made, count: int = count) -> None:
                batch = torch.empty(len(given) * count, writer.numbers, dtype=here.dtype, device=here.device)
                for each, part in zip(given, batch.split(count), strict=True):
                    writer.write(way_in.bring(each), (made, made), part)

            passes["kernels"] = kernels
        found = {
            name: (whole / _BATCH, host / _BATCH)
            for name, (whole, host) in timed(passes, here.runs, here.device).items()
        }
        here.keep(table="pixels", side=side, made=made, seconds=found)
        whole, host = ([found.get(name, (float("nan"),) * 2)[at] for name in _NAMES] for at in (0, 1))
        yield line([side, made, *map(ms, whole), *map(ms, host[1:])])


_NAMES = ("copy", "torch", "ring", "kernels")


def _forget(picture: Tensor) -> Tensor:
    """The picture, with nothing of its size on the device."""
    fixed_point.line_on.cache_clear()
    patches.scaled.cache_clear()
    return picture


def _joined(parts: Iterator[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat([each.to(dtype) for each in parts])


def _writer(here: Machine, processor: ImageProcessor) -> PatchWriter | None:
    """The worker's own, or, where all is tiny, one that is interpreted."""
    if here.device.type == "cuda":
        return preprocess.writer(processor, here.dtype, here.device)
    from encoder_service.worker import pixel_kernels

    return PatchWriter(pixel_kernels, preprocess.cuts, processor)


def main() -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pixels_device", description=__doc__)
    add_options(parser, 20)
    here = machine(parser, given := parser.parse_args())
    print("\n" + head(["side", "becomes", *_NAMES, *(f"host, {each}" for each in _NAMES[1:])]))
    for row in rows(here, _TINY_SIDES if given.tiny else _SIDES):
        print(row, flush=True)


if __name__ == "__main__":
    main()
