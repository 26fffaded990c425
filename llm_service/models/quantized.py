"""Quantised checkpoints: which tensors make one weight. The names of a module's tensors say that it is quantised,
`quantization_config` says what their bits mean."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch

from common.checkpoints.bitsandbytes import split_name
from common.checkpoints.checkpoint import Checkpoint, CheckpointError, TensorInfo
from common.checkpoints.tensors import SliceReader, load_slices
from llm_service.layers.cpu import selection
from llm_service.layers.linear.placement import Stored
from llm_service.layers.linear.weight_dtype import W8A8
from llm_service.model_config.stated_quantization import cache_type_of
from llm_service.models.cache_scales import is_of_cache
from llm_service.models.quantization_config import Scheme
from llm_service.models.quantized_formats import is_quantised, quantised_weight
from llm_service.models.stacked_formats import QuantizedStack, belongs_to, stacks_within

_MAIN = ("weight", "weight_packed", "qweight")
_SCALE = "weight_scale"

Parts = Mapping[str, TensorInfo]
"""A module's tensors, by the last part of their names."""
Modules = Mapping[str, Parts]


def quantized_modules(checkpoint: Checkpoint) -> list[str]:
    """The names of a checkpoint's modules whose weights are quantised. Raises CheckpointError as `Scheme.of`."""
    if Scheme.of(checkpoint.config) is None:
        return []
    return [module for module, parts in _modules(checkpoint).items() if _has_quantised(parts)]


def check_weight_dtype(weight_dtype: str, scheme: Scheme | None, device: torch.device) -> None:
    """Raises CheckpointError if weights cannot be rounded like this."""
    if weight_dtype and scheme is not None:
        raise CheckpointError(f"--weight-dtype {weight_dtype} is for weights that the checkpoint has not quantised")
    if weight_dtype == W8A8 and not _multiplies_bytes(device):
        raise CheckpointError("--weight-dtype w8a8 is for our kernels on CPUs with AVX512-VNNI and on GPUs")


def _multiplies_bytes(device: torch.device) -> bool:
    """Whether weights and inputs of 8 bits are multiplied as whole numbers on a device."""
    if device.type != "cuda":
        return device.type == "cpu" and selection.computes_bytes()
    from llm_service.layers.gpu import int8_weight  # not everywhere is a Triton

    return int8_weight.computes(device)


def load_weights(checkpoint: Checkpoint, wanted: Callable[[str], str | None]) -> Iterator[tuple[str, Stored]]:
    """Yields (new name, reader of a part of it) for each tensor whose name `wanted` maps to a new one; tensors that
    make one quantised weight are yielded as one, under the weight's name. Raises CheckpointError if a part of one is
    missing or does not fit, and for a scheme that is not served."""
    scheme = Scheme.of(checkpoint.config)
    if scheme is None:
        suggested = bool(cache_type_of(checkpoint.config))
        yield from load_slices(checkpoint, lambda name: None if suggested and is_of_cache(name) else wanted(name))
        return
    with SliceReader(checkpoint) as reader:
        modules = _modules(checkpoint)
        for module in modules:
            for name, made in _weights(scheme, modules, module, reader):
                renamed = None if is_of_cache(name) else wanted(name)
                if renamed is not None:
                    yield renamed, made()


def _weights(
    scheme: Scheme, modules: Modules, module: str, reader: SliceReader
) -> Iterator[tuple[str, Callable[[], Stored]]]:
    """The name of each tensor of a module, or of the weight that several make, and the function that gets it."""
    parts, within = modules[module], f"{module}." if module else ""
    if _has_quantised(parts):
        yield f"{within}weight", partial(_weight, scheme, modules, module, reader)
        parts = {part: info for part, info in parts.items() if part == "bias"}
    stacks = stacks_within(parts)
    for part in parts:
        if part in stacks:
            yield within + part, partial(_stack, scheme, module, parts, stacks[part], reader)
        elif not belongs_to(stacks, part) and not (part == _SCALE and _is_shared(modules, module)):
            yield within + part, partial(reader.__getitem__, within + part)


def _weight(scheme: Scheme, modules: Modules, module: str, reader: SliceReader) -> Stored:
    parts = modules[module]
    tensors = {part: reader[f"{module}.{part}"] for part in parts}
    above = module.rpartition(".")[0]
    if _lacks_scale(parts) and _SCALE in modules.get(above, {}):
        parts = {**parts, _SCALE: modules[above][_SCALE]}
        tensors[_SCALE] = reader[f"{above}.{_SCALE}"]
    return quantised_weight(scheme, module, parts, tensors)


def _stack(scheme: Scheme, module: str, parts: Parts, kinds: Mapping[str, str], reader: SliceReader) -> Stored:
    infos = {kind: parts[part] for kind, part in kinds.items()}
    tensors = {kind: reader[f"{module}.{part}"] for kind, part in kinds.items()}
    named = f"{module}.{kinds['weight']}"
    return QuantizedStack(infos, tensors, lambda one: quantised_weight(scheme, named, infos, one))


def _has_quantised(parts: Parts) -> bool:
    return not parts.keys().isdisjoint(_MAIN) and is_quantised(parts)


def _lacks_scale(parts: Parts) -> bool:
    return "weight" in parts and _has_quantised(parts) and not any(part.startswith(_SCALE) for part in parts)


def _is_shared(modules: Modules, module: str) -> bool:
    """Whether a module without a weight has the scale of modules within it, such as a table that is in pieces."""
    if not modules[module].keys().isdisjoint(_MAIN):
        return False
    return any(name.rpartition(".")[0] == module and _lacks_scale(parts) for name, parts in modules.items())


def _modules(checkpoint: Checkpoint) -> Modules:
    """The tensors of each module, by their last names."""
    found: dict[str, dict[str, TensorInfo]] = {}
    for name, info in checkpoint.tensors.items():
        module, part = split_name(name)
        found.setdefault(module, {})[part] = info
    return found
