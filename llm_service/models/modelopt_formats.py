"""Weights written by NVIDIA's Model Optimizer; the types of their tensors tell the format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.checkpoints.checkpoint import TensorInfo
from llm_service.layers.linear.placement import Stored
from llm_service.layers.linear.quantized_weight import Number
from llm_service.models.float_formats import EightBits, PairsOfFloats, PowersOfTwo, only_number

BLOCK = 128, 128
_NV_GROUP, _MX_GROUP = 16, 32
_BYTES = "U8", "F8_E8M0"
_NUMBERS = {"F8_E4M3": Number.E4M3, "I8": Number.INT8}
_CHANGED = {"pre_quant_scale": "its inputs are to be scaled", "svdquant_lora_a": "a matrix of low rank is beside it"}
"""Tensors of a module whose product is more than one with its weight."""


def modelopt_weight(
    parts: Mapping[str, TensorInfo], tensors: Mapping[str, Stored], *, rounds_inputs: Number | None
) -> Stored:
    """The weight that the tensors of a module, by the last part of their names, are; `input_scale` is not read, since
    inputs are not rounded by it. Raises KeyError where one is missing, ValueError for what is not served.

    | weight | weight_scale | the weight is |
    |---|---|---|
    | e4m3 or int8 [n, k] | floats: one, [n], or [n / 128, 1, k / 128, 1] | number · scale |
    | e4m3 [n, k] | e8m0 [n, k / 32] | number · scale (MXFP8) |
    | bytes [n, k / 2] | e4m3 [n, k / 16] | number · scale · weight_scale_2 (NVFP4) |
    | bytes [n, k / 2] | e8m0 [n, k / 32] | number · scale (MXFP4) |
    """
    for part, why in _CHANGED.items():
        if part in parts:
            raise ValueError(f"{why} ({part})")
    weight, kind = tensors["weight"], parts["weight"].dtype
    name = "weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale"
    scale: Any = tensors[name]
    powers = parts[name].dtype in _BYTES
    if powers:
        scale = PowersOfTwo(scale)
    if (number := _NUMBERS.get(kind)) is not None:
        return EightBits(number, weight, scale, block=BLOCK, rounds_inputs=None if powers else rounds_inputs)
    if powers:
        return PairsOfFloats(weight, scale, _MX_GROUP)
    if parts[name].dtype != "F8_E4M3":
        raise ValueError(f"bytes with scales in {parts[name].dtype}")
    return PairsOfFloats(weight, scale, _NV_GROUP, unit=only_number(tensors["weight_scale_2"]))
