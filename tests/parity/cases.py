"""What several files ask and compare: prompts, ways to sample, logits, and a cache of transformers that rounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from common.hf.classes import blank_of, state_tokens
from llm_service.layers.attention.backend import PagedChunk
from llm_service.models.decoder import Decoder
from llm_service.models.trial_chunks import logits_in_chunks
from llm_service.worker.caches import Caches
from testkit import reference
from testkit.local_engine import Part, Prompt
from tools.models.drawn_prompts import drawn_prompt
from tools.models.tiny import config_of_recipe

from transformers import DynamicCache  # isort: skip


def coarse_picture(seed: int, width: int, height: int) -> Image.Image:
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def _video(seed: int, frames: int) -> reference.Video:
    return reference.Video(np.stack([np.asarray(coarse_picture(seed + n, 96, 64)) for n in range(frames)]), fps=4.0)


PROMPTS: dict[str, list[Part]] = {
    "text": ["Tell me about two red circles."],
    "one image": [coarse_picture(1, 120, 90), "What is in the picture?"],
    "three images": [
        coarse_picture(2, 64, 64),
        coarse_picture(3, 200, 100),
        coarse_picture(4, 90, 150),
        "Which one is red?",
    ],
    "image, text, image": [coarse_picture(5, 100, 100), "is left of", coarse_picture(6, 70, 140), "and why?"],
    "video": ["Look: ", _video(7, 12), "What happens?"],
}
PARTS: list[list[Part]] = [
    ["Tell me about two red circles."],
    [coarse_picture(1, 120, 90), "What is in the picture?"],
    [coarse_picture(5, 100, 100), "is left of", coarse_picture(6, 70, 140), "and why?"],
]
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"seed": 17, "temperature": 1.2, "top_p": 0.9},
    "penalised": {"seed": 3, "temperature": 1.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
}


def drawn_logits(decoder: Decoder, kind: str = "internvl") -> Tensor:
    """Of a prompt with rows in it, in two chunks."""
    config = config_of_recipe(kind)
    state_tokens(config)
    prompt = drawn_prompt(blank_of(config))
    positions, end = torch.arange(len(prompt.ids)).expand(3, -1), len(prompt.ids)
    with torch.inference_mode():
        return logits_in_chunks(decoder, prompt, positions, [(0, 20), (20, end)], prompt.runs)


def prompt_logits(decoder: Decoder, prompt: Prompt, attention: str = "auto") -> torch.Tensor:
    count = len(prompt.layout.ids)
    caches = Caches(decoder.mixers(), 8, 16, decoder.kv_dtype, decoder.device, state_slots=1, attention=attention)
    batches = caches.batches([PagedChunk(0, count, list(range(-(-count // 16))))], [0])
    positions = torch.from_numpy(np.frombuffer(prompt.layout.positions, np.int32).reshape(3, -1).copy())
    with torch.inference_mode():
        hidden = decoder.embed_tokens(torch.tensor(prompt.layout.ids))
        return decoder.logits(decoder(hidden, positions, caches.layers, batches, None))


def rounded(x: Tensor) -> Tensor:
    """[…, head_dim], each vector in steps of a 127th of its largest number."""
    step = x.abs().max(-1, keepdim=True).values / 127
    return torch.where(step > 0, torch.floor(x / step + 0.5) * step, x)


class RoundingCache(DynamicCache):
    def update(self, key: Tensor, value: Tensor, *given: Any, **more: Any) -> tuple[Tensor, Tensor]:
        return super().update(rounded(key), rounded(value), *given, **more)
