"""Whether the library's text model computes in chunks, and packed with others, what it computes of a whole prompt, and
whether our decoder does: tried on a model of the checkpoint's own configuration, shrunk, with rows that are drawn. No
list could say it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from common import log
from common.checkpoint import CheckpointError
from common.library_classes import config_of, layers_of_levels, mark_tables_of, speaking
from common.library_models import (
    CANVAS,
    axes_of,
    level_count,
    marks_of,
    rope_positions,
    row_token,
    takes_sounds,
    tells_apart,
    text_of,
    together_of,
)
from common.library_processors import Sound, item_of, marks_around, placeholder_of, processor_of, rate_of
from common.small_models import made_up, shrink_whole
from llm_service.families.family import OF_PROMPTS, SLIDING, FeedForwardKind, SpanRule
from llm_service.families.registry import TEXT_FAMILIES, check_text
from llm_service.layers.attention.backend import AttentionBatch, CacheShape, PagedChunk, Span, runs_of
from llm_service.layers.attention.torch_backend import TorchBackend
from llm_service.layers.cache_spec import PagedKV, Segment, cache_shapes, layer_caches, read_by
from llm_service.layers.group import ALONE, TensorGroup
from llm_service.layers.mixer import CachedPart, IndexPart
from llm_service.models.config import TextConfig
from llm_service.models.decoder import Decoder, Deepstack
from llm_service.models.layer_shapes import MarkTable
from llm_service.models.library_decoder import LibraryDecoder, media_tokens, text_alone
from llm_service.models.library_names import named_tensors
from llm_service.models.loader import fill_plain

_log = log.get("trial")
_CPU = torch.device("cpu")
_BLOCK = 16
_CLOSE = 1e-3
"""Of the largest logit: rounding of float32 is a thousandth of it, another mask a thousand times as much."""
_PICTURE = 48, 64
_ANSWER = 24
"""Tokens: a shrunk window is passed by them."""
_TYPES, _GRIDS = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"), "image_grid_thw"
_MASK = "attention_mask"
_SOUND = 3
"""The type of a sound's tokens, where a picture's have 1."""
_RULES = *((rule, False) for rule in SpanRule), (SpanRule.ALL_MEDIA, True)
"""Those that are tried, in order, and whether rows are added to what the table of tokens has."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a trial has found out: which tokens see those behind them, and whether rows are added to what the table of
    tokens has for their places."""

    spans: SpanRule
    adds_rows: bool = False


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


@torch.inference_mode()
def try_out(folder: Path, group: TensorGroup = ALONE) -> Finding:
    """Tries a checkpoint's configuration, which takes seconds; all ranks of a group together. Raises CheckpointError
    where what comes out in chunks, and of shares, is not what comes out of the whole, or that cannot be tried."""
    config = config_of(folder)
    return try_config(config, partial(_prompt, folder), group)


@torch.inference_mode()
def try_config(config: Any, prompted: Prompted, group: TensorGroup = ALONE) -> Finding:
    """The same of a configuration, which is shrunk first, and a prompt for a model of the shrunk one."""
    name = config.model_type
    with _tried(name):
        case = _Case.of(config, prompted, group.size)
        of_sounds = case.of_sounds() if case.prompt.sounds else None  # before the model becomes a decoder of ours
        given: dict[str, Any] = {"axes": case.axes, "together": case.prompt.together, "group": group}
        decoder = LibraryDecoder(speaking(case.model), torch.float32, _CPU, **given)
        differences, found = list[float](), None
        for rule, decoder.adds_rows in _RULES:
            differences.append(_difference(decoder, case, rule))
            if differences[-1] < _CLOSE:
                found = rule
                break
        later = 0.0 if found is None else _difference_of_answer(decoder, case.said, found)
        heard = 0.0 if of_sounds is None else _difference(decoder, of_sounds)
    if found is None:
        split = f"over {group.size} ranks " if group.size > 1 else ""
        what = f"{split}{name} gives other logits in chunks than of a whole prompt"
        raise CheckpointError(f"{what}: they differ by {min(differences):.1%}")
    if not later < _CLOSE:  # nor where there is no number
        raise CheckpointError(f"{name} sees other tokens while it answers than in a prompt: {later:.1%} apart")
    if not heard < _CLOSE:
        raise CheckpointError(f"{name} gives other logits of a sound in chunks than at once: {heard:.1%} apart")
    return Finding(found, decoder.adds_rows)


@torch.inference_mode()
def try_ours(folder: Path) -> Finding:
    """Tries our decoder in the place of the library's text model, on one rank. Raises CheckpointError where it lacks
    what the text asks for, or its logits are not the library's."""
    config = config_of(folder)
    return try_ours_of(config, partial(_prompt, folder))


