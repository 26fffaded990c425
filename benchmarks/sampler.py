"""`python -m benchmarks.sampler`: sampling a token for each row of a step, by us and by transformers' processors.

Logits have a vocabulary of 151 936 with fifty likely words. transformers' side is its processors over the whole batch,
softmax and `multinomial`. The figure is the CPU time of one thread, the shortest of several steps. Both get the same
logits, which are new for each number of rows and *repeated* in every step; nothing caches them, so there are no hits
to count.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from llm_service.plan import Draw, StepResult
from llm_service.worker import sampler

_VOCABULARY, _LIKELY, _HISTORY = 151_936, 50, 1000
_BATCHES = (1, 8, 64)
_KINDS: dict[str, dict[str, Any]] = {
    "temperature 0.8": {},
    "and top-p 0.9": {"top_p": 0.9},
    "and top-k 50, top-p 0.9": {"top_k": 50, "top_p": 0.9},
    "and top-p 0.9, repetition 1.1": {"top_p": 0.9, "repetition_penalty": 1.1},
}


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sampler", description=__doc__)
    parser.add_argument("--steps", type=int, default=5, help="steps of each kind; the shortest time is shown")
    parser.add_argument("--rows", type=int, nargs="+", default=_BATCHES, help="rows of a step")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print("| | rows | transformers | Twinlens | ratio |\n|---|---:|---:|---:|---:|")
    for name, settings in _KINDS.items():
        for batch in given.rows:
            rows, history = _batch(batch)
            peer = _least(partial(_peer, rows, history, settings), given.steps)
            draws = [_draw(index, history[index], settings) for index in range(batch)]
            ours = _least(partial(_ours, rows, draws), given.steps)
            print(f"| {name} | {batch} | {1e3 * peer:.1f} ms | {1e3 * ours:.1f} ms | {ours / peer:.2f} |")


def _batch(rows: int) -> tuple[Tensor, Tensor]:
    """Logits float32 [rows, vocabulary] and the tokens before them, int64 [rows, history]."""
    logits = 3.0 * torch.randn(rows, _VOCABULARY)
    logits[:, :_LIKELY] += 14.0
    return logits, torch.randint(0, _VOCABULARY, (rows, _HISTORY))


def _draw(index: int, history: Tensor, settings: dict[str, Any]) -> Draw:
    asked = "repetition_penalty" in settings
    prompt, output = (some.int().numpy().tobytes() if asked else b"" for some in history.split(len(history) // 2))
    return Draw(at=index, temperature=0.8, uniform=(index + 0.5) / 64, prompt=prompt, output=output, **settings)


def _ours(rows: Tensor, draws: list[Draw]) -> StepResult:
    return sampler.draw(rows, draws, torch.empty(0, dtype=torch.int64)).result()


def _peer(rows: Tensor, history: Tensor, settings: dict[str, Any]) -> Tensor:
    made: dict[str, Callable[[Any], Any]] = {
        "repetition_penalty": RepetitionPenaltyLogitsProcessor,
        "temperature": TemperatureLogitsWarper,
        "top_k": TopKLogitsWarper,
        "top_p": TopPLogitsWarper,
    }
    asked = {"temperature": 0.8, **settings}
    processors: Any = LogitsProcessorList(make(asked[name]) for name, make in made.items() if name in asked)
    ids: Any = history
    scores: Tensor = processors(ids, rows.clone())
    return scores.softmax(-1).multinomial(1)


def _least(step: Callable[[], object], steps: int) -> float:
    best = float("inf")
    for _ in range(steps + 1):
        started = time.thread_time()
        step()
        best = min(best, time.thread_time() - started)
    return best


if __name__ == "__main__":
    main()
