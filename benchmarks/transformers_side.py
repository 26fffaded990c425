"""The same workload through `transformers` generate(): `python -m benchmarks.transformers_side MODEL RUNS TOKENS`.

It runs in a process of its own and prints one JSON object of figures: seconds, except tokens_per_second.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from benchmarks.workload import CONCURRENT, QUESTION, photograph
from tests import reference


class Peer:
    """The library's processor and model."""

    def __init__(self, folder: Path) -> None:
        self._processor = reference.processor(folder)
        self._model = reference.model(folder)
        self._model.generation_config.eos_token_id = None

    def run(self, images: list[Image.Image], tokens: int) -> float:
        """Seconds from pictures and texts to the last of `tokens` greedy tokens, all prompts in one batch."""
        started = time.perf_counter()
        content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
        text = self._processor.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        inputs = self._processor(text=[text] * len(images), images=images, return_tensors="pt")
        with torch.inference_mode():
            self._model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
        return time.perf_counter() - started


def main(folder: Path, runs: int, tokens: int) -> dict[str, Any]:
    """All figures, each the median of `runs`."""
    peer = Peer(folder)
    peer.run([photograph(900)], 4)
    first = [peer.run([photograph(n)], 1) for n in range(runs)]
    whole = [peer.run([photograph(100 + n)], tokens) for n in range(runs)]
    per_token = [(long - statistics.median(first)) / (tokens - 1) for long in whole]
    figures = {"ttft_cold": statistics.median(first), "per_token": statistics.median(per_token)}
    for many in CONCURRENT:
        seconds = statistics.median(
            peer.run([photograph(200 + 20 * n + k) for k in range(many)], tokens) for n in range(max(1, runs // 3))
        )
        figures[f"tokens_per_second_{many}"] = many * tokens / seconds
    return figures


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
