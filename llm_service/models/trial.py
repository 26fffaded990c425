"""Tries whether transformers' text model gives the same results in chunks and packed with other sequences as for a
whole prompt, and whether our decoder does: on a model of the checkpoint's own configuration, shrunk, with random rows.
No list could say it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.checkpoints.checkpoint import CheckpointError
from common.hf.classes import config_of, layers_of_levels, mark_tables_of, speaking
from common.hf.models import text_of
from common.telemetry import log
from llm_service.families.family import FeedForwardKind
from llm_service.families.registry import TEXT_FAMILIES, check_text
from llm_service.families.sight import OF_PROMPTS, SpanRule
from llm_service.layers.attention.backend import runs_of
from llm_service.layers.tensor_parallel import ALONE, TensorGroup
from llm_service.model_config.layer_shapes import MarkTable
from llm_service.model_config.text import TextConfig
from llm_service.models.decoder import Decoder
from llm_service.models.filling import fill_plain
from llm_service.models.hf.decoder import HfDecoder
from llm_service.models.hf.inputs import media_tokens
from llm_service.models.hf.names import named_tensors
from llm_service.models.model import Model
from llm_service.models.trial_chunks import logits_in_chunks
from llm_service.models.trial_prompts import Prompted, processed_prompt
from llm_service.models.trial_reference import ANSWER, Reference, Said

_log = log.get("trial")
_CPU = torch.device("cpu")
_CLOSE = 1e-3
"""As a part of the largest logit: float32 rounding is a thousandth of this, a wrong mask a thousand times as much."""
_DRAWS = 4
"""Models that are tried of a text that chooses what it sees: if two choices are nearly equal, either may be made, and
the results differ. For a wrong decoder no draw is close."""
_RULES = *((rule, False) for rule in SpanRule), (SpanRule.ALL_MEDIA, True)
"""The rules tried, in order, and whether rows are added to the token embeddings."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a trial: which tokens see later ones, and whether rows are added to the token embeddings at their
    positions."""

    spans: SpanRule
    adds_rows: bool = False


@torch.inference_mode()
def try_out(folder: Path, group: TensorGroup = ALONE) -> Finding:
    """Tries a checkpoint's configuration, which takes seconds, on all ranks of a group together. Raises CheckpointError
    if results in chunks and partitions differ from those of the whole, or it cannot be tried."""
    config = config_of(folder)
    return try_config(config, partial(processed_prompt, folder), group)


@torch.inference_mode()
def try_config(config: Any, prompted: Prompted, group: TensorGroup = ALONE) -> Finding:
    """The same for a configuration, which is shrunk first, and a prompt for the shrunk model."""
    name = config.model_type
    with _tried(name):
        reference = Reference.of(config, prompted, group.size)
        # Before the model becomes a decoder of ours.
        of_sounds = reference.of_sounds() if reference.prompt.sounds else None
        given: dict[str, Any] = {"axes": reference.axes, "together": reference.prompt.together, "group": group}
        decoder = HfDecoder(speaking(reference.model), torch.float32, _CPU, **given)
        differences, found, heard = list[float](), None, 0.0
        for rule, decoder.adds_rows in _RULES:
            decoder.use_spans(rule)
            differences.append(_difference(decoder, reference, rule))
            if differences[-1] < _CLOSE:
                found = rule
                break
        later = 0.0 if found is None else _difference_of_answer(decoder, reference.said, found)
        if of_sounds is not None:
            decoder.use_spans(SpanRule.NOWHERE)
            heard = _difference(decoder, of_sounds)
    if found is None:
        split = f"over {group.size} ranks " if group.size > 1 else ""
        what = f"{split}{name} gives other logits in chunks than of a whole prompt"
        raise CheckpointError(f"{what}: they differ by {min(differences):.1%}")
    if not later < _CLOSE:  # also if it is not a number
        raise CheckpointError(f"{name} sees other tokens while it answers than in a prompt: {later:.1%} apart")
    if not heard < _CLOSE:
        raise CheckpointError(f"{name} gives other logits of a sound in chunks than at once: {heard:.1%} apart")
    return Finding(found, decoder.adds_rows)


@torch.inference_mode()
def try_ours(folder: Path) -> Finding:
    """Tries our decoder in place of transformers' text model, on one rank. Raises CheckpointError if it lacks something
    that the text needs, or its logits differ."""
    config = config_of(folder)
    return try_ours_of(config, partial(processed_prompt, folder))


@torch.inference_mode()
def try_ours_of(config: Any, prompted: Prompted) -> Finding:
    """The same for a configuration, which is shrunk first, and a prompt for the shrunk model. A window that the family
    does not have is removed: our decoder is only tried for contexts shorter than it."""
    text = config.get_text_config(decoder=True)
    check_text(text.model_type)
    if getattr(text, "sliding_window", None) is not None and not TEXT_FAMILIES[text.model_type].windowed:
        text.sliding_window = None
    differences, whole = list[float](), deepcopy(config)
    with _tried(config.model_type):
        for draw in range(_DRAWS if _chooses(text) else 1):
            if finding := _try_draw(deepcopy(whole) if draw else config, prompted, draw, differences):
                return finding
    least = min(differences)
    raise CheckpointError(f"the logits of our decoder are not transformers': they differ by {least:.1%}")


def _chooses(text: Any) -> bool:
    """Whether tokens attend to what an index chooses."""
    return any(value and name.startswith("index_") and "topk" in name for name, value in vars(text).items())


def _try_draw(config: Any, prompted: Prompted, seed: int, differences: list[float]) -> Finding | None:
    """The finding for one model with random weights. The difference of our logits is appended to `differences` for each
    rule that fails; of a whole prompt that differs, chunks are not computed."""
    reference = Reference.of(config, prompted, seed=seed)
    shape = TextConfig.of(text_of(reference.model), len(reference.prompt.ids) + ANSWER)
    levels = tuple(layers_of_levels(reference.model.config))
    for rule, adds_rows in _RULES:
        by_rule: dict[str, Any] = {"spans": rule, "together": reference.prompt.together, "adds_rows": adds_rows}
        shaped = with_media(replace(shape, level_layers=levels, **by_rule), reference.model)
        made = Decoder(shaped, ALONE, torch.float32, _CPU)
        decoder = fill_plain(made, named_tensors(reference.model))
        apart = _difference_of_answer(decoder, reference.said, rule)
        if apart < _CLOSE:
            apart = _difference(decoder, reference, rule)
        if apart < _CLOSE and reference.prompt.sounds:
            apart = _difference(decoder, reference.of_sounds())
        if apart < _CLOSE:
            return Finding(rule, adds_rows)
        differences.append(apart)
    return None


def with_media(shape: TextConfig, model: Any) -> TextConfig:
    """A decoder's shape with the media settings of a whole transformers model: media tokens and marks around them, if
    experts are chosen by these, and tables of marks."""
    tables = tuple(
        MarkTable(name.rpartition(".")[2], part.vocab_offset, part.vocab_size, part.multimodal_hidden_size, part.eps)
        for name, part in mark_tables_of(model).items()
    )
    by_modality = shape.family.moe.kind is FeedForwardKind.BY_MODALITY
    tokens = tuple(media_tokens(model.config)) if by_modality else ()
    return replace(shape, media_tokens=tokens, mark_tables=tables)


@contextmanager
def _tried(name: str) -> Iterator[None]:
    """Turns the error of a model that does not run into a CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        _log.warning("a model cannot be tried", kind=name, cause=f"{type(error).__name__}: {error}")
        raise CheckpointError(f"{name} cannot be tried: a small model of its configuration does not run") from error


