"""Whether the library's text model computes in chunks, and packed with others, what it computes of a whole prompt:
tried on a model of the checkpoint's own configuration, shrunk, with rows that are drawn. No list could say it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from common.checkpoint import CheckpointError
from common.library_models import base_of, config_of, level_count, made_up, processor_of, rope_positions, shrink
from llm_service.layers.attention.backend import PagedChunk
from llm_service.layers.cache_spec import cache_shapes
from llm_service.models.decoder import Deepstack
from llm_service.models.generic import LibraryDecoder, text_alone

_BLOCK = 16
_CLOSE = 1e-3
"""Of the largest logit: rounding of float32 is a thousandth of it, another mask a thousand times as much."""
_PICTURE = 48, 64
_TYPES, _GRIDS = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"), "image_grid_thw"


@dataclass(frozen=True, slots=True)
class Finding:
    """What a trial has found out: whether rows of one run see each other."""

    spans: bool


@dataclass(frozen=True, slots=True)
class TrialPrompt:
    """ids int64 [n], the places of rows among them, and the rows [levels, m, hidden]; `more` is what else the library's
    model takes of a prompt."""

    ids: Tensor
    places: Tensor
    rows: Tensor
    more: dict[str, Tensor]

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


@torch.inference_mode()
def try_out(folder: Path) -> Finding:
    """Tries a checkpoint's configuration, which takes seconds. Raises CheckpointError where what comes out in chunks is
    not what comes out of the whole, or that cannot be tried."""
    config = config_of(folder)
    return try_config(config, lambda: _prompt(folder, config))


@torch.inference_mode()
def try_config(config: Any, prompted: Callable[[], TrialPrompt]) -> Finding:
    """The same of a configuration, which is shrunk first, and a prompt for the shrunk one."""
    name = config.model_type
    try:
        shrink(config.get_text_config(decoder=True))
        model = made_up(config, text_alone)
        prompt = prompted()
        has_axes = hasattr(model.base_model, "get_rope_index")
        positions = _positions(model.base_model, prompt) if has_axes else torch.arange(len(prompt.ids)).expand(3, -1)
        expected = _whole(model, prompt)
        decoder = LibraryDecoder(model, torch.float32, torch.device("cpu"), axes=3 if has_axes else 1)
        differences = {spans: _difference(decoder, prompt, positions, expected, spans=spans) for spans in (False, True)}
    except CheckpointError:
        raise
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{name} cannot be tried in small: {type(error).__name__}: {why}") from error
    for spans, difference in differences.items():
        if difference < _CLOSE:
            return Finding(spans)
    least = min(differences.values())
    raise CheckpointError(f"{name} gives other logits in chunks than of a whole prompt: they differ by {least:.1%}")


def drawn_prompt(config: Any) -> TrialPrompt:
    """Tokens of text, and two runs of rows among them: for a configuration without a processor."""
    token = config.image_token_id
    ids = torch.arange(40) % 7 + 3
    ids[8:20], ids[24:30] = token, token
    types = (ids == token).long().unsqueeze(0)
    merge = getattr(getattr(config, "vision_config", None), "spatial_merge_size", 1)
    grids = torch.tensor([[1, 3 * merge, 4 * merge], [1, 2 * merge, 3 * merge]])
    return _prompt_of(config, ids, {**dict.fromkeys(_TYPES, types), _GRIDS: grids})


def _prompt(folder: Path, config: Any) -> TrialPrompt:
    """Text, a picture, text, as the library's processor makes it."""
    processor = processor_of(folder)
    picture = Image.fromarray(np.zeros((*_PICTURE, 3), np.uint8))
    text = f"A few words before it {processor.image_token} and a few words behind it, to be read."
    more = {"return_mm_token_type_ids": True} if hasattr(base_of(config), "get_rope_index") else {}
    made = processor(images=[picture], text=[text], return_tensors="pt", **more)
    return _prompt_of(config, made["input_ids"][0], {kind: made[kind] for kind in (*_TYPES, _GRIDS) if kind in made})


def _prompt_of(config: Any, ids: Tensor, more: dict[str, Tensor]) -> TrialPrompt:
    """With rows that are drawn."""
    places = (ids == config.image_token_id).nonzero().flatten()
    hidden = config.get_text_config(decoder=True).hidden_size
    rows = torch.randn(level_count(config), len(places), hidden, generator=torch.Generator().manual_seed(1))
    return TrialPrompt(ids, places, rows, more)


