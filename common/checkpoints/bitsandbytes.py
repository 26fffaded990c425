"""Weights stored by bitsandbytes in 4 bits (NF4, FP4) or 8: which tensors belong to one, and how they are decoded.
Formulas are those of its `dequantize_4bit` and `int8_vectorwise_dequant`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from common.checkpoints.tensors import SliceReader

METHOD: Final = "bitsandbytes"
"""The `quant_method`."""

NF4: Final = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The numbers of its codes: quantiles of a normal distribution, as parts of the largest (QLoRA, appendix E)."""
_FP4 = (0.0, 0.0052083334885537624, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5, 0.1666666716337204, 0.25)
FP4: Final = (*_FP4, *(-each for each in _FP4))
"""The values of its 4-bit floats, in its own order."""
LEVELS: Final = {"nf4": NF4, "fp4": FP4}
_SCALES, _FORMAT = "SCB", "weight_format"
_HIGHEST = 127.0
_STATE = re.compile(r"weight\.quant_state\.bitsandbytes__(nf4|fp4)")
_PART = re.compile(r"(.*)\.(weight\.(?:absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.\w+))")


def split_name(name: str) -> tuple[str, str]:
    """A tensor's module, and what it is of it.

    >>> split_name("layers.0.up_proj.weight.absmax")
    ('layers.0.up_proj', 'weight.absmax')
    >>> split_name("layers.0.up_proj.bias")
    ('layers.0.up_proj', 'bias')
    """
    if (found := _PART.fullmatch(name)) is not None:
        return found[1], found[2]
    module, _, part = name.rpartition(".")
    return module, part


def is_4_bits(parts: Collection[str]) -> bool:
    """Whether these tensors of a module, by their last names, are a weight in 4 bits."""
    return "weight.quant_map" in parts


class FourBits:
    """A weight [outputs, inputs] with two numbers per byte, the first in the upper half, row by row; each `block` of
    numbers has a scale. `tensors` support slicing. Raises KeyError if one is missing, ValueError if they do not fit."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        state = [(part, found[1]) for part in tensors if (found := _STATE.fullmatch(part))]
        if not state:
            raise KeyError("weight.quant_state.bitsandbytes__nf4")
        ((part, self.kind),) = state
        stated = json.loads(bytes(tensors[part][:].tolist()))
        self.block = int(stated["blocksize"])
        self.shape = (int(stated["shape"][0]), int(stated["shape"][1]))
        self.dtype: torch.dtype = getattr(torch, str(stated["dtype"]))
        numbers = self.shape[0] * self.shape[1]
        if not torch.equal(tensors["weight.quant_map"][:].float(), torch.tensor(LEVELS[self.kind])):
            raise ValueError(f"its quant_map is not that of {self.kind}")
        self._codes = tensors["weight"][:].reshape(-1).contiguous().view(torch.uint8)
        self._scales = self._all_scales(tensors, stated)
        if len(self._codes) != -(-numbers // 2) or len(self._scales) != -(-numbers // self.block):
            raise ValueError(f"its weight or scales are not those of {self.shape}")

    def _all_scales(self, tensors: Mapping[str, Any], stated: Mapping[str, Any]) -> Tensor:
        """float32 [blocks]. They may be in 8 bits themselves, with an offset that is taken from all of them first."""
        scales: Tensor = tensors["weight.absmax"][:]
        if "nested_blocksize" not in stated:
            return scales.float()
        levels, outer = (tensors[f"weight.nested_{part}"][:].float() for part in ("quant_map", "absmax"))
        each = outer.repeat_interleave(int(stated["nested_blocksize"]))[: len(scales)]
        found: Tensor = levels[scales.int()] * each + float(stated["nested_offset"])
        return found

    @property
    def in_rows(self) -> bool:
        """Whether no block has numbers of two rows."""
        return self.shape[1] % self.block == 0

    def rows(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Some outputs, if blocks are `in_rows`: codes uint8 [n, inputs / 2], the first of two in the lower half, and
        scales float32 [n, inputs / block]."""
        outputs, inputs = self.shape
        codes = self._codes.view(outputs, inputs // 2)[begin:end]
        return (codes >> 4) | (codes << 4), self._scales.view(outputs, inputs // self.block)[begin:end]

    def dense(self) -> Tensor:
        """The whole, in the type that it was quantised from."""
        numbers = torch.tensor(LEVELS[self.kind])[torch.stack((self._codes >> 4, self._codes & 15), 1).flatten().int()]
        count = self.shape[0] * self.shape[1]
        scales = self._scales.repeat_interleave(self.block)[:count]
        return (numbers[:count] * scales).to(self.dtype).view(self.shape)


def of_8_bits(tensors: Mapping[str, Any]) -> tuple[Any, Tensor]:
    """Numbers int8 [outputs, inputs], which support slicing, and a scale for each output, float32 [outputs, 1]. Raises
    KeyError if one is missing, ValueError if numbers are not in row order."""
    if _FORMAT in tensors and int(tensors[_FORMAT][...]) != 0:
        raise ValueError(f"its {_FORMAT} is not that of rows")
    scales: Tensor = tensors[_SCALES][:].float().reshape(-1, 1) / _HIGHEST
    return tensors["weight"], scales


def load_dense(checkpoint: Checkpoint, wanted: Callable[[str], str | None]) -> Iterator[tuple[str, Tensor]]:
    """Yields (new name, tensor) for each tensor whose name `wanted` maps to a new one; None leaves it unread. Weights
    quantised by bitsandbytes are dequantised. Raises CheckpointError if a part of one is missing or does not fit."""
    modules: dict[str, list[str]] = {}
    for name in checkpoint.tensors:
        module, part = split_name(name)
        modules.setdefault(module, []).append(part)
    with SliceReader(checkpoint) as reader:
        for module, parts in modules.items():
            within = f"{module}." if module else ""
            quantised = is_4_bits(parts) or _SCALES in parts
            for part in ({"weight", "bias"} & set(parts)) if quantised else parts:
                if (renamed := wanted(within + part)) is not None:
                    of_weight = quantised and part == "weight"
                    yield renamed, _dense(reader, module, parts) if of_weight else reader[within + part][...]


def _dense(reader: SliceReader, module: str, parts: Sequence[str]) -> Tensor:
    tensors = {part: reader[f"{module}.{part}"] for part in parts}
    try:
        if is_4_bits(parts):
            return FourBits(tensors).dense()
        numbers, scales = of_8_bits(tensors)
        plain: Tensor = numbers[:].float() * scales
        return plain
    except KeyError as error:
        raise CheckpointError(f"{module} is quantised and has no {error.args[0]}") from None
    except ValueError as error:
        raise CheckpointError(f"{module} is quantised in an unsupported way: {error}") from None
