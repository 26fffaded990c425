"""`python -m benchmarks.hf_towers`: where transformers' towers spend time, and what a family of ours could save at
most: CPU seconds of one thread for a picture, in matrix products, in attention, and in the rest.

Towers have 12 layers of 12 heads of 64. CPU time holds on a busy machine. Kinds take turns; the round with the
shortest time is shown. Each has new noise, and nothing caches rows, so there are no hits to count. If a kind has a
family of ours, its pass is timed in turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.checkpoint import CACHE
from benchmarks.plain_checkpoint import plain_checkpoint
from benchmarks.tower_recipes import SIDE, TOWERS
from common.checkpoints.checkpoint import Checkpoint
from common.cpu.jit import use_threads
from common.hf import models as hf_models
from common.media.item import Modality, Options, Pixels
from encoder_service.families import config
from encoder_service.families.registry import find_family
from encoder_service.models.attention import Backend, Segments
from encoder_service.models.hf.attention import hf_backend
from encoder_service.models.hf.tower import HfTower
from encoder_service.models.processor import ItemProcessor
from encoder_service.models.tower import load_tower, multiplies_as_stored

_CPU = torch.device("cpu")
_PRODUCTS = ("linear_pointwise", "addmm", "::mm", "::bmm", "baddbmm", "convolution", "::linear")
_ATTENTION = "scaled_dot_product"


@dataclass(slots=True)
class Spent:
    """CPU seconds of a pass."""

    whole: float = 0.0
    products: float = 0.0
    attention: float = 0.0


class _Clocked(TorchDispatchMode):
    """While it is entered: the CPU time of operators, by what they are."""

    def __init__(self) -> None:
        super().__init__()
        self.spent = Spent()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        started = time.process_time()
        found = func(*args, **(kwargs or {}))
        took, name = time.process_time() - started, str(func.name())
        if _ATTENTION in name:
            self.spent.attention += took
        elif any(each in name for each in _PRODUCTS):
            self.spent.products += took
        return found


class _ClockedBackend:
    """Attention of a back end, whose time is counted."""

    def __init__(self, backend: Backend) -> None:
        self.name, self._backend = backend.name, backend
        self.attention = 0.0

    def stable(self, patches: int, longest: int, device: torch.device) -> None:
        """None: nothing is captured."""

    def over(self, lengths: Sequence[int], device: torch.device) -> Segments:
        """See `Backend`."""
        segments = self._backend.over(lengths, device)

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            started = time.process_time()
            found = segments(q, k, v)
            self.attention += time.process_time() - started
            return found

        return attend


class ByHf:
    """A tower of transformers, as a worker has it."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        found = hf_models.describe(folder)
        self._processor = ItemProcessor(folder)
        chosen = hf_backend("auto" if dtype == torch.float32 else "numba", _CPU, dtype)
        self._backend = None if chosen.name == "sdpa" else _ClockedBackend(chosen)
        self._tower = HfTower(folder, found, dtype, _CPU, self._backend)
        if not multiplies_as_stored(_CPU):
            self._tower.lay_out(lambda: self.spent(np.zeros((64, 48, 3), np.uint8)))

    def spent(self, pixels: np.ndarray) -> tuple[Spent, torch.Tensor]:
        """Time of a picture's pass, and its rows."""
        tokens = sum(each.rows for each in self._processor.replacement(pixels))
        inputs = self._processor.inputs(pixels)
        if self._backend is not None:
            self._backend.attention = 0.0
        with _Clocked() as clocked:
            started = time.process_time()
            rows = self._tower.rows(inputs, tokens)
            clocked.spent.whole = time.process_time() - started
        if self._backend is not None:
            clocked.spent.attention += self._backend.attention
        return clocked.spent, rows


class Native:
    """The tower of a family of ours."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        checkpoint = Checkpoint(folder)
        settings = config.read(checkpoint)
        self._processor, self._dtype = settings.processors[Modality.IMAGE], dtype
        self._patches: Callable[..., torch.Tensor] = resolve_name(self._processor.preprocess)
        self._tower = load_tower(checkpoint, settings, _CPU, dtype, "auto" if dtype == torch.float32 else "numba")

    def spent(self, pixels: np.ndarray) -> tuple[float, torch.Tensor]:
        """CPU seconds of a picture's pass, and its rows."""
        plan = self._processor.plan_pixels(Pixels(b"", 1, *pixels.shape[:2]), Options())
        patches = self._patches(torch.from_numpy(pixels).unsqueeze(0), plan.resized, self._processor).to(self._dtype)
        started = time.process_time()
        rows = self._tower(patches, [plan.grid])
        return time.process_time() - started, rows


@torch.inference_mode()
def main() -> None:
    """Measures all and prints a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hf_towers", description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", default=list(TOWERS), help="by default all")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=5, help="rounds; the one with the shortest time is shown")
    given = parser.parse_args()
    torch.set_num_threads(1)
    use_threads(1)
    dtype = getattr(torch, given.dtype)
    random = np.random.default_rng()
    print(
        "| | a pass | products | attention | the rest | of it | a family's pass |\n|---|---:|---:|---:|---:|---:|---:|"
    )
    for kind in given.kinds:
        folder = plain_checkpoint(TOWERS[kind], CACHE.with_name(f"tower-{kind}"))
        ours = Native(folder, dtype) if find_family(Checkpoint(folder).config) is not None else None
        theirs = ByHf(folder, dtype)
        spent, native = list[Spent](), list[float]()
        for _ in range(given.rounds + 1):
            pixels = random.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
            own, rows = theirs.spent(pixels)
            spent.append(own)
            if ours is not None:
                seconds, also = ours.spent(pixels)
                native.append(seconds)
                _same(rows, also, dtype)
        best = min(spent[1:], key=lambda each: each.whole)  # the first warms up
        rest = best.whole - best.products - best.attention
        cells = [f"{1e3 * each:.0f} ms" for each in (best.whole, best.products, best.attention, rest)]
        family = f"{min(native[1:]) / best.whole:.2f}" if native else "–"
        print(f"| {kind} | {' | '.join(cells)} | {rest / best.whole:.3f} | {family} |", flush=True)


def _same(rows: torch.Tensor, others: torch.Tensor, dtype: torch.dtype) -> None:
    """Raises SystemExit where rows of a family are others than transformers'."""
    apart = float((rows.float() - others.float()).abs().max() / rows.float().abs().max())
    if not apart < (1e-3 if dtype == torch.float32 else 0.1):
        raise SystemExit(f"rows of the family and of transformers differ by {apart:.1e}")


if __name__ == "__main__":
    main()