def _positions(base: Any, prompt: TrialPrompt) -> Tensor:
    """int64 [3, n], by the model's own rule."""
    return rope_positions(base, {"input_ids": prompt.ids.unsqueeze(0), **prompt.more})


def _whole(model: Any, prompt: TrialPrompt) -> Tensor:
    """Logits [n, vocabulary] as the library computes them, of all at once."""
    taken = inspect.signature(model.forward).parameters.keys()
    more = {kind: value for kind, value in prompt.more.items() if kind in taken}
    first, deep = prompt.rows[0], list(prompt.rows[1:])
    why: object = None
    apart = [[level] for level in deep]
    for rows, levels in (([first], apart), ([first], deep), (first.unsqueeze(0), deep), (first, deep)):
        given = {"image": _Features(rows, levels)}
        try:
            made = model(input_ids=prompt.ids.unsqueeze(0), mm_encoder_outputs=given, use_cache=False, **more)
        except (AttributeError, IndexError, TypeError, RuntimeError, ValueError) as error:
            why = error
            continue
        logits: Tensor = made.logits[0].float()
        return logits
    raise ValueError(f"it takes no rows from elsewhere: {why}")


class _Features:
    """As much of an encoder's output as the library's models look at."""

    def __init__(self, rows: Any, deep: Any) -> None:
        self.pooler_output = rows
        self.deepstack_features = deep or None

    def __getattr__(self, _: str) -> None:
        return None


def _difference(
    decoder: LibraryDecoder, prompt: TrialPrompt, positions: Tensor, expected: Tensor, *, spans: bool
) -> float:
    """The largest difference of logits, as a part of the largest logit: of the prompt in three chunks, each beside a
    chunk of another one that begins with other words, and of the prompt at once."""
    runs = prompt.runs if spans else []
    length, first = len(prompt.ids), prompt.runs[0][0] if prompt.runs else 4
    last = prompt.runs[-1][1] if prompt.runs else 8
    whole = _logits(decoder, prompt, positions, [(0, length)], runs)
    cut = _logits(decoder, prompt, positions, [(0, first), (first, last + 1), (last + 1, length)], runs)
    scale = expected.abs().max()
    return float(max((each - expected).abs().max() / scale for each in (whole, cut)))


def _logits(
    decoder: LibraryDecoder,
    prompt: TrialPrompt,
    positions: Tensor,
    cuts: list[tuple[int, int]],
    runs: list[tuple[int, int]],
) -> Tensor:
    blocks = -(-len(prompt.ids) // _BLOCK)
    specs = [mixer.cache_spec() for mixer in decoder.mixers()]
    shapes = cache_shapes(specs, 2 * blocks, _BLOCK)
    caches = {spec: iter(shape.new_cache(torch.float32, decoder.device)) for spec, shape in shapes.items()}
    layers = [next(caches[spec]) for spec in specs]
    embedded = decoder.embed_tokens(prompt.ids)
    embedded[prompt.places] = prompt.rows[0].to(embedded)
    other = embedded.flip(0)
    found: list[Tensor] = []
    for begin, end in cuts:
        tables = [list(range(blocks, 2 * blocks)), list(range(blocks))[::-1]]
        chunks = [PagedChunk(begin, end - begin, table) for table in tables]
        count = end - begin
        here = [(count + first - begin, count + last - begin) for first, last in runs if begin <= first < last <= end]
        made = {spec: decoder.backend(shape).batch(chunks, here) for spec, shape in shapes.items()}
        placed = positions[:, begin:end].repeat(1, 2)
        packed = torch.cat([other[begin:end], embedded[begin:end]])
        deepstack = _deepstack(prompt, begin, end)
        out = decoder(packed, placed, layers, [made[spec] for spec in specs], deepstack)
        found.append(decoder.logits(out[count:]))
    return torch.cat(found)


def _deepstack(prompt: TrialPrompt, begin: int, end: int) -> Deepstack | None:
    """The levels beyond the first of what the second of two chunks has of a prompt, from `begin` to `end`."""
    here = (prompt.places >= begin) & (prompt.places < end)
    if len(prompt.rows) == 1 or not here.any():
        return None
    return Deepstack(prompt.places[here] - begin + end - begin, prompt.rows[1:, here])
