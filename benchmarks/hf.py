"""`python -m benchmarks.hf`: one checkpoint, computed by a family of ours if there is one, through transformers with
our decoder for the text, and by transformers alone, in one process and in turns: rows, prefill, decoding.

Each round has a new picture and a new question, the same for all; there is no prefix cache, and nothing caches rows,
so there are no hits to count. The run fails if rows differ by more than rounding, or a token differs.

On a busy machine `--cpu-time` counts the processor time of one thread, and shows the shortest of all rounds.
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

from benchmarks.checkpoint import CACHE, add_model_options, chosen_model
from benchmarks.plain_checkpoint import (
    GEMMA3,
    GEMMA3N,
    GEMMA4,
    KIMI,
    LLAVA,
    MISTRAL_LARGE4,
    MOLMO2,
    PHI4,
    plain_checkpoint,
)
from common.checkpoints.checkpoint import Checkpoint
from common.cpu.jit import use_threads
from common.hardware import usable_cores
from common.hf import models as hf_models
from common.media.item import Grid, Header, Key, Modality, Options, Pixels, PromptPart
from encoder_service.families import config
from encoder_service.models.hf.tower import HfTower
from encoder_service.models.processor import ItemProcessor
from encoder_service.models.tower import load_tower, multiplies_as_stored
from llm_service.families.registry import find_family
from llm_service.model_config.served import ServedModel
from llm_service.models.known_text import known_text
from llm_service.prompt.builder import PromptBuilder
from llm_service.request import ChatPrompt, MediaItem, Message, SamplingParams
from testkit.local_engine import LocalEngine, Prompt

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


class ByHf:
    """By way of transformers; with `ours` its text by our decoder."""

    def __init__(self, folder: Path, *, ours: bool) -> None:
        found = hf_models.describe(folder)
        self._processor = ItemProcessor(folder)
        self._parts: dict[tuple[int, ...], tuple[PromptPart, ...]] = {}
        self._tower = HfTower(folder, found, torch.float32, _CPU)
        if not multiplies_as_stored(_CPU):  # as in a worker
            with torch.inference_mode():
                self._tower.lay_out(lambda: self.rows(np.zeros((64, 48, 3), np.uint8)))
        self.builder = PromptBuilder(Checkpoint(folder), ServedModel.by_hf(found))
        text = known_text(Checkpoint(folder), found) if ours else None
        self.engine = LocalEngine(folder, hf=found, text=text)
        if ours and text is None:
            raise SystemExit("our decoder does not compute this text: the log says why")

    def rows(self, pixels: np.ndarray) -> tuple[Header, torch.Tensor]:
        """As `Native.rows`. What stands in a prompt is remembered by size, as in the service."""
        if pixels.shape not in self._parts:
            self._parts[pixels.shape] = self._processor.replacement(pixels)
        parts = self._parts[pixels.shape]
        tokens = sum(part.rows for part in parts)
        header = Header(pixels.tobytes()[:32], Modality.IMAGE, Grid(1, 1, tokens), tokens, replacement=parts)
        return header, self._tower.rows(self._processor.inputs(pixels), tokens)


def _ask(
    way: Native | ByHf, pixels: np.ndarray, question: str, tokens: int, clock: Callable[[], float]
) -> tuple[Seconds, torch.Tensor, Any]:
    started = clock()
    with torch.inference_mode():
        header, rows = way.rows(pixels)
    encoded = clock() - started
    message = Message("user", (MediaItem(Modality.IMAGE, Key(b""), index=0), question))
    pieces = way.builder.pieces(ChatPrompt((message,)), [Modality.IMAGE])
    prompt = Prompt(way.builder.layout(pieces, [header]), [rows.clone()], {})
    spent, said = [], []
    for count in (1, tokens):
        started = clock()
        sampling = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        said = way.engine.run([prompt], sampling, [1 if way.engine.adapters else 0])[0].tokens
        spent.append(clock() - started)
    return Seconds(encoded, spent[0], (spent[1] - spent[0]) / (tokens - 1)), rows, said


def main() -> None:
    """Measures all and prints a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hf", description=__doc__)
    add_model_options(parser)
    parser.add_argument("--llava", action="store_true", help="a random checkpoint in LLaVA's format, without a family")
    parser.add_argument("--gemma", action="store_true", help="a random one in Gemma 3's, with windows of 256 tokens")
    parser.add_argument("--gemma4", action="store_true", help="a random one in Gemma 4's, with per-layer inputs")
    parser.add_argument("--kimi", action="store_true", help="a random one in Kimi K2.5's, with latent attention")
    parser.add_argument("--molmo", action="store_true", help="a random one in Molmo 2's, whose rows see each other")
    parser.add_argument("--phi", action="store_true", help="a random one in Phi-4 multimodal's, with its adapter")
    parser.add_argument(
        "--gemma3n", action="store_true", help="a random one in Gemma 3n's, with streams between layers"
    )
    parser.add_argument("--mistral", action="store_true", help="a random one in Mistral Large 4's, with an index")
    parser.add_argument("--cpu-time", action="store_true", help="CPU time of one thread; the shortest of all rounds")
    parser.add_argument("--side", type=int, default=448, help="side of a picture in pixels")
    parser.add_argument("--rounds", type=int, default=5, help="rounds; the median is shown")
    parser.add_argument("--words", type=int, default=40, help="words of a question")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of an answer")
    given = parser.parse_args()
    cores = 1 if given.cpu_time else usable_cores()
    torch.set_num_threads(cores)
    use_threads(cores)
    asked = {"llava": (given.llava, LLAVA), "gemma3": (given.gemma, GEMMA3), "gemma4": (given.gemma4, GEMMA4)}
    asked |= {"kimi": (given.kimi, KIMI), "molmo": (given.molmo, MOLMO2), "phi": (given.phi, PHI4)}
    asked |= {"gemma3n": (given.gemma3n, GEMMA3N), "mistral": (given.mistral, MISTRAL_LARGE4)}
    plain = {name: recipe for name, (wanted, recipe) in asked.items() if wanted}
    folders = [plain_checkpoint(recipe, CACHE.with_name(f"{CACHE.name}-{name}")) for name, recipe in plain.items()]
    folder = folders[0] if folders else chosen_model(given)
    ways: dict[str, Native | ByHf] = (
        {} if find_family(Checkpoint(folder).config) is None else {"native": Native(folder)}
    )
    ways |= {"our decoder": ByHf(folder, ours=True), "transformers": ByHf(folder, ours=False)}
    clock = time.process_time if given.cpu_time else time.perf_counter
    random = np.random.default_rng()
    found: dict[str, list[Seconds]] = {name: [] for name in ways}
    for number in range(given.rounds + 1):
        pixels = random.integers(0, 256, (given.side, given.side, 3), dtype=np.uint8)
        question = " ".join(random.choice(_WORDS, given.words))
        order = list(ways) if number % 2 else list(ways)[::-1]
        answers = {name: _ask(ways[name], pixels, question, given.tokens, clock) for name in order}
        _, rows, said = answers["transformers"]
        for name, (_, own, also) in answers.items():
            apart = float((own - rows).abs().max() / rows.abs().max())
            if not apart < _CLOSE or said != also:
                equal = "equal" if said == also else "not"
                raise SystemExit(f"{name} and transformers differ: rows by {apart:.1e}, tokens {equal}")
        if number:  # the first warms up
            for name in ways:
                found[name].append(answers[name][0])
    print("| | rows | prefill | a token |\n|---|---:|---:|---:|")
    middle: Callable[[list[float]], float] = min if given.cpu_time else statistics.median
    times = {name: [middle([getattr(each, part) for each in found[name]]) for part in _PARTS] for name in ways}
    first = next(iter(times.values()))
    for name, each in times.items():
        cells = zip(each, first, strict=True)
        print(f"| {name} | " + " | ".join(f"{1e3 * mine:.1f} ms ({mine / ours:.2f})" for mine, ours in cells) + " |")
    what = "processor time of one thread, the least" if given.cpu_time else "medians"
    print(f"\n{given.rounds} pictures of {given.side} pixels a side, {what}; rows within {_CLOSE:g}, all tokens equal")


_PARTS = ("rows", "prefill", "token")


if __name__ == "__main__":
    main()
