"""The plan through `transformers` generate(): `python -m benchmarks.transformers_side MODEL`.

It runs in a separate process. Standard input has the plan and the tokens of a long answer, standard output the
measurements, both as JSON. A picture is a file, as for the other engines. transformers caches nothing between calls,
so there are no hits to count.
"""

from __future__ import annotations

import asyncio
import io
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from PIL import Image

from benchmarks.hits import Hits
from benchmarks.sides import Job, Measured, Timed, measure
from benchmarks.workload import Question
from common.checkpoints.checkpoint import Checkpoint
from common.hardware import default_device, default_dtype
from testkit import reference


class _Clock:
    """What `generate` gives tokens to as they come; it notes when. The prompt is the first that it is given."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


class Peer:
    """transformers' processor and model."""

    name = "transformers"

    def __init__(self, folder: Path, dtype: str = "") -> None:
        """`dtype` is what it computes in, by default what the services would."""
        self._processor = reference.processor(folder)
        self._processor.tokenizer.padding_side = "left"
        self._device = default_device()
        dtype = dtype or default_dtype(self._device, Checkpoint(folder))
        self._model = reference.model(folder, getattr(torch, dtype)).to(self._device)
        self._model.generation_config.eos_token_id = None

    def run(self, questions: Sequence[Question], tokens: int) -> Timed:
        """From files and texts to the last of `tokens` greedy tokens, all prompts in one batch."""
        files = [question.file() for question in questions]
        clock, started = _Clock(), time.perf_counter()
        images = [Image.open(io.BytesIO(file)).convert("RGB") for file in files]
        texts = [self._prompt(question.text) for question in questions]
        inputs = self._processor(text=texts, images=images, padding=True, return_tensors="pt").to(self._device)
        with torch.inference_mode():
            out = self._model.generate(**inputs, max_new_tokens=tokens, do_sample=False, streamer=clock)
        whole = time.perf_counter() - started
        if (count := out.shape[1] - inputs["input_ids"].shape[1]) != tokens:
            raise RuntimeError(f"transformers gave {count} tokens instead of {tokens}")
        return Timed(clock.times[1] - started, whole, tokens)

    def _prompt(self, text: str) -> str:
        content = [{"type": "image"}, {"type": "text", "text": text}]
        prompt: str = self._processor.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        return prompt

    async def ask(self, question: Question, tokens: int) -> Timed:
        """One answer."""
        return self.run([question], tokens)

    async def together(self, questions: Sequence[Question], tokens: int) -> float:
        """Seconds for all."""
        return self.run(questions, tokens).whole

    async def hits(self) -> Hits:
        """None."""
        return {}


def main() -> None:
    """Measures what standard input says."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    measured: Measured = asyncio.run(measure(Peer(Path(sys.argv[1])), job.plan, job.tokens))
    sys.stdout.buffer.write(msgspec.json.encode(measured))


if __name__ == "__main__":
    main()
