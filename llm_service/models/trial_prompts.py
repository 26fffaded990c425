"""Prompts that a model of transformers is tried with: text, and drawn rows of a picture or a sound among it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from common.hf.positions import CANVAS
from common.hf.processors import Sound, item_of, marks_around, placeholder_of, processor_of, rate_of
from common.hf.rows import level_count, marks_of, row_token, takes_sounds, tells_apart, together_of

TOKEN_TYPES = "token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"
"""Names of the argument that tells models each token's medium."""
GRIDS, MASK = "image_grid_thw", "attention_mask"
"""Names of the arguments for pictures' grids and for the mask of valid tokens."""
_PICTURE = 48, 64


@dataclass(frozen=True, slots=True)
class TrialPrompt:
    """ids int64 [n], the positions of rows, and the rows [levels, m, hidden]; `marks` [k, hidden] are those of marks
    around pictures, and `pictures` tells which rows are a picture's own; `more` are further arguments of transformers'
    model, and `together` tells which tokens belong to a picture, including marks among its rows. `sounds`: rows may
    also be a sound's, which the model is told, and then see only what is before them."""

    ids: Tensor
    places: Tensor
    rows: Tensor
    marks: Tensor
    pictures: Tensor
    more: dict[str, Tensor]
    together: tuple[int, ...] = ()
    sounds: bool = False

    @property
    def runs(self) -> list[tuple[int, int]]:
        """Runs of places, [begin, end) each."""
        found: list[tuple[int, int]] = []
        for place in self.places.tolist():
            if found and found[-1][1] == place:
                found[-1] = found[-1][0], place + 1
            else:
                found.append((place, place + 1))
        return found


Prompted = Callable[[Any], TrialPrompt]
"""Makes a prompt for a model of transformers."""


def processed_prompt(folder: Path, model: Any) -> TrialPrompt:
    """Text, a picture and text, as processed by the checkpoint's processor; a sound if it knows no pictures."""
    processor = processor_of(folder)
    kind = item_of(processor)
    item = placeholder_of(processor, kind).join(marks_around(processor, kind))
    text = f"A few words before it {item} and a few words behind it, to be read."
    more: dict[str, Any] = {"return_mm_token_type_ids": True} if hasattr(model.base_model, "get_rope_index") else {}
    if kind == "audio":
        more |= Sound(np.zeros(rate_of(processor), np.float32)).given()
    else:
        more["images"] = [Image.fromarray(np.zeros((*_PICTURE, 3), np.uint8))]
    made = processor(text=[text], return_tensors="pt", **more)
    taken = {name: made[name] for name in (*TOKEN_TYPES, GRIDS, CANVAS, MASK) if name in made}
    sounds = kind != "audio" and tells_apart(model) and takes_sounds(model, processor)
    prompt = prompt_of(model.config, made["input_ids"][0], taken)
    return replace(prompt, sounds=sounds, together=together_of(processor))


def prompt_of(config: Any, ids: Tensor, more: dict[str, Tensor]) -> TrialPrompt:
    """Ids int64 [n] for a model of this configuration, with rows that are drawn; `more` as `TrialPrompt` has it."""
    hidden, marks = config.get_text_config(decoder=True).hidden_size, marks_of(config)
    token = row_token(config)
    places = torch.isin(ids, torch.tensor([token, *marks])).nonzero().flatten()
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(level_count(config), len(places), hidden, generator=generator)
    own = torch.randn(len(marks), hidden, generator=generator)
    for mark, row in zip(marks, own, strict=True):
        rows[0, ids[places] == mark] = row
    return TrialPrompt(ids, places, rows, own, ids[places] == token, more, (token,))
