"""Quantised checkpoints: which tensors make one weight. A module's tensors say by their names that it is quantised,
`quantization_config` what their bits mean."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from common.checkpoint import Checkpoint, TensorInfo
from common.weights import SliceReader, load_slices
from llm_service.layers.linear import Stored
from llm_service.models.quantization_config import Scheme
from llm_service.models.quantized_formats import is_quantised, quantised_weight

_MAIN = ("weight", "weight_packed", "qweight")
_OF_CACHE = ("q_scale", "k_scale", "v_scale")
"""Of a KV cache in 8 bits, which a checkpoint may suggest; ours has the model's own type."""


def quantized_modules(checkpoint: Checkpoint) -> list[str]:
    """Of a checkpoint's modules, by their names, those whose weights are quantised. Raises CheckpointError as
    `Scheme.of`."""
    if Scheme.of(checkpoint.config) is None:
        return []
    every = _modules(checkpoint).items()
    return [module for module, parts in every if not parts.keys().isdisjoint(_MAIN) and is_quantised(parts)]


def load_weights(checkpoint: Checkpoint, wanted: Callable[[str], str | None]) -> Iterator[tuple[str, Stored]]:
    """Yields (new name, what reads a part of it) for each tensor whose name `wanted` maps to a new one; tensors that
    make one quantised weight are yielded as one, by the name of the weight. Raises CheckpointError where a part of
    one is missing or does not fit, and for a scheme that is not served."""
    scheme = Scheme.of(checkpoint.config)
    if scheme is None:
        yield from load_slices(checkpoint, wanted)
        return
    with SliceReader(checkpoint) as reader:
        for module, parts in _modules(checkpoint).items():
            main = next((part for part in _MAIN if part in parts), None)
            quantised = main is not None and is_quantised(parts)
            for part in parts:
                if part in _OF_CACHE:
                    continue
                if quantised and part != main and part != "bias":
                    continue  # it belongs to the weight
                plain = f"{module}.{part}" if module else part
                renamed = wanted(f"{module}.weight" if quantised and part == main else plain)
                if renamed is not None and quantised and part == main:
                    yield renamed, quantised_weight(scheme, module, parts, reader)
                elif renamed is not None:
                    yield renamed, reader[plain]


def _modules(checkpoint: Checkpoint) -> dict[str, dict[str, TensorInfo]]:
    """The tensors of each module, by the last part of their names."""
    found: dict[str, dict[str, TensorInfo]] = {}
    for name, info in checkpoint.tensors.items():
        module, _, part = name.rpartition(".")
        found.setdefault(module, {})[part] = info
    return found
