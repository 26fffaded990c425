"""Linear layers of transformers' text models whose weights stay in 8 or 4 bits are replaced by ours, with our
kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from common.hf.classes import decoder_of, head_of
from common.hf.stored_names import names_within
from llm_service.layers.linear.parallel import PackedLinear
from llm_service.layers.linear.placement import Place, Stored, fill
from llm_service.layers.linear.weight_dtype import Rounded
from llm_service.models.filling import InMemory
from llm_service.models.quantized import load_weights, quantized_modules


class TextLinear(nn.Module):
    """Takes the place of a linear layer of transformers, [..., in_features] → [..., out_features], and has no weight
    until its `targets` are read. Ranks first say which `inputs` and `outputs` they keep; one that `sums` its outputs
    over the ranks adds the bias, `summed_bias`, afterwards. `rounds_inputs` as in `PackedLinear`."""

    def __init__(self, of: nn.Linear, *, rounds_inputs: bool = True) -> None:
        super().__init__()
        self.in_features, self.out_features = of.in_features, of.out_features
        self.inputs, self.outputs = slice(0, of.in_features), slice(0, of.out_features)
        self.sums = False
        self._rounds_inputs = rounds_inputs
        self._has_bias, self._dtype = of.bias is not None, of.weight.dtype
        self._product: PackedLinear | None = None

    def targets(self, own: str) -> dict[str, Place]:
        """See `Placed`."""
        bias = self._has_bias and not self.sums
        parts, rounds = {own: self.outputs}, self._rounds_inputs
        made = PackedLinear(self.inputs, parts, bias=bias, dtype=self._dtype, rounds_inputs=rounds)
        self._product = made
        found = made.targets("")
        if self._has_bias and self.sums:
            added = nn.Parameter(torch.empty(self.out_features, dtype=self._dtype), requires_grad=False)
            self.register_parameter("summed_bias", added)
            found[f"{own}.bias"] = lambda stored: fill(added, stored[:])
        return found

    def finalize(self, device: torch.device, rounded: Rounded) -> None:
        """Lays the weight out on a device; does nothing before it is there."""
        if self._product is not None and self._product.whole():
            self._product.to(device)
            self._product.finalize(rounded=rounded)
            self.to(device)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        assert self._product is not None, "it has been read"
        out: Tensor = self._product(x.reshape(-1, x.shape[-1]))
        return out.view(*x.shape[:-1], out.shape[-1])


Fill = Callable[[Any], None]
"""Reads what a model's linear layers of ours need, once ranks have said what they keep."""


def leave_quantised(checkpoint: Checkpoint, model: Any) -> dict[str, str]:
    """Replaces a model's linear layers whose weights a checkpoint has quantised by ours. Returns their tensors' names,
    by the names in the checkpoint. Raises CheckpointError if another part of the model is quantised, or transformers
    transforms these weights when it loads them."""
    quantised = {f"{module}.weight": module for module in quantized_modules(checkpoint)}
    names: dict[str, str] = {}
    for name, (there, changed) in names_within(model, quantised).items():
        path = there.removesuffix(".weight")
        if changed:
            raise CheckpointError(f"{quantised[name]} is quantised, and transformers puts it together with others")
        part = model.get_submodule(path)
        if type(part) is not nn.Linear or (part is head_of(model) and _is_tied(model)):
            raise CheckpointError(f"{quantised[name]} is quantised, which is for linear layers of their own alone")
        _replace(model, path)
        names |= {name: there, f"{quantised[name]}.bias": f"{path}.bias"}
    return names


def fill_quantised(checkpoint: Checkpoint, names: dict[str, str], device: torch.device) -> Fill:
    """By the names that `leave_quantised` gives."""
    return lambda model: _fill(model, load_weights(checkpoint, names.get), device, _rounded(model))


def round_linears(model: Any, device: torch.device, weight_dtype: str) -> Fill:
    """Replaces all linear layers of a text, and of its head, whose weights are to be rounded, as in `load_decoder`.
    Routers of experts are not among them: transformers has other classes for these."""
    text, head = decoder_of(model), head_of(model)
    wanted = {id(part) for part in [*text.modules(), head] if type(part) is nn.Linear}
    taken: dict[str, Tensor] = {}
    for name, part in list(model.named_modules()):
        if id(part) in wanted:
            taken |= {f"{name}.{kind}": tensor.detach() for kind, tensor in part.named_parameters(recurse=False)}
            _replace(model, name)
    return lambda whole: _fill(whole, _given_up(taken), device, _rounded(whole, weight_dtype))


def _rounded(model: Any, weight_dtype: str = "") -> Rounded:
    """Rows of a model in bfloat16 are that anyway."""
    return Rounded.of(weight_dtype, bfloat16=model.dtype == torch.bfloat16)


def _given_up(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Stored]]:
    """Yields each tensor and drops it from the dictionary."""
    for name in list(tensors):
        yield name, InMemory(tensors.pop(name))


def _is_tied(model: Any) -> bool:
    return bool(model.config.get_text_config(decoder=True).tie_word_embeddings or model.config.tie_word_embeddings)


def _replace(model: nn.Module, path: str) -> None:
    of = model.get_submodule(path)
    assert isinstance(of, nn.Linear), "what is replaced multiplies"
    parent, _, own = path.rpartition(".")
    setattr(model.get_submodule(parent), own, TextLinear(of, rounds_inputs=of is not head_of(model)))


def _fill(model: nn.Module, weights: Iterable[tuple[str, Stored]], device: torch.device, rounded: Rounded) -> None:
    """Raises CheckpointError if a tensor is missing or does not fit."""
    linears = {name: part for name, part in model.named_modules() if isinstance(part, TextLinear)}
    places = {target: place for name, part in linears.items() for target, place in part.targets(name).items()}
    for name, stored in weights:
        if (place := places.pop(name, None)) is None:
            raise CheckpointError(f"{name} does not fit the model: there is no place for it")
        try:
            place(stored)
            linears[name.rpartition(".")[0]].finalize(device, rounded)
        except ValueError as error:
            raise CheckpointError(f"{name} does not fit the model: {error}") from error
    if places:
        raise CheckpointError(f"the checkpoint lacks {', '.join(sorted(places)[:3])}")