@torch.inference_mode()
def try_ours_of(config: Any, prompted: Prompted) -> Finding:
    """The same of a configuration, which is shrunk first, and a prompt for a model of the shrunk one. A window that its
    family has none for is taken out: no context is as long as one that ours is tried for."""
    text = config.get_text_config(decoder=True)
    check_text(text.model_type)
    if getattr(text, "sliding_window", None) is not None and SLIDING not in TEXT_FAMILIES[text.model_type].mixers:
        text.sliding_window = None
    differences = []
    with _tried(config.model_type):
        case = _Case.of(config, prompted)
        shape = TextConfig.of(text_of(case.model), len(case.prompt.ids) + _ANSWER)
        levels = tuple(layers_of_levels(case.model.config))
        for rule, adds_rows in _RULES:
            by_rule: dict[str, Any] = {"spans": rule, "together": case.prompt.together, "adds_rows": adds_rows}
            shaped = with_media(replace(shape, level_layers=levels, **by_rule), case.model)
            made = Decoder(shaped, ALONE, torch.float32, _CPU)
            decoder = fill_plain(made, named_tensors(case.model))
            later = _difference_of_answer(decoder, case.said, rule)
            differences.append(max(_difference(decoder, case, rule), later))
            if case.prompt.sounds:
                differences[-1] = max(differences[-1], _difference(decoder, case.of_sounds()))
            if differences[-1] < _CLOSE:
                return Finding(rule, adds_rows)
    least = min(differences)
    raise CheckpointError(f"the logits of our decoder are not the library's: they differ by {least:.1%}")


def with_media(shape: TextConfig, model: Any) -> TextConfig:
    """A decoder's shape with what is for media in a whole model of the library: tokens of these and of marks around
    them, where experts are chosen by these, and tables of marks."""
    tables = tuple(
        MarkTable(name.rpartition(".")[2], part.vocab_offset, part.vocab_size, part.multimodal_hidden_size, part.eps)
        for name, part in mark_tables_of(model).items()
    )
    by_modality = shape.family.sparse is FeedForwardKind.BY_MODALITY
    tokens = tuple(media_tokens(model.config)) if by_modality else ()
    return replace(shape, media_tokens=tokens, mark_tables=tables)


@dataclass(frozen=True, slots=True)
class _Case:
    """A small model with drawn weights, a prompt with int64 `positions` [3, n] on so many axes that count, and what the
    library says: the logits that it `expects` of the whole prompt, [n, vocabulary], and an answer."""

    model: Any
    prompt: TrialPrompt
    positions: Tensor
    axes: int
    expected: Tensor
    said: _Said

    @classmethod
    def of(cls, config: Any, prompted: Prompted, ranks: int = 1) -> _Case:
        """Of a configuration, which is shrunk so that heads can be split over so many ranks."""
        shrink_whole(config, ranks)
        model = made_up(config, text_alone)
        prompt = prompted(model)
        axes = axes_of(model)
        positions = _positions(model.base_model, prompt) if axes > 1 else torch.arange(len(prompt.ids)).expand(3, -1)
        expected, said = _whole(model, prompt), _generated(model, prompt)
        return cls(model, prompt, positions, axes, expected, said)

    def of_sounds(self) -> _Case:
        """The same with rows that are told to be a sound's."""
        types = {name: value * _SOUND for name, value in self.prompt.more.items() if name in _TYPES}
        prompt = replace(self.prompt, more={**self.prompt.more, **types})
        return replace(self, prompt=prompt, expected=_whole(self.model, prompt))


