"""Prompts that a model of the library is tried with: text, and drawn rows of a picture or a sound among it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from common.library_positions import CANVAS, axes_of
from common.library_processors import Sound, item_of, marks_around, placeholder_of, processor_of, rate_of
from common.library_rows import level_count, marks_of, row_token, takes_sounds, tells_apart, together_of

TOKEN_TYPES = "token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"
"""What models call the argument by which they are told of which medium a token is."""
_GRIDS, _MASK = "image_grid_thw", "attention_mask"
_PICTURE = 48, 64


@dataclass(frozen=True, slots=True)
class TrialPrompt:
    """ids int64 [n], the places of rows among them, and the rows [levels, m, hidden]; `marks` [k, hidden] are those of
    marks around pictures, and `pictures` says which rows are not; `more` is what else the library's model takes of a
    prompt, and `together` which tokens are a picture's, marks around rows among them. `sounds`: rows may be a sound's
    as well, of which the model is told, and see what is before them alone."""

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
"""Makes a prompt for a model of the library."""


def drawn_prompt(model: Any) -> TrialPrompt:
    """Tokens of text, and two runs of rows among them: for a model without a processor. Types tell rows from text, but
    where all tokens of a prompt see each other an answer from a prompt."""
    config = model.config
    token = row_token(config)
    first, second = (3 * 5 + 2, 2 * 4 + 2) if axes_of(model) > 3 else (3 * 4, 2 * 3)  # with marks of its own
    ids = torch.arange(22 + first + second) % 7 + 3
    ids[8 : 8 + first], ids[12 + first : 12 + first + second] = token, token
    types = (ids == token).long().unsqueeze(0)
    if getattr(config.get_text_config(decoder=True), "use_bidirectional_attention", None) is True:
        types.zero_()
    merge = getattr(getattr(config, "vision_config", None), "spatial_merge_size", 1)
    grids = torch.tensor([[1, 3 * merge, 4 * merge], [1, 2 * merge, 3 * merge]])
    mask = torch.ones_like(types)
    sizes = torch.tensor([[3, 4], [2, 3]]) * _merge_of_canvas(config)
    return _prompt_of(config, ids, {**dict.fromkeys(TOKEN_TYPES, types), _GRIDS: grids, CANVAS: sizes, _MASK: mask})


def _merge_of_canvas(config: Any) -> int:
    """Patches on a side of one row, in models that lay slices of a picture out on the whole."""
    return 2 if getattr(config, "downsample_mode", None) == "4x" else 4


def processed_prompt(folder: Path, model: Any) -> TrialPrompt:
    """Text, a picture, text, as the processor in a checkpoint's folder makes it; a sound where it knows no pictures."""
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
    taken = {name: made[name] for name in (*TOKEN_TYPES, _GRIDS, CANVAS, _MASK) if name in made}
    sounds = kind != "audio" and tells_apart(model) and takes_sounds(model, processor)
    prompt = _prompt_of(model.config, made["input_ids"][0], taken)
    return replace(prompt, sounds=sounds, together=together_of(processor))


def _prompt_of(config: Any, ids: Tensor, more: dict[str, Tensor]) -> TrialPrompt:
    """With rows that are drawn."""
    hidden, marks = config.get_text_config(decoder=True).hidden_size, marks_of(config)
    token = row_token(config)
    places = torch.isin(ids, torch.tensor([token, *marks])).nonzero().flatten()
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(level_count(config), len(places), hidden, generator=generator)
    own = torch.randn(len(marks), hidden, generator=generator)
    for mark, row in zip(marks, own, strict=True):
        rows[0, ids[places] == mark] = row
    return TrialPrompt(ids, places, rows, own, ids[places] == token, more, (token,))
