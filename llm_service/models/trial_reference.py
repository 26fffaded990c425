"""transformers' own results in a trial: the logits of a whole prompt, and an answer over its own cache."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from common.hf.classes import layers_of_levels, speaking
from common.hf.positions import axes_of, rope_positions
from common.hf.small_models import made_up, shrink_whole
from llm_service.models.hf.inputs import media_tokens
from llm_service.models.hf.text import text_alone
from llm_service.models.trial_prompts import TOKEN_TYPES, Prompted, TrialPrompt

ANSWER = 24
"""Tokens: a shrunk window is passed by them."""
_SOUND = 3
"""The type of a sound's tokens; a picture's is 1."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A small model with random weights, a prompt with int64 `positions` [3, n], of which so many axes count, and
    transformers' results: the logits that it `expects` for the whole prompt, [n, vocabulary], and an answer."""

    model: Any
    prompt: TrialPrompt
    positions: Tensor
    axes: int
    expected: Tensor
    said: Said

    @classmethod
    def of(cls, config: Any, prompted: Prompted, ranks: int = 1, seed: int = 0) -> Reference:
        """A reference of a configuration, shrunk so that heads can be split over so many ranks."""
        shrink_whole(config, ranks)
        model = made_up(config, text_alone, seed)
        prompt = prompted(model)
        axes = axes_of(model)
        positions = _positions(model.base_model, prompt) if axes > 1 else torch.arange(len(prompt.ids)).expand(3, -1)
        expected, said = _whole(model, prompt), _generated(model, prompt)
        return cls(model, prompt, positions, axes, expected, said)

    def of_sounds(self) -> Reference:
        """The same with rows that are told to be a sound's."""
        types = {name: value * _SOUND for name, value in self.prompt.more.items() if name in TOKEN_TYPES}
        prompt = replace(self.prompt, more={**self.prompt.more, **types})
        return replace(self, prompt=prompt, expected=_whole(self.model, prompt))


def _positions(base: Any, prompt: TrialPrompt) -> Tensor:
    """int64 [3, n], by the model's own rule."""
    return rope_positions(base, {"input_ids": prompt.ids.unsqueeze(0), **prompt.more})


def _whole(model: Any, prompt: TrialPrompt) -> Tensor:
    """Logits [n, vocabulary] as transformers computes them in one pass."""
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
    """The arguments of a model for a prompt, besides its ids."""
    taken = inspect.signature(model.forward).parameters.keys()
    return {kind: value for kind, value in prompt.more.items() if kind in taken}


@dataclass(frozen=True, slots=True)
class Said:
    """A text that was gone on with from `begin`, and the logits [n - begin, vocabulary] that each new token was the
    likeliest of."""

    prompt: TrialPrompt
    begin: int
    logits: Tensor


def _generated(model: Any, prompt: TrialPrompt) -> Said:
    """Greedy tokens by transformers, one by one, over its own cache, for text alone, with the types that text has in a
    prompt. Media tokens are excluded, as no trained model generates them and they are looked up differently."""
    text = prompt.ids[: prompt.runs[0][0]] if prompt.runs else prompt.ids
    types = {name: each[:, : len(text)] for name, each in _taken(model, prompt).items() if name == TOKEN_TYPES[0]}
    settings: dict[str, Any] = {"max_new_tokens": ANSWER, "min_new_tokens": ANSWER, "do_sample": False}
    settings["suppress_tokens"] = media_tokens(model.config) or None
    if "attention_mask" in inspect.signature(speaking(model).forward).parameters:
        settings["attention_mask"] = torch.ones_like(text.unsqueeze(0))  # else a token of padding is not seen
    made = speaking(model).generate(
        text.unsqueeze(0), **types, **settings, output_logits=True, return_dict_in_generate=True
    )
    logits = torch.cat(made.logits).float()
    none = torch.empty(0, dtype=torch.int64)
    said = TrialPrompt(made.sequences[0], none, prompt.rows[:, :0], prompt.marks, none.bool(), {})
    return Said(said, len(text), logits)


class _Features:
    """As much of an encoder's output as transformers' models look at."""

    def __init__(self, rows: Any, deep: Any, marks: Tensor) -> None:
        self.pooler_output = self.last_hidden_state = rows
        self.visual_indicator_features = marks
        self.deepstack_features = deep or None

    def to_tuple(self) -> tuple[Any, ...]:
        """The values of an output of transformers, without their names."""
        return (self.pooler_output,)

    def __getattr__(self, _: str) -> None:
        return None
