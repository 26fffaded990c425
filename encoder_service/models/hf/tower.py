"""A tower that is transformers' own model without its text layers. Every model combines items in its own way, so a
trial has to show whether several can be computed together (`worker.hf.batches`)."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.hf.classes import load
from common.hf.description import HfModel
from common.hf.features import features_of
from common.hf.rows import marks_of
from common.hf.towers import without_text
from encoder_service.models.attention import Backend
from encoder_service.models.hf.attention import AttendingBy
from encoder_service.models.hf.patches import multiply_patches
from encoder_service.models.hf.products import lay_out
from encoder_service.models.hf.rotary import TurningBy

_OF_NO_PROMPT = re.compile(
    r"pooler_output|attentions|(?:image|audio)_tokens|embedding_loss|speaker_logits|(vision|qformer)_outputs|\w*hidden_states?"
)
"""Fields of transformers' outputs that are not rows of a prompt."""
_UNPOOLED = "audio"
"""The modality whose rows some towers return as their last hidden states."""
_HEARD = "attention_mask"
"""The input that tells which rows belong to a sound, and not to padding of its features."""
_FILLS_UP = "embed_audio"
"""The name of models' tables for rows of sounds, tokens included."""
_NOISE = "sample"
"""Names an argument: whether noise is drawn for a sound. Then rows would be others each time."""
_MARKS = "visual_indicator_features"
"""Rows of marks around a picture, which are tokens of their own."""