@contextmanager
def _tried(name: str) -> Iterator[None]:
    """What a model that does not run fails with becomes a CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        _log.warning("a model cannot be tried", kind=name, why=f"{type(error).__name__}: {error}")
        raise CheckpointError(f"{name} cannot be tried: a small model of its configuration does not run") from error


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
    return _prompt_of(config, ids, {**dict.fromkeys(_TYPES, types), _GRIDS: grids, CANVAS: sizes, _MASK: mask})


def _merge_of_canvas(config: Any) -> int:
    """Patches on a side of one row, in models that lay slices of a picture out on the whole."""
    return 2 if getattr(config, "downsample_mode", None) == "4x" else 4


def _prompt(folder: Path, model: Any) -> TrialPrompt:
    """Text, a picture, text, as the library's processor makes it; a sound where it knows no pictures."""
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
    taken = {name: made[name] for name in (*_TYPES, _GRIDS, CANVAS, _MASK) if name in made}
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


def _positions(base: Any, prompt: TrialPrompt) -> Tensor:
    """int64 [3, n], by the model's own rule."""
    return rope_positions(base, {"input_ids": prompt.ids.unsqueeze(0), **prompt.more})


def _whole(model: Any, prompt: TrialPrompt) -> Tensor:
    """Logits [n, vocabulary] as the library computes them, of all at once."""
    more = _taken(model, prompt)
    # One for sounds alone, or that is its own base, or puts rows in by itself, does no more than this.
    if not hasattr(model.base_model, "get_image_features") or model.base_model is model:
        embedded = model.get_input_embeddings()(prompt.ids)
        embedded[prompt.places] = prompt.rows[0].to(embedded)
        alone: Tensor = speaking(model)(inputs_embeds=embedded.unsqueeze(0), use_cache=False, **more).logits[0].float()
        return alone
    first, *deep = prompt.rows[:, prompt.pictures]
    why: list[BaseException] = []
    apart = [[level] for level in deep]
    forms: list[tuple[Any, Any]] = [([first], apart), ([first], deep), (first.unsqueeze(0), deep), (first, deep)]
    if layers := layers_of_levels(model.config):
        forms = [(None, list(zip(layers, (first, *deep), strict=True)))]
    for rows, levels in forms:
        given = {"image": _Features(rows, levels, prompt.marks)}
        try:
            made = model(input_ids=prompt.ids.unsqueeze(0), mm_encoder_outputs=given, use_cache=False, **more)
        except (AttributeError, IndexError, TypeError, RuntimeError, ValueError) as error:
            why.append(error)
            continue
        logits: Tensor = made.logits[0].float()
        return logits
    raise ValueError(f"it takes no rows from elsewhere: {'; '.join(dict.fromkeys(map(str, why)))}")


def _taken(model: Any, prompt: TrialPrompt) -> dict[str, Tensor]:
    """What a model takes of a prompt beside its ids."""
    taken = inspect.signature(model.forward).parameters.keys()
    return {kind: value for kind, value in prompt.more.items() if kind in taken}


@dataclass(frozen=True, slots=True)
class _Said:
    """A text that was gone on with from `begin`, and the logits [n - begin, vocabulary] that each new token was the
    likeliest of."""

    prompt: TrialPrompt
    begin: int
    logits: Tensor


