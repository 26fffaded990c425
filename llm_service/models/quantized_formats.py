"""Formats of quantised weights, and how a rank's part of one is read. Formulas are those of the libraries that write
them: transformers for fp8 in blocks, compressed-tensors, AutoAWQ (`gemm`), GPTQModel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from common.checkpoint import CheckpointError, TensorInfo
from common.weights import SliceReader
from llm_service.layers.linear import Stored
from llm_service.layers.quantized_weight import Number, QuantizedWeight
from llm_service.models.quantization_config import Scheme

_WORD = 32
_AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)
"""The outputs whose numbers are in an AWQ word, from its lowest bits on."""
_EIGHT_BITS = {"F8_E4M3": Number.E4M3, "I8": Number.INT8}


def is_quantised(parts: Mapping[str, TensorInfo]) -> bool:
    """Whether the tensors of a module that has a weight, by the last part of their names, are a quantised one."""
    return "qweight" in parts or "weight_packed" in parts or parts["weight"].dtype in _EIGHT_BITS


def quantised_weight(scheme: Scheme, module: str, parts: Mapping[str, TensorInfo], reader: SliceReader) -> Stored:
    """The weight that these tensors of a module are. Raises CheckpointError where one is missing or does not fit."""
    tensors = {part: reader[f"{module}.{part}"] for part in parts}
    try:
        if scheme.method == "awq":
            return _Awq(tensors, scheme)
        if scheme.method == "gptq":
            return _Gptq(tensors, scheme)
        if "weight_packed" not in parts:
            return _EightBits(tensors, scheme, _EIGHT_BITS[parts["weight"].dtype])
        return _Nvfp4(tensors) if parts["weight_packed"].dtype == "U8" else _Packed(tensors)
    except KeyError as error:
        raise CheckpointError(f"{module} is quantised and has no {error.args[0]}") from None
    except ValueError as error:
        raise CheckpointError(f"{module} is quantised in a way that is not served: {error}") from None


class _Sliced:
    """A quantised weight in a file. Indexing it by a slice of outputs, or by one of outputs and one of inputs, reads
    that part of it."""

    shape: tuple[int, int]

    def get_shape(self) -> list[int]:
        """[outputs, inputs]."""
        return list(self.shape)

    def __getitem__(self, index: Any) -> Any:
        rows, columns = index if isinstance(index, tuple) else (index, slice(None))
        begin, end, _ = rows.indices(self.shape[0])
        first, last, _ = columns.indices(self.shape[1])
        return self.read(begin, end, first, last)

    def read(self, begin: int, end: int, first: int, last: int) -> QuantizedWeight:
        """Outputs [begin, end), inputs [first, last)."""
        raise NotImplementedError


class _EightBits(_Sliced):
    """fp8 of transformers (`weight_scale_inv`), and the compressed-tensors formats of one number a byte."""

    def __init__(self, tensors: Mapping[str, Stored], scheme: Scheme, number: Number) -> None:
        self._weight = tensors["weight"]
        name = "weight_scale_inv" if scheme.method == "fp8" and "weight_scale_inv" in tensors else "weight_scale"
        self._scale = _grid(tensors[name])
        self._zero = _grid(tensors["weight_zero_point"], whole=True) if "weight_zero_point" in tensors else 0
        self._number, self._rounds_inputs = number, scheme.rounds_inputs and number is Number.E4M3
        self.shape = _two(self._weight)
        self._rows, self._columns = _group(self.shape, tuple(self._scale.shape), scheme.block)

    def read(self, begin: int, end: int, first: int, last: int) -> QuantizedWeight:
        """Outputs [begin, end), inputs [first, last)."""
        rows, columns = _cover(begin, end, self._rows), _cover(first, last, self._columns)
        return QuantizedWeight(
            self._number,
            self._weight[begin:end, first:last].contiguous().view(torch.uint8),
            last - first,
            self._scale[rows, columns].contiguous(),
            self._zero[rows, columns].contiguous() if isinstance(self._zero, Tensor) else self._zero,
            rows=self._rows,
            columns=self._columns,
            first=(begin % self._rows, first % self._columns),
            rounds_inputs=self._rounds_inputs,
        )


class _Packed(_Sliced):
    """pack-quantized: numbers in words along the inputs, unsigned; zeros in words along the outputs."""

    def __init__(self, tensors: Mapping[str, Stored]) -> None:
        self._words, self._scale = tensors["weight_packed"], _grid(tensors["weight_scale"])
        outputs, inputs = (int(each) for each in tensors["weight_shape"][:].tolist())
        self.shape = (outputs, inputs)
        width = _two(self._words)[1]
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


class _Nvfp4(_Sliced):
    """nvfp4-pack-quantized: two e2m1 in a byte, a scale in e4m3 for 16 of them, and one divisor for all."""

    _GROUP = 16

    def __init__(self, tensors: Mapping[str, Stored]) -> None:
        self._codes, self._scale = tensors["weight_packed"], tensors["weight_scale"]
        self._divisor = float(tensors["weight_global_scale"][:].float().reshape(()))
        outputs, half = _two(self._codes)
        self.shape = (outputs, 2 * half)
        if _two(self._scale) != (outputs, 2 * half // self._GROUP):
            raise ValueError(f"its scales are {_two(self._scale)}")

    def read(self, begin: int, end: int, first: int, last: int) -> QuantizedWeight:
        """Outputs [begin, end), inputs [first, last), of which the first is even."""
        if first % 2 or last % 2:
            raise ValueError("a rank's part begins or ends inside a byte")
        return QuantizedWeight(
            Number.E2M1,
            self._codes[begin:end, first // 2 : last // 2].contiguous(),
            last - first,
            self._scale[begin:end, _cover(first, last, self._GROUP)].contiguous(),
            columns=self._GROUP,
            first=(0, first % self._GROUP),
            divisor=self._divisor,
        )


class _Awq(_Sliced):
    """AWQ `gemm`: [inputs, outputs], eight outputs in a word, in an order of their own."""

    def __init__(self, tensors: Mapping[str, Stored], scheme: Scheme) -> None:
        self._words, self._zeros, self._scales = tensors["qweight"], tensors["qzeros"], tensors["scales"]
        inputs, words = _two(self._words)
        self.shape = (8 * words, inputs)
        self._columns = scheme.group if scheme.group > 0 else inputs
        groups = -(-inputs // self._columns)
        if _two(self._scales) != (groups, 8 * words) or _two(self._zeros) != (groups, words):
            raise ValueError("its scales or zeros do not fit its group_size")

    def read(self, begin: int, end: int, first: int, last: int) -> QuantizedWeight:
        """Outputs [begin, end), inputs [first, last)."""
        words, groups = slice(begin // 8, -(-end // 8)), _cover(first, last, self._columns)
        part = slice(begin % 8, begin % 8 + end - begin)
        numbers = _unpack(self._words[first:last, words], 4, _AWQ_PLACES)[:, part].T
        zero = _unpack(self._zeros[groups, words], 4, _AWQ_PLACES)[:, part].T
        scale = self._scales[groups, begin:end].T
        return _grouped(numbers, 4, scale, zero, self._columns, first % self._columns)


class _Gptq(_Sliced):
    """GPTQ: [inputs, outputs], inputs in words; zeros with outputs in words, less by one in its first form."""

    def __init__(self, tensors: Mapping[str, Stored], scheme: Scheme) -> None:
        self._words, self._scales, self._bits = tensors["qweight"], tensors["scales"], scheme.bits
        each = _WORD // scheme.bits
        words, outputs = _two(self._words)
        inputs = each * words
        self.shape = (outputs, inputs)
        zeros = _unpack(tensors["qzeros"][:], scheme.bits)[:, :outputs]
        self._zeros = (zeros + 1 if scheme.plus_one else zeros) & ((1 << scheme.bits) - 1)
        self._columns = scheme.group if scheme.group > 0 else inputs
        groups = -(-inputs // self._columns)
        if _two(self._scales) != (groups, outputs) or tuple(self._zeros.shape) != (groups, outputs):
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
    groups = _cover(first, first + numbers.shape[1], columns)
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
    """int32 [n, w] → uint8 [n, 32 / bits · w], from each word's lowest bits on; `places` says where a word's numbers
    stand, if not in that order."""
    shifts = torch.arange(0, _WORD, bits, dtype=torch.int32)
    numbers = (words.unsqueeze(2) >> shifts) & ((1 << bits) - 1)  # [n, w, 32 / bits]
    if places is not None:
        numbers = numbers[:, :, torch.tensor(places).argsort()]
    return numbers.to(torch.uint8).flatten(1)


def _cover(begin: int, end: int, size: int) -> slice:
    """The groups of `size` that [begin, end) touches."""
    return slice(begin // size, -(-end // size))


def _grid(stored: Stored, *, whole: bool = False) -> Tensor:
    """One number for all, for each output, or for each group, as [groups of outputs, groups of inputs]: a scale,
    or a whole number."""
    tensor: Tensor = stored[:] if stored.get_shape() else stored[...]
    if not whole and not tensor.is_floating_point():
        raise ValueError(f"its scales are {str(tensor.dtype).removeprefix('torch.')}")
    return tensor.reshape(-1, 1) if tensor.dim() < 2 else tensor


def _group(shape: tuple[int, int], grid: tuple[int, ...], block: tuple[int, int] | None) -> tuple[int, int]:
    """Outputs and inputs of a group, where `grid` scales are for a weight of this shape."""
    outputs, inputs = shape
    if block is not None and grid == (-(-outputs // block[0]), -(-inputs // block[1])):
        return block
    if grid == (1, 1):
        return outputs, inputs
    if grid[0] == outputs and inputs % grid[1] == 0:
        return 1, inputs // grid[1]
    raise ValueError(f"{grid} scales are for neither blocks nor outputs of {shape}")


def _order(groups: Tensor, inputs: int) -> Tensor:
    """int32 [inputs]: the group of each input."""
    if tuple(groups.shape) != (inputs,):
        raise ValueError(f"its g_idx has {groups.numel()} places for {inputs} inputs")
    return groups.to(torch.int32)


def _two(stored: Stored) -> tuple[int, int]:
    shape = stored.get_shape()
    if len(shape) != 2:
        raise ValueError(f"one of its tensors has {len(shape)} dimensions")
    return int(shape[0]), int(shape[1])
