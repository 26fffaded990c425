"""`python -m benchmarks.generic`: a checkpoint of a family of ours, computed by that and by way of the library, in one
process and in turns: rows, prefill and decoding.

Each round has a new picture and a new question, the same both ways; there is no prefix cache, and nothing remembers
rows, so there are no hits to count. The run fails where rows differ by more than rounding, or a token differs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
import torch

from benchmarks.checkpoint import add_model_options, chosen_model
from common import library_models
from common.checkpoint import Checkpoint
from common.cpu.jit import use_threads
from common.devices import usable_cores
from common.media.item import Grid, Header, Key, Modality, Options, Pixels, PromptPart
from encoder_service.families import config
from encoder_service.models.generic import LibraryTower
from encoder_service.models.processor import ItemProcessor
from encoder_service.models.tower import load_tower
from llm_service.models.served import ServedModel
from llm_service.prompt.builder import PromptBuilder
from llm_service.request import ChatPrompt, MediaItem, Message, SamplingParams
from tests.parity.local_engine import LocalEngine, Prompt

_CPU = torch.device("cpu")
_CLOSE = 1e-3
_WORDS = ("red", "green", "blue", "left", "right", "above", "below", "near", "far", "large", "small", "bright", "dark")


@dataclass(frozen=True, slots=True)
class Seconds:
    """Of one answer."""

    rows: float
    prefill: float
    token: float


class Native:
    """By a family of ours."""

    def __init__(self, folder: Path) -> None:
        checkpoint = Checkpoint(folder)
        settings = config.read(checkpoint)
        self._processor = settings.processors[Modality.IMAGE]
        self._patches: Callable[..., torch.Tensor] = resolve_name(self._processor.preprocess)
        self._tower = load_tower(checkpoint, settings, _CPU, torch.float32)
        self.builder, self.engine = PromptBuilder(checkpoint), LocalEngine(folder)

    def rows(self, pixels: np.ndarray) -> tuple[Header, torch.Tensor]:
        """An item's header, and its rows [tokens, levels, width]."""
        height, width = pixels.shape[:2]
        plan = self._processor.plan_pixels(Pixels(b"", 1, height, width), Options())
        patches = self._patches(torch.from_numpy(pixels).unsqueeze(0), plan.resized, self._processor)
        return Header(pixels.tobytes()[:32], Modality.IMAGE, plan.grid, plan.tokens), self._tower(patches, [plan.grid])


class ByLibrary:
    """By the library."""

    def __init__(self, folder: Path) -> None:
        found = library_models.describe(folder)
        self._processor = ItemProcessor(folder)
        self._tower = LibraryTower(folder, found, torch.float32, _CPU)
        self.builder = PromptBuilder(Checkpoint(folder), ServedModel.by_library(found))
        self.engine = LocalEngine(folder, library=found)
        self._parts: dict[tuple[int, ...], tuple[PromptPart, ...]] = {}

    def rows(self, pixels: np.ndarray) -> tuple[Header, torch.Tensor]:
        """As `Native.rows`. What stands in a prompt is remembered by size, as in the service."""
        if pixels.shape not in self._parts:
            self._parts[pixels.shape] = self._processor.replacement(pixels)
        parts = self._parts[pixels.shape]
        tokens = sum(part.rows for part in parts)
        header = Header(pixels.tobytes()[:32], Modality.IMAGE, Grid(1, 1, tokens), tokens, replacement=parts)
        return header, self._tower.rows(self._processor.inputs(pixels), tokens)


def _ask(way: Native | ByLibrary, pixels: np.ndarray, question: str, tokens: int) -> tuple[Seconds, torch.Tensor, Any]:
    started = time.perf_counter()
    with torch.inference_mode():
        header, rows = way.rows(pixels)
    encoded = time.perf_counter() - started
    message = Message("user", (MediaItem(Modality.IMAGE, Key(b""), index=0), question))
    pieces = way.builder.pieces(ChatPrompt((message,)), [Modality.IMAGE])
    prompt = Prompt(way.builder.layout(pieces, [header]), [rows.clone()], {})
    spent, said = [], []
    for count in (1, tokens):
        started = time.perf_counter()
        sampling = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        said = way.engine.run([prompt], sampling)[0].tokens
        spent.append(time.perf_counter() - started)
    return Seconds(encoded, spent[0], (spent[1] - spent[0]) / (tokens - 1)), rows, said


def main() -> None:
    """Measures all and prints a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.generic", description=__doc__)
    add_model_options(parser)
    parser.add_argument("--side", type=int, default=448, help="of a picture, in pixels")
    parser.add_argument("--rounds", type=int, default=5, help="of which the median is shown")
    parser.add_argument("--tokens", type=int, default=32, help="of an answer")
    given = parser.parse_args()
    torch.set_num_threads(usable_cores())
    use_threads(usable_cores())
    folder = chosen_model(given)
    ways = {"native": Native(folder), "library": ByLibrary(folder)}
    random = np.random.default_rng()
    found: dict[str, list[Seconds]] = {name: [] for name in ways}
    for number in range(given.rounds + 1):
        pixels = random.integers(0, 256, (given.side, given.side, 3), dtype=np.uint8)
        question = " ".join(random.choice(_WORDS, 40))
        order = list(ways) if number % 2 else list(ways)[::-1]
        answers = {name: _ask(ways[name], pixels, question, given.tokens) for name in order}
        (_, one, said), (_, other, also) = answers["native"], answers["library"]
        apart = float((one - other).abs().max() / other.abs().max())
        if not apart < _CLOSE or said != also:
            raise SystemExit(f"the two ways differ: rows by {apart:.1e}, tokens {'equal' if said == also else 'not'}")
        if number:  # the first warms up
            for name in ways:
                found[name].append(answers[name][0])
    print("| | rows | prefill | a token |\n|---|---:|---:|---:|")
    native = _medians(found["native"])
    for name in ways:
        cells = zip(_medians(found[name]), native, strict=True)
        print(f"| {name} | " + " | ".join(f"{1e3 * mine:.1f} ms ({mine / ours:.2f})" for mine, ours in cells) + " |")
    print(f"\n{given.rounds} pictures of {given.side} pixels a side; rows within {_CLOSE:g}, all tokens equal")


def _medians(found: list[Seconds]) -> list[float]:
    return [statistics.median(getattr(each, name) for each in found) for name in ("rows", "prefill", "token")]


if __name__ == "__main__":
    main()