def _generated(model: Any, prompt: TrialPrompt) -> _Said:
    """Greedy tokens as the library says them, one by one, over its own cache; of text alone, with the types that it has
    in a prompt. No token of a medium is among them, as no trained model says one: they are not looked up as text is."""
    text = prompt.ids[: prompt.runs[0][0]] if prompt.runs else prompt.ids
    types = {_TYPES[0]: prompt.more[_TYPES[0]][:, : len(text)]} if _TYPES[0] in _taken(model, prompt) else {}
    settings: dict[str, Any] = {"max_new_tokens": _ANSWER, "min_new_tokens": _ANSWER, "do_sample": False}
    settings["suppress_tokens"] = media_tokens(model.config) or None
    made = speaking(model).generate(
        text.unsqueeze(0), **types, **settings, output_logits=True, return_dict_in_generate=True
    )
    logits = torch.cat(made.logits).float()
    none = torch.empty(0, dtype=torch.int64)
    said = TrialPrompt(made.sequences[0], none, prompt.rows[:, :0], prompt.marks, none.bool(), {})
    return _Said(said, len(text), logits)


def _difference_of_answer(decoder: Decoder | LibraryDecoder, said: _Said, rule: SpanRule = SpanRule.NOWHERE) -> float:
    """As `_difference`, of what was said, computed at once behind the text before it."""
    count = len(said.prompt.ids)
    if isinstance(decoder, LibraryDecoder):
        decoder.spans = rule
    spans = [(0, said.begin)] if rule is SpanRule.WHOLE_PROMPTS else []
    cuts = [(0, said.begin), (said.begin, count)]
    ours = _logits(decoder, said.prompt, torch.arange(count).expand(3, -1), cuts, spans, answer=said.begin)
    return _relative(ours[said.begin - 1 : -1], said.logits)


class _Features:
    """As much of an encoder's output as the library's models look at."""

    def __init__(self, rows: Any, deep: Any, marks: Tensor) -> None:
        self.pooler_output = self.last_hidden_state = rows
        self.visual_indicator_features = marks
        self.deepstack_features = deep or None

    def __getattr__(self, _: str) -> None:
        return None


def _difference(decoder: Decoder | LibraryDecoder, case: _Case, rule: SpanRule = SpanRule.NOWHERE) -> float:
    """The largest difference of logits, as a part of the largest logit: of the prompt in three chunks, each beside a
    chunk of another one that begins with other words, and of the prompt at once. Of one that is computed whole: at
    once, and again what stands behind its first words, over what was computed of these."""
    prompt, positions = case.prompt, case.positions
    if isinstance(decoder, LibraryDecoder):
        decoder.spans = rule
    length, first = len(prompt.ids), prompt.runs[0][0] if prompt.runs else 4
    last = prompt.runs[-1][1] if prompt.runs else 8
    if rule in OF_PROMPTS:
        media = runs_of(np.isin(prompt.ids, prompt.together)) if rule is SpanRule.ALL_MEDIA else []
        first = min(first, *(begin for begin, _ in media), first)
        wholes = [(0, length), (first, length)]
        again = _logits(decoder, prompt, positions, wholes, media or wholes)
        return _relative(again, torch.cat([case.expected, case.expected[first:]]))
    runs = [] if rule is SpanRule.NOWHERE else prompt.runs
    whole = _logits(decoder, prompt, positions, [(0, length)], runs)
    cut = _logits(decoder, prompt, positions, [(0, first), (first, last + 1), (last + 1, length)], runs)
    return max(_relative(each, case.expected) for each in (whole, cut))


def _relative(found: Tensor, expected: Tensor) -> float:
    """The largest difference, as a part of the largest number. Tokens that the model does not let say are left out."""
    said = expected != torch.finfo(torch.float32).min
    if not torch.equal(said, found != torch.finfo(torch.float32).min):
        return math.inf
    return float((found - expected)[said].abs().max() / expected[said].abs().max())


