"""Quantised weights of all experts of a layer in one tensor: `gate_up_proj` has three dimensions, with its scales in
`gate_up_proj_weight_scale` and the like beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from common.checkpoints.checkpoint import TensorInfo
from llm_service.layers.linear.placement import Stored

_SCALE = "_weight_scale"
_KINDS = {"": "weight", "_weight_scale": "weight_scale", "_weight_scale_2": "weight_scale_2"}
_INPUTS = "_input_scale"
_PACKED = "U8"


def stacks_within(parts: Mapping[str, TensorInfo]) -> dict[str, dict[str, str]]:
    """The stacked weights of experts among a module's tensors (by their last names), with their tensors by what they
    would be called for a single weight: {"gate_up_proj": {"weight_scale": …, …}}."""
    found = {part.removesuffix(_SCALE) for part in parts if part.endswith(_SCALE)} & parts.keys()
    return {part: {kind: part + end for end, kind in _KINDS.items() if part + end in parts} for part in found}


def belongs_to(stacks: Mapping[str, object], part: str) -> bool:
    """Whether a tensor is a part of a stack, and not its numbers."""
    return any(part.startswith(stack) and part.removeprefix(stack) in {*_KINDS, _INPUTS} - {""} for stack in stacks)


class QuantizedStack:
    """See `StoredStack`. `made` makes a weight [outputs, inputs] of one expert's tensors, by their names."""

    def __init__(
        self,
        infos: Mapping[str, TensorInfo],
        tensors: Mapping[str, Stored],
        made: Callable[[Mapping[str, Stored]], Stored],
    ) -> None:
        self._tensors, self._made = tensors, made
        shape, scales = infos["weight"].shape, infos["weight_scale"].shape
        self._packed: int | None = None  # the dimension in which a byte has two numbers
        if infos["weight"].dtype == _PACKED and len(shape) == len(scales) == 3:
            self._packed = 1 if shape[2] == scales[2] else 2
        self._shape = [side * (1 + (axis == self._packed)) for axis, side in enumerate(shape)]

    def get_shape(self) -> list[int]:
        """[experts, outputs, inputs], or [experts, inputs, outputs]."""
        return self._shape

    def __getitem__(self, _: Any) -> Any:
        """Raises ValueError: quantised experts cannot be read as one."""
        raise ValueError("experts in one tensor are quantised")

    def of_expert(self, number: int, *, inputs_first: bool) -> Stored:
        """See `StoredStack`."""
        if self._packed is not None and (self._packed == 1) is not inputs_first:
            raise ValueError("numbers of several outputs are in a byte")
        count = self._shape[0]
        each = {kind: _OfExpert(stored, number, count, swapped=inputs_first) for kind, stored in self._tensors.items()}
        return self._made(each)


class _OfExpert:
    """One expert's part of a tensor: all of it if it is not for each expert. With `swapped` the two dimensions are
    exchanged."""

    def __init__(self, stored: Stored, number: int, count: int, *, swapped: bool) -> None:
        self._stored, self._number = stored, number
        shape = stored.get_shape()
        self._is_each = bool(shape) and shape[0] == count
        rest = shape[1:] if self._is_each else shape
        self._swapped = swapped and len(rest) == 2
        self._shape = rest[::-1] if self._swapped else rest

    def get_shape(self) -> list[int]:
        """See `Stored`."""
        return self._shape

    def __getitem__(self, index: Any) -> Tensor:
        if not self._is_each:
            whole: Tensor = self._stored[index]
            return whole
        places = () if index is Ellipsis else index if isinstance(index, tuple) else (index,)
        places = (*places, *[slice(None)] * (len(self._shape) - len(places)))
        one = slice(self._number, self._number + 1)
        read: Tensor = self._stored[(one, *(places[::-1] if self._swapped else places))][0]
        return read.T if self._swapped else read