def _difference_of_answer(decoder: Model, said: Said, rule: SpanRule = SpanRule.NOWHERE) -> float:
    """As `_difference`, for an answer that is computed in one chunk behind the text before it."""
    count = len(said.prompt.ids)
    spans = [(0, said.begin)] if rule is SpanRule.WHOLE_PROMPTS else []
    cuts = [(0, said.begin), (said.begin, count)]
    ours = logits_in_chunks(decoder, said.prompt, torch.arange(count).expand(3, -1), cuts, spans, answer=said.begin)
    return _relative(ours[said.begin - 1 : -1], said.logits)


def _difference(decoder: Model, reference: Reference, rule: SpanRule = SpanRule.NOWHERE) -> float:
    """The largest difference of logits, relative to the largest logit: of the prompt in one chunk, or, if that is
    close, in three chunks, each beside a chunk of another prompt with a different beginning. For a prompt that must be
    computed whole: in one chunk, and again what follows its first words, over the cache of these."""
    prompt, positions = reference.prompt, reference.positions
    length, first = len(prompt.ids), prompt.runs[0][0] if prompt.runs else 4
    last = prompt.runs[-1][1] if prompt.runs else 8
    if rule in OF_PROMPTS:
        media = runs_of(np.isin(prompt.ids, prompt.together)) if rule is SpanRule.ALL_MEDIA else []
        first = min([first, *(begin for begin, _ in media)])
        wholes = [(0, length), (first, length)]
        again = logits_in_chunks(decoder, prompt, positions, wholes, media or wholes)
        return _relative(again, torch.cat([reference.expected, reference.expected[first:]]))
    runs = [] if rule is SpanRule.NOWHERE else prompt.runs
    whole = _relative(logits_in_chunks(decoder, prompt, positions, [(0, length)], runs), reference.expected)
    if not whole < _CLOSE:
        return whole
    cut = logits_in_chunks(decoder, prompt, positions, [(0, first), (first, last + 1), (last + 1, length)], runs)
    return _relative(cut, reference.expected)


def _relative(found: Tensor, expected: Tensor) -> float:
    """The largest difference, as a part of the largest number. Tokens that the model does not let say are left out."""
    said = expected != torch.finfo(torch.float32).min
    if not torch.equal(said, found != torch.finfo(torch.float32).min):
        return math.inf
    return float((found - expected)[said].abs().max() / expected[said].abs().max())
