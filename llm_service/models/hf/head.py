"""A head of transformers, which may do more than multiply: it gets hidden states as if from its own model."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from common.checkpoints.checkpoint import CheckpointError
from common.hf.classes import decoder_of


def take_layers(model: Any, text: nn.Module) -> None:
    """Detaches a model's text layers from its head, which from now on computes logits from given hidden states. Raises
    CheckpointError if the model does not keep them apart."""
    below = _below_head(model)
    setattr(*below, _Given(getattr(*below), text))


def _below_head(model: Any) -> tuple[nn.Module, str]:
    """The part of a model that computes hidden states, and its name: everything below the logit head or, if that is not
    one module, the text layers. Raises CheckpointError if neither is a module."""
    if model.base_model is not model:
        return model, model.base_model_prefix
    text = decoder_of(model)
    for part in model.modules():
        for name, child in part.named_children():
            if child is text:
                return part, name
    raise CheckpointError(f"{type(model).__name__} does not keep its text layers apart")


class _Given(nn.Module):
    """Takes the place of a model that has computed these hidden states, and of its text layers; it has the other
    attributes that the head reads."""

    def __init__(self, model: nn.Module, text: nn.Module) -> None:
        super().__init__()
        self._of = model, text  # none of its parts

    def __getattr__(self, name: str) -> Any:
        model, text = self.__dict__["_of"]
        found = getattr(model, name)
        return self if found is text else found

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _Output:
        return _Output(inputs_embeds)


class _Output:
    """As much of transformers' outputs as its heads look at."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, _: str) -> None:
        return None
