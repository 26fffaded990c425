"""A tower that is the library's own model without its text layers. It knows one item at a time, since what several of
them give together has a form of its own in every model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.checkpoint import CheckpointError
from common.library import LibraryModel
from common.library_models import load

_OF_NO_PROMPT = {"last_hidden_state", "pooler_output", "hidden_states", "attentions"}
"""What the library's outputs have of which a prompt gets the rows alone."""


class LibraryTower:
    """Raises CheckpointError where the library cannot load the model, or its class says no rows."""

    def __init__(self, folder: Path, found: LibraryModel, dtype: torch.dtype, device: torch.device) -> None:
        self._found, self._dtype, self._device = found, dtype, device
        self._model = load(folder, without_text, dtype, device)
        if not hasattr(self._model, "get_image_features"):
            raise CheckpointError(f"{found.architecture} has no rows of pictures")
        self._takes = inspect.signature(self._model.get_image_features).parameters.keys()

    def rows(self, inputs: Mapping[str, Tensor], tokens: int) -> Tensor:
        """Named tensors of one item → [tokens, levels, width]. Raises RuntimeError where there are more or fewer."""
        given = {name: self._placed(value) for name, value in inputs.items() if name in self._takes}
        features = self._model.get_image_features(**given, return_dict=True)
        deep = features.get("deepstack_features") or [] if self._found.levels > 1 else []
        known = _OF_NO_PROMPT | ({"deepstack_features"} if deep else set())
        if beside := [name for name in features.keys() - known if features[name] is not None]:
            raise RuntimeError(f"the tower gives {beside[0]} beside its rows, which nobody would add to the prompt")
        levels = [flat_rows(level, self._found.hidden_size) for level in (features.pooler_output, *deep)]
        if {len(level) for level in levels} != {tokens}:
            raise RuntimeError(f"the tower gives {len(levels[0])} rows, and its processor has places for {tokens}")
        if len(levels) != self._found.levels:
            raise RuntimeError(f"the tower gives {len(levels)} levels of rows in place of {self._found.levels}")
        return torch.stack(levels, dim=1)

    def _placed(self, value: Tensor) -> Tensor:
        return value.to(self._device, self._dtype if value.is_floating_point() else None)


def flat_rows(features: Any, width: int) -> Tensor:
    """A tensor […, width], or several of them one after the other, as [n, width]. Raises RuntimeError for anything
    else: rows that are taken for others would be believed."""
    parts = [features] if isinstance(features, Tensor) else list(features)
    if not parts or not all(isinstance(part, Tensor) and part.shape[-1] == width for part in parts):
        raise RuntimeError(f"the tower gives something else than rows of {width} numbers")
    return torch.cat([part.reshape(-1, width) for part in parts])


def without_text(model: Any) -> None:
    """Takes the decoder and the head of logits away."""
    text = {id(model.get_decoder()), id(model.get_output_embeddings())}
    if id(model) in text:
        raise CheckpointError(f"{type(model).__name__} does not keep its text layers apart")
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if id(child) in text:
                setattr(module, name, None)
    model._tied_weights_keys, model.all_tied_weights_keys = None, {}
