"""Formats of quantised weights: how they are recognised, and how a rank's part of packed ones is read. Formulas are
those of the libraries that write them: transformers for fp8 in blocks, compressed-tensors, AutoAWQ (`gemm`), GPTQModel,
NVIDIA's Model Optimizer, bitsandbytes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from common.checkpoints import bitsandbytes
from common.checkpoints.bitsandbytes import is_4_bits
from common.checkpoints.checkpoint import CheckpointError, TensorInfo
from llm_service.layers.linear.placement import Stored
from llm_service.layers.linear.quantized_weight import Number, QuantizedWeight
from llm_service.models.filling import InMemory
from llm_service.models.float_formats import (
    EightBits,
    PairsOfFloats,
    SlicedWeight,
    cover,
    grid_of,
    only_number,
    two_sides,
)
from llm_service.models.modelopt_formats import modelopt_weight
from llm_service.models.quantization_config import Scheme

_WORD = 32
_AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)
"""The outputs whose numbers are in an AWQ word, from its lowest bits on."""
_EIGHT_BITS = {"F8_E4M3": Number.E4M3, "I8": Number.INT8}
_NVFP4_GROUP = 16


def is_quantised(parts: Mapping[str, TensorInfo]) -> bool:
    """Whether the tensors of a module that has a weight, by the last part of their names, are a quantised one."""
    if "qweight" in parts or "weight_packed" in parts or is_4_bits(parts):
        return True
    kind = parts["weight"].dtype
    return kind in _EIGHT_BITS or (kind == "U8" and any(part.startswith("weight_scale") for part in parts))


def quantised_weight(
    scheme: Scheme, module: str, parts: Mapping[str, TensorInfo], tensors: Mapping[str, Stored]
) -> Stored:
    """The weight that these tensors of a module make, by their last names. Raises CheckpointError if one is missing or
    does not fit."""
    try:
        match scheme.method:
            case "awq":
                return _Awq(tensors, scheme)
            case "gptq":
                return _Gptq(tensors, scheme)
            case "modelopt":
                return modelopt_weight(parts, tensors, rounds_inputs=scheme.rounds_inputs)
            case bitsandbytes.METHOD if is_4_bits(parts):
                return _BitsAndBytes(tensors)
            case bitsandbytes.METHOD:
                numbers, scale = bitsandbytes.of_8_bits(tensors)
                return EightBits(Number.INT8, numbers, InMemory(scale))
        if "weight_packed" not in parts:
            return _eight_bits(tensors, scheme, parts["weight"].dtype)
        return _nvfp4(tensors) if parts["weight_packed"].dtype == "U8" else _Packed(tensors)
    except KeyError as error:
        raise CheckpointError(f"{module} is quantised and has no {error.args[0]}") from None
    except ValueError as error:
        raise CheckpointError(f"{module} is quantised in an unsupported way: {error}") from None


def _eight_bits(tensors: Mapping[str, Stored], scheme: Scheme, kind: str) -> EightBits:
    """fp8 of transformers (`weight_scale_inv`), and the compressed-tensors formats of one number a byte."""
    if (number := _EIGHT_BITS.get(kind)) is None:
        raise ValueError(f"its weight is {kind}")
    name = "weight_scale_inv" if scheme.method == "fp8" and "weight_scale_inv" in tensors else "weight_scale"
    zero = tensors.get("weight_zero_point")
    step, rounds, block = 0.0, scheme.rounds_inputs, scheme.block
    if scheme.stored and "input_scale" in tensors:
        step = only_number(tensors["input_scale"])
        if not 0 < step < float("inf"):
            raise ValueError(f"its input_scale is {step}")
    elif scheme.stored:
        rounds = None
    return EightBits(
        number, tensors["weight"], tensors[name], zero, block=block, rounds_inputs=rounds, input_scale=step
    )


def _nvfp4(tensors: Mapping[str, Stored]) -> PairsOfFloats:
    """nvfp4-pack-quantized: scales in e4m3, and one divisor for all."""
    divisor = only_number(tensors["weight_global_scale"])
    return PairsOfFloats(tensors["weight_packed"], tensors["weight_scale"], _NVFP4_GROUP, divisor=divisor)


class _BitsAndBytes(SlicedWeight):
    """4 bits of bitsandbytes. If blocks of numbers continue from one output to the next, parts are read dequantised, in
    the original type."""

    def __init__(self, tensors: Mapping[str, Stored]) -> None:
        self._stored = bitsandbytes.FourBits(tensors)
        self.shape = self._stored.shape

    def read(self, begin: int, end: int, first: int, last: int) -> QuantizedWeight | Tensor:
        """Outputs [begin, end), inputs [first, last)."""
        stored = self._stored
        if not stored.in_rows or first % 2 or last % 2:
            return stored.dense()[begin:end, first:last]
        codes, scale = stored.rows(begin, end)
        return QuantizedWeight(
            Number(stored.kind),
            codes[:, first // 2 : last // 2].contiguous(),
            last - first,
            scale[:, cover(first, last, stored.block)].contiguous(),
            columns=stored.block,
            first=(0, first % stored.block),
            stored_as=stored.dtype,
        )


class _Packed(SlicedWeight):
    """pack-quantized: numbers in words along the inputs, unsigned; zeros in words along the outputs."""

    def __init__(self, tensors: Mapping[str, Stored]) -> None:
        self._words, self._scale = tensors["weight_packed"], grid_of(tensors["weight_scale"])
        outputs, inputs = (int(each) for each in tensors["weight_shape"][:].tolist())
        self.shape = (outputs, inputs)
        width = two_sides(self._words)[1]
        bits = {-(-inputs * bits // _WORD): bits for bits in (8, 4)}.get(width)
        if bits is None:
            raise ValueError(f"{width} words hold {inputs} numbers of neither 4 nor 8 bits")
        self._bits = bits
        zero = tensors.get("weight_zero_point")
        self._zero = None if zero is None else _unpack(zero[:].T, bits).T[:outputs].contiguous()
        order = tensors.get("weight_g_idx")
        self._order = None if order is None else _order(order[:], inputs)
        groups = self._scale.shape[1]
        self._columns = inputs if groups == 1 else -(-inputs // groups)

    def read(self, begin: int, end: int, first: int, last: int) -> QuantizedWeight:
        """Outputs [begin, end), inputs [first, last)."""
        each = _WORD // self._bits
        words = self._words[begin:end, first // each : -(-last // each)]
        numbers = _unpack(words, self._bits)[:, first % each :][:, : last - first]
        rows = slice(begin, end) if len(self._scale) > 1 else slice(0, 1)
        return _by_column(
            numbers,
            self._bits,
            self._scale[rows],
            1 << (self._bits - 1) if self._zero is None else self._zero[begin:end],
            self._columns,
            first,
            None if self._order is None else self._order[first:last],
        )


class _Awq(SlicedWeight):
    """AWQ `gemm`: [inputs, outputs], eight outputs in a word, in an order of their own."""

    def __init__(self, tensors: Mapping[str, Stored], scheme: Scheme) -> None:
        self._words, self._zeros, self._scales = tensors["qweight"], tensors["qzeros"], tensors["scales"]
        inputs, words = two_sides(self._words)
        self.shape = (8 * words, inputs)
        self._columns = scheme.group if scheme.group > 0 else inputs
        groups = -(-inputs // self._columns)
        if two_sides(self._scales) != (groups, 8 * words) or two_sides(self._zeros) != (groups, words):
            raise ValueError("its scales or zeros do not fit its group_size")

    def read(self, begin: int, end: int, first: int, last: int) -> QuantizedWeight:
        """Outputs [begin, end), inputs [first, last)."""
        words, groups = slice(begin // 8, -(-end // 8)), cover(first, last, self._columns)
        part = slice(begin % 8, begin % 8 + end - begin)
        numbers = _unpack(self._words[first:last, words], 4, _AWQ_PLACES)[:, part].T
        zero = _unpack(self._zeros[groups, words], 4, _AWQ_PLACES)[:, part].T
        scale = self._scales[groups, begin:end].T
        return _grouped(numbers, 4, scale, zero, self._columns, first % self._columns)


class _Gptq(SlicedWeight):
    """GPTQ: [inputs, outputs], inputs in words; zeros with outputs in words, less by one in its first form."""

    def __init__(self, tensors: Mapping[str, Stored], scheme: Scheme) -> None:
        self._words, self._scales, self._bits = tensors["qweight"], tensors["scales"], scheme.bits
        each = _WORD // scheme.bits
        words, outputs = two_sides(self._words)
        inputs = each * words
        self.shape = (outputs, inputs)
        zeros = _unpack(tensors["qzeros"][:], scheme.bits)[:, :outputs]
        self._zeros = (zeros + 1 if scheme.plus_one else zeros) & ((1 << scheme.bits) - 1)
        self._columns = scheme.group if scheme.group > 0 else inputs
        groups = -(-inputs // self._columns)
        if two_sides(self._scales) != (groups, outputs) or tuple(self._zeros.shape) != (groups, outputs):
            raise ValueError("its scales or zeros do not fit its group_size")
        order = tensors.get("g_idx")
        self._order = None if order is None else _order(order[:], inputs)
        if self._order is not None and torch.equal(
            self._order, torch.arange(inputs, dtype=torch.int32) // self._columns
        ):
            self._order = None

    def read(self, begin: int, end: int, first: int, last: int) -> QuantizedWeight:
        """Outputs [begin, end), inputs [first, last)."""
        each = _WORD // self._bits
        words = self._words[first // each : -(-last // each), begin:end]
        numbers = _unpack(words.T, self._bits)[:, first % each :][:, : last - first]
        scale, zero = self._scales[:, begin:end].T, self._zeros[:, begin:end].T
        order = None if self._order is None else self._order[first:last]
        return _by_column(numbers, self._bits, scale, zero, self._columns, first, order)


def _by_column(
    numbers: Tensor, bits: int, scale: Tensor, zero: Tensor | int, columns: int, first: int, order: Tensor | None
) -> QuantizedWeight:
    """Of a weight that begins at input `first` of one that all scales and zeros are for."""
    if order is not None:
        return _grouped(numbers, bits, scale, zero, columns, 0, order)
    groups = cover(first, first + numbers.shape[1], columns)
    part = zero[:, groups] if isinstance(zero, Tensor) else zero
    return _grouped(numbers, bits, scale[:, groups], part, columns, first % columns)


def _grouped(
    numbers: Tensor, bits: int, scale: Tensor, zero: Tensor | int, columns: int, first: int, order: Tensor | None = None
) -> QuantizedWeight:
    """Of numbers uint8 [outputs, inputs], one a byte."""
    outputs, inputs = numbers.shape
    if bits == 4:
        even = torch.nn.functional.pad(numbers, (0, inputs % 2))
        codes = even[:, ::2] | (even[:, 1::2] << 4)
    else:
        codes = numbers.contiguous()
    return QuantizedWeight(
        Number.UINT4 if bits == 4 else Number.UINT8,
        codes,
        inputs,
        scale.contiguous(),
        zero.contiguous() if isinstance(zero, Tensor) else zero,
        rows=1 if len(scale) > 1 else outputs,
        columns=columns,
        first=(0, first),
        column_groups=order,
    )


def _unpack(words: Tensor, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """int32 [n, w] → uint8 [n, 32 / bits · w], from each word's lowest bits on; `places` is the order of the numbers in
    a word, if it is another."""
    shifts = torch.arange(0, _WORD, bits, dtype=torch.int32)
    numbers = (words.unsqueeze(2) >> shifts) & ((1 << bits) - 1)  # [n, w, 32 / bits]
    if places is not None:
        numbers = numbers[:, :, torch.tensor(places).argsort()]
    return numbers.to(torch.uint8).flatten(1)


def _order(groups: Tensor, inputs: int) -> Tensor:
    """int32 [inputs]: the group of each input."""
    if tuple(groups.shape) != (inputs,):
        raise ValueError(f"its g_idx has {groups.numel()} places for {inputs} inputs")
    return groups.to(torch.int32)