def _logits(
    decoder: Decoder | LibraryDecoder,
    prompt: TrialPrompt,
    positions: Tensor,
    cuts: list[tuple[int, int]],
    runs: list[tuple[int, int]],
    *,
    answer: int | None = None,
) -> Tensor:
    """[n, vocabulary] of a prompt in these parts, each beside one of another; from `answer` on, which a part begins
    with, tokens are an answer's."""
    blocks = -(-len(prompt.ids) // _BLOCK)
    mixers: Sequence[CachedPart] = decoder.mixers()
    own = [mixer.cache_spec() for mixer in mixers]
    specs, shapes = read_by(own), cache_shapes(own, 2 * blocks, _BLOCK)
    paged = {spec: shape.new_cache(torch.float32, decoder.device) for spec, shape in shapes.items()}
    layers = layer_caches(own, shapes, paged, 2, _CPU)
    embedded = decoder.embed_tokens(prompt.ids)
    rows = prompt.rows[0].to(embedded)
    embedded[prompt.places] = embedded[prompt.places] + rows if decoder.adds_rows else rows
    other = embedded.flip(0)
    found: list[Tensor] = []
    for begin, end in cuts:
        tables = [list(range(blocks, 2 * blocks)), list(range(blocks))[::-1]]
        decodes = answer is not None and begin >= answer
        count = end - begin
        answered = max(0, end - answer) if answer is not None else 0
        chunks = [PagedChunk(begin, count, table, decodes, count * decodes, answered) for table in tables]
        here = [(count + first - begin, count + last - begin) for first, last in runs if begin <= first < last <= end]
        segments = Segment.of(chunks, (1, 0))
        batches = list[Any]()
        for mixer, spec in zip(mixers, specs, strict=True):
            if not isinstance(spec, PagedKV):
                batches.append(mixer.state_backend().batch(segments))
                continue
            batches.append(_batch(decoder, shape := shapes[spec], chunks, here))
            if isinstance(mixer, IndexPart):
                index = mixer.index_backend(TorchBackend(shape, _CPU), shape.blocks, _BLOCK)
                batches[-1] = batches[-1], index.batch(chunks)
        placed = positions[:, begin:end].repeat(1, 2)
        if decoder.position_rows > len(placed):
            placed = torch.cat([torch.arange(begin, end).repeat(2).unsqueeze(0), placed])
        packed = torch.cat([other[begin:end], embedded[begin:end]])
        deepstack = _deepstack(prompt, begin, end)
        if deepstack is not None and isinstance(decoder, Decoder) and decoder.config.level_layers:
            deepstack = deepstack.taking_first(packed)
        given = packed, placed, layers, batches, deepstack
        ids = torch.cat([prompt.ids.flip(0)[begin:end], prompt.ids[begin:end]])
        if isinstance(decoder, LibraryDecoder):
            out = decoder(*given, token_ids=ids)
        else:
            there = [count + place - begin for place in prompt.places.tolist() if begin <= place < end]
            out = decoder(*given, token_ids=decoder.ids_of_layers(ids, [(row, row + 1) for row in there]))
        found.append(decoder.logits(out[count:]))
    return torch.cat(found)


def _batch(
    decoder: Decoder | LibraryDecoder, shape: CacheShape, chunks: list[PagedChunk], spans: list[Span]
) -> AttentionBatch:
    if isinstance(decoder, LibraryDecoder):
        return decoder.backend(shape).batch(chunks, spans)
    return TorchBackend(shape, _CPU).batch(chunks, spans if shape.kind.spans else ())


def _deepstack(prompt: TrialPrompt, begin: int, end: int) -> Deepstack | None:
    """The levels beyond the first of what the second of two chunks has of a prompt, from `begin` to `end`."""
    here = (prompt.places >= begin) & (prompt.places < end)
    if len(prompt.rows) == 1 or not here.any():
        return None
    return Deepstack(prompt.places[here] - begin + end - begin, prompt.rows[1:, here])
