"""A rank's part of transformers' text model, by transformers' plan of which weights are split and how. Sums are made by
our group; tensors that transformers would distribute are plain ones here."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from common.checkpoints.checkpoint import CheckpointError
from common.hf.classes import decoder_of
from llm_service.layers.tensor_parallel import TensorGroup
from llm_service.models.hf.linear import TextLinear
from llm_service.models.hf.states import CHUNKS

_WHOLE = frozenset(
    {"replicated_with_grad_allreduce", "replicate", "mla_kv_a_proj", "embedding_rowwise", "embedding_colwise"}
)
"""Styles whose weights every rank keeps whole: replicated in transformers, or tables, whose rows cost no time."""
_DIMENSIONS = {
    "colwise": -2,
    "colwise_gather_output": -2,
    "packed_colwise": -2,
    "rowwise": -1,
    "rowwise_split_input": -1,
    "packed_rowwise": -1,
}
"""The dimension in which a weight is split; a vector has only one."""
_SUM = "moe_tp_experts"


def partition_model(model: Any, group: TensorGroup) -> None:
    """Keeps this rank's part of a model's weights, and adds the communication to its modules. Raises CheckpointError if
    transformers has no plan, or an unknown one, or weights cannot be split like this."""
    if group.size == 1:
        return
    kind, plan = type(model).__name__, model.tp_plan or {}
    text = {id(module) for module in decoder_of(model).modules()}
    split, modules = False, dict(model.named_modules())
    for name, module in modules.items():
        for own, parameter in list(module.named_parameters(recurse=False)):
            if style := plan.get(_generic(f"{name}.{own}")):
                _keep(kind, module, own, parameter, style, group)
                split |= id(module) in text
        style = plan.get(_generic(name))
        if style is None or style in _WHOLE:
            continue
        if style == "rowwise" and type(modules[name.rpartition(".")[0]]).__name__ in CHUNKS:
            style = "rowwise_split_input"  # of a layer with states, the rest of which every rank computes
        if style == _SUM:
            module.register_forward_hook(partial(_summed, group=group))
        elif isinstance(module, nn.Linear | TextLinear) and not style.startswith("packed"):
            _partition_linear(kind, module, style, group)
            split |= id(module) in text
        else:
            raise CheckpointError(f"{kind} splits a {type(module).__name__} {style}, which is not known here")
    if not split:
        raise CheckpointError(f"transformers has no plan for {kind} on more than one rank")


def _generic(name: str) -> str:
    """With a star for each number, as plans have them."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _partition_linear(kind: str, module: nn.Linear | TextLinear, style: str, group: TensorGroup) -> None:
    wide, out = module.in_features, module.out_features
    columns = _DIMENSIONS.get(style) == -2
    if isinstance(module, TextLinear):
        _keep_range(kind, module, style, group)
    else:
        _keep_weights(kind, module, style, group)
    if style == "colwise_gather_output":
        module.register_forward_hook(partial(_joined, group=group, total=out))
    if not columns:
        if style == "rowwise_split_input":
            module.register_forward_pre_hook(partial(_cut, own=group.partition(wide)))
        module.register_forward_hook(partial(_summed, group=group))


def _keep_weights(kind: str, module: nn.Linear, style: str, group: TensorGroup) -> None:
    bias = module.bias
    _keep(kind, module, "weight", module.weight, style, group)
    if _DIMENSIONS.get(style) != -2:
        module.register_parameter("bias", None)
        module.register_parameter("summed_bias", bias)  # once, and not by each rank
    elif bias is not None:
        _keep(kind, module, "bias", bias, style, group)


def _keep_range(kind: str, module: TextLinear, style: str, group: TensorGroup) -> None:
    """Records which part this rank reads."""
    if (dimension := _DIMENSIONS.get(style)) is None:
        raise CheckpointError(f"{kind} splits weights {style}, which is not known here")
    try:
        if dimension == -2:
            module.outputs = _range(module.out_features, style, group)
        else:
            module.inputs, module.sums = _range(module.in_features, style, group), True
    except ValueError as error:
        raise CheckpointError(f"a weight of {kind}: {error}") from error


def _keep(kind: str, module: nn.Module, name: str, parameter: Tensor, style: str, group: TensorGroup) -> None:
    """Puts this rank's part in a parameter's place."""
    if style in _WHOLE:
        return
    if (dimension := _DIMENSIONS.get(style)) is None:
        raise CheckpointError(f"{kind} splits weights {style}, which is not known here")
    dimension = max(dimension, -parameter.dim())
    parts = parameter.chunk(2, dimension) if style.startswith("packed") and parameter.dim() > 1 else (parameter,)
    try:
        owned = [_part_of(part, dimension, style, group) for part in parts]
    except ValueError as error:
        raise CheckpointError(f"a weight of {kind}: {error}") from error
    made = torch.cat(owned, dimension)
    setattr(module, name, nn.Parameter(made.contiguous(), requires_grad=False))


def _part_of(part: Tensor, dimension: int, style: str, group: TensorGroup) -> Tensor:
    here = _range(part.shape[dimension], style, group)
    return part.narrow(dimension, here.start, here.stop - here.start)


def _range(total: int, style: str, group: TensorGroup) -> slice:
    return group.vocab_partition(total) if style == "colwise_gather_output" else group.partition(total)


def _summed(module: nn.Module, _: Any, output: Tensor, *, group: TensorGroup) -> Tensor:
    bias = module._parameters.get("summed_bias")
    whole = group.sum(output.contiguous())
    return whole if bias is None else whole + bias


def _joined(_: nn.Module, __: Any, output: Tensor, *, group: TensorGroup, total: int) -> Tensor:
    return group.join(output.flatten(0, -2), total).view(*output.shape[:-1], total)


def _cut(_: nn.Module, given: tuple[Tensor, ...], *, own: slice) -> tuple[Tensor, ...]:
    return given[0][..., own], *given[1:]
