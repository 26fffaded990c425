"""What transformers' text models take besides embeddings, derived from a prompt's ids."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from llm_service.layers.attention.general_backend import GeneralBatch

_MEDIA = "image_token_id", "video_token_id", "audio_token_id"
_MARKS = "image_start_token_id", "image_end_token_id", "video_start_token_id", "video_end_token_id"
_ROUTED = "moe_mm_token_type_ids"
"""The name of an argument: 0 if experts of text compute a token, else those of media."""


def media_tokens(config: Any, names: Sequence[str] = (*_MEDIA, *_MARKS)) -> list[int]:
    """The ids of media tokens, and of the marks around them, in a configuration."""
    found = [getattr(config, name, None) for name in names]
    return [each for each in found if each is not None]


class InputsByIds:
    """Makes these, of ids on `device`, for the `text` of a model with this configuration."""

    def __init__(self, config: Any, text: Any, device: torch.device) -> None:
        self._text = text
        self._has_layers = bool(getattr(text, "hidden_size_per_layer_input", 0))
        self._padding = getattr(text.config, "pad_token_id", None) or 0
        self._media, self._marks = _tokens(config, _MEDIA, device), _tokens(config, _MARKS, device)
        self.routes = _ROUTED in inspect.signature(text.forward).parameters

    def of(self, token_ids: Tensor, batch: GeneralBatch | None = None) -> dict[str, Any]:
        """By the arguments' names; ids are int [n], of the step of that batch, None: of no step."""
        more: dict[str, Any] = {}
        if self._has_layers:
            more["per_layer_inputs"] = self._inputs_of_layers(token_ids)
        if self.routes:
            kinds = torch.isin(token_ids, torch.cat([self._media, self._marks])).long()
            for part in () if batch is None else batch.segments:
                if part.end == part.begin + 1:  # one that was sampled is text, whichever it is
                    kinds[part.begin] = 0
            more[_ROUTED] = kinds.unsqueeze(0)
        return more

    def _inputs_of_layers(self, token_ids: Tensor) -> Tensor:
        """[1, n, layers, width]; media positions use what the model says, or the padding token."""
        look_up = self._text.get_per_layer_inputs
        if len(inspect.signature(look_up).parameters) > 1:
            ids = token_ids.masked_fill(torch.isin(token_ids, self._media), self._padding)
            found: Tensor = look_up(ids.unsqueeze(0), None)
        else:
            found = look_up(token_ids.unsqueeze(0))
        return found


def _tokens(config: Any, names: Sequence[str], device: torch.device) -> Tensor:
    return torch.tensor(media_tokens(config, names), dtype=torch.int64, device=device)