class HfTower:
    """A `backend` attends instead of torch, if there is one. Raises CheckpointError if transformers cannot load the
    model."""

    def __init__(
        self,
        folder: Path,
        found: HfModel,
        dtype: torch.dtype,
        device: torch.device,
        backend: Backend | None = None,
    ) -> None:
        self._found, self._dtype, self._device, self._backend = found, dtype, device, backend
        self._model = load(folder, without_text, dtype, device, found.tower_tensors)
        multiply_patches(self._model)
        self._turning = TurningBy(self._model)

    def lay_out(self, passes: Callable[[], object]) -> int:
        """Lays out linear layers for oneDNN, as far as `passes` show that it is possible; returns how many (see
        `products`). For CPUs on which that is faster."""
        return lay_out(self._model, passes)

    def known(self, inputs: Mapping[str, Any], modality: str) -> dict[str, Any]:
        """Those of an item's inputs that its rows depend on."""
        taken = {*self._taken(modality), *(("input_ids",) if marks_of(self._model.config) else ())}
        return {name: value for name, value in inputs.items() if name in taken}

    def placed(self, inputs: Mapping[str, Any], modality: str) -> dict[str, Any]:
        """Inputs, moved to the device as its model needs them."""
        taken = self._taken(modality)
        return {name: self._placed(value) if name in taken else value for name, value in inputs.items()}

    def _taken(self, modality: str) -> Collection[str]:
        """The names of the inputs that its model is given."""
        compute = features_of(self._model.base_model, modality)
        return () if compute is None else inspect.signature(compute).parameters

    def rows(self, inputs: Mapping[str, Any], tokens: int, modality: str = "image") -> Tensor:
        """The processor's output for one or several items → [tokens, levels, width], item by item. Raises RuntimeError
        if there are more or fewer rows, or transformers fails: some models have no positions for pictures that their
        processors accept, such as very long ones."""
        attending = contextlib.nullcontext() if self._backend is None else AttendingBy(self._backend)
        try:
            with attending, self._turning:
                return self._rows(inputs, tokens, modality)
        except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise RuntimeError(f"transformers does not compute it: {type(error).__name__}: {error}") from error

    def _rows(self, inputs: Mapping[str, Any], tokens: int, modality: str) -> Tensor:
        if modality == _UNPOOLED and hasattr(getattr(self._model.base_model, _FILLS_UP, None), "vocab_offset"):
            return self._filled_up(inputs, tokens)
        compute = features_of(self._model.base_model, modality)
        assert compute is not None, "the model takes items of this modality"
        taken = self._taken(modality)
        given = {name: self._placed(value) for name, value in inputs.items() if name in taken}
        if _NOISE in taken:
            given[_NOISE] = False
        features = compute(**given, return_dict=True)
        deep = features.get("deepstack_features") or [] if self._found.levels > 1 else []
        marks = features.get(_MARKS)
        known = _OF_NO_PROMPT.pattern + f"|{_HEARD}" * (modality == _UNPOOLED)
        beside = [name for name, value in features.items() if value is not None and not re.fullmatch(known, name)]
        if beside := [name for name in beside if name != _MARKS and (name != "deepstack_features" or not deep)]:
            raise RuntimeError(f"the tower gives {beside[0]} beside its rows, which nobody would add to the prompt")
        first = features.last_hidden_state if modality == _UNPOOLED and features.pooler_output is None else None
        first = features.pooler_output if first is None else first
        if (heard := features.get(_HEARD)) is not None and first.dim() > heard.dim():  # else it has left them out
            first = first[heard.bool()]
        if first is None and deep:  # each with the layer that it is for
            every = [level for _, level in deep]
        elif first is None:  # the projection to the text's width follows the tower, as in Llama 4
            every = [self._model.multi_modal_projector(features.last_hidden_state)]
        else:
            every = [first, *deep]
        levels = [flat_rows(level, self._found.hidden_size) for level in every]
        if modality == _UNPOOLED:  # nothing of a sound goes to deeper layers
            levels += [torch.zeros_like(levels[0])] * (self._found.levels - len(levels))
        if marks is not None:
            levels = [self._with_marks(level, marks, inputs["input_ids"][0]) for level in levels]
        if {len(level) for level in levels} != {tokens}:
            raise RuntimeError(f"the tower gives {len(levels[0])} rows, and its processor has places for {tokens}")
        if len(levels) != self._found.levels:
            raise RuntimeError(f"the tower gives {len(levels)} levels of rows in place of {self._found.levels}")
        return torch.stack(levels, dim=1)

    def _filled_up(self, inputs: Mapping[str, Any], tokens: int) -> Tensor:
        """For models with a fixed number of rows for any sound, filled up with a row of a table, such as Gemma 3n:
        their tower is told which features are padding, instead of which are the sound's."""
        base = self._model.base_model
        features, heard = (self._placed(inputs[name]) for name in ("input_features", "input_features_mask"))
        made = base.get_audio_features(features, ~heard, return_dict=True)
        last = torch.tensor([[base.vocab_size - 1]], device=self._device)
        behind = getattr(base, _FILLS_UP)(input_ids=last)[0]
        rows = torch.where(made.audio_mel_mask[0].unsqueeze(-1), behind, made.pooler_output[0])
        if len(rows) > tokens:
            raise RuntimeError(f"the tower gives {len(rows)} rows, and its processor has places for {tokens}")
        return torch.cat([rows, behind.expand(tokens - len(rows), -1)]).unsqueeze(1)

    def _with_marks(self, rows: Tensor, marks: Tensor, ids: Tensor) -> Tensor:
        """Rows, and those of the marks between them, in the order of their tokens in `ids` int [n]."""
        config = self._model.config
        places = torch.isin(ids, torch.tensor([config.image_token_id, *marks_of(config)]))
        wanted = ids[places]
        if int((wanted == config.image_token_id).sum()) != len(rows):
            return rows  # too many or too few
        out = rows.new_empty(len(wanted), rows.shape[1])
        out[wanted == config.image_token_id] = rows
        for token, row in zip(marks_of(config), marks, strict=True):
            out[wanted == token] = row.to(out)
        return out

    def _placed(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(self._device, self._dtype if value.is_floating_point() else None)


def in_turns(frames: Tensor, sound: Tensor, runs: Sequence[int]) -> Tensor:
    """Rows of frames and of sound, [n, …] each, as a prompt has them: so many of one and of the other in turns, frames
    first.

    >>> in_turns(torch.tensor([1, 2, 3]), torch.tensor([8, 9]), [2, 1, 1, 1]).tolist()
    [1, 2, 8, 3, 9]
    """
    is_sound = torch.arange(len(runs)).remainder(2).bool().repeat_interleave(torch.tensor(runs)).to(frames.device)
    rows = frames.new_empty(len(is_sound), *frames.shape[1:])
    rows[~is_sound], rows[is_sound] = frames, sound
    return rows


def flat_rows(features: Any, width: int) -> Tensor:
    """A tensor […, width], or several of them one after the other, as [n, width]. Raises RuntimeError for anything
    else: rows that are taken for others would be believed."""
    parts = [features] if isinstance(features, Tensor) else list(features)
    if not parts or not all(isinstance(part, Tensor) and part.shape[-1] == width for part in parts):
        raise RuntimeError(f"the tower gives something else than rows of {width} numbers")
    return torch.cat([part.reshape(-1, width) for part in parts])
