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
from common.library_models import config_of, made_up, processor_of, shrink
from llm_service.layers.cache_spec import cache_shapes
from llm_service.models.generic import LibraryDecoder, text_alone
from llm_service.plan import Chunk

_BLOCK = 16
_CLOSE = 1e-3
"""Of the largest logit: rounding of float32 is a thousandth of it, another mask a thousand times as much."""
_PICTURE = 48, 64
_TYPES = "token_type_ids", "mm_token_type_ids"


@dataclass(frozen=True, slots=True)
class Finding:
    """What a trial has found out: whether rows of one run see each other."""

    spans: bool


@dataclass(frozen=True, slots=True)
class TrialPrompt:
    """ids int64 [n], the places of rows among them, and the rows [m, hidden]."""

    ids: Tensor
    places: Tensor
    rows: Tensor
    types: dict[str, Tensor]

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
        expected = _whole(model, prompt)
        decoder = LibraryDecoder(model, torch.float32, torch.device("cpu"))
        differences = {spans: _difference(decoder, prompt, expected, spans=spans) for spans in (False, True)}
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
    return TrialPrompt(ids, *_rows(config, ids), dict.fromkeys(_TYPES, types))


def _prompt(folder: Path, config: Any) -> TrialPrompt:
    """Text, a picture, text, as the library's processor makes it."""
    processor = processor_of(folder)
    picture = Image.fromarray(np.zeros((*_PICTURE, 3), np.uint8))
    text = f"A few words before it {processor.image_token} and a few words behind it, to be read."
    made = processor(images=[picture], text=[text], return_tensors="pt")
    ids = made["input_ids"][0]
    return TrialPrompt(ids, *_rows(config, ids), {kind: made[kind] for kind in _TYPES if kind in made})


def _rows(config: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Places of rows, and drawn rows."""
    places = (ids == config.image_token_id).nonzero().flatten()
    hidden = config.get_text_config(decoder=True).hidden_size
    return places, torch.randn(len(places), hidden, generator=torch.Generator().manual_seed(1))


def _whole(model: Any, prompt: TrialPrompt) -> Tensor:
    """Logits [n, vocabulary] as the library computes them, of all at once."""
    taken = inspect.signature(model.forward).parameters.keys()
    types = {kind: value for kind, value in prompt.types.items() if kind in taken}
    output: object = None
    for rows in ([prompt.rows], prompt.rows.unsqueeze(0), prompt.rows):
        given = {"image": _Features(rows)}
        try:
            made = model(input_ids=prompt.ids.unsqueeze(0), mm_encoder_outputs=given, use_cache=False, **types)
        except (AttributeError, IndexError, TypeError, RuntimeError, ValueError) as error:
            output = error
            continue
        logits: Tensor = made.logits[0].float()
        return logits
    raise ValueError(f"it takes no rows from elsewhere: {output}")


class _Features:
    """As much of an encoder's output as the library's models look at."""

    def __init__(self, rows: Any) -> None:
        self.pooler_output = rows

    def __getattr__(self, _: str) -> None:
        return None


def _difference(decoder: LibraryDecoder, prompt: TrialPrompt, expected: Tensor, *, spans: bool) -> float:
    """The largest difference of logits, as a part of the largest logit: of the prompt in three chunks, each beside a
    chunk of another one that begins with other words, and of the prompt at once."""
    runs = prompt.runs if spans else []
    length, first = len(prompt.ids), prompt.runs[0][0] if prompt.runs else 4
    last = prompt.runs[-1][1] if prompt.runs else 8
    whole = _logits(decoder, prompt, [(0, length)], runs)
    cut = _logits(decoder, prompt, [(0, first), (first, last + 1), (last + 1, length)], runs)
    scale = expected.abs().max()
    return float(max((each - expected).abs().max() / scale for each in (whole, cut)))


def _logits(
    decoder: LibraryDecoder, prompt: TrialPrompt, cuts: list[tuple[int, int]], runs: list[tuple[int, int]]
) -> Tensor:
    blocks = -(-len(prompt.ids) // _BLOCK)
    specs = [mixer.cache_spec() for mixer in decoder.mixers()]
    shapes = cache_shapes(specs, 2 * blocks, _BLOCK)
    caches = {spec: iter(shape.new_cache(torch.float32, decoder.device)) for spec, shape in shapes.items()}
    layers = [next(caches[spec]) for spec in specs]
    embedded = decoder.embed_tokens(prompt.ids)
    embedded[prompt.places] = prompt.rows.to(embedded)
    other = embedded.flip(0)
    found: list[Tensor] = []
    for begin, end in cuts:
        tables = [list(range(blocks, 2 * blocks)), list(range(blocks))[::-1]]
        chunks = [Chunk(begin, end - begin, table) for table in tables]
        count = end - begin
        here = [(count + first - begin, count + last - begin) for first, last in runs if begin <= first < last <= end]
        made = {spec: decoder.backend(shape).batch(chunks, here) for spec, shape in shapes.items()}
        positions = torch.arange(begin, end).repeat(2).expand(3, -1)
        packed = torch.cat([other[begin:end], embedded[begin:end]])
        out = decoder(packed, positions, layers, [made[spec] for spec in specs], None)
        found.append(decoder.logits(out[count:]))
    return torch.cat(found)
