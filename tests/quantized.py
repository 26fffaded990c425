"""Weights quantised as published checkpoints have them, each with what its library makes of it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from testkit import reference  # noqa: F401 - makes transformers importable beside a CPU torch

from compressed_tensors.compressors.base import BaseCompressor  # isort: skip
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8  # isort: skip
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme  # isort: skip
from compressed_tensors.quantization.lifecycle.forward import dequantize  # isort: skip
from compressed_tensors.quantization.utils import calculate_qparams  # isort: skip
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize  # isort: skip

Made = tuple[dict[str, Any], dict[str, Tensor], Tensor]
"""quantization_config, a module's tensors, and the weight that they are, float32 [outputs, inputs]."""

Format = Callable[[Tensor], Made]
"""Of a weight float32 [outputs, inputs]."""


def fp8(block: int) -> Format:
    """By transformers, in blocks."""
    config = {"quant_method": "fp8", "weight_block_size": [block, block]}
    stated = SimpleNamespace(quantization_config=SimpleNamespace(weight_block_size=(block, block), scale_fmt=None))

    def make(weight: Tensor) -> Made:
        made = Fp8Quantize(stated)._quantize_one("m.weight", weight)
        tensors = {name.removeprefix("m."): tensor for name, tensor in made.items()}
        scale = tensors["weight_scale_inv"]
        return config, tensors, Fp8Dequantize(stated)._dequantize_one(tensors["weight"], scale, torch.float32)

    return make


def ragged_fp8(weight: Tensor) -> Made:
    """Neither side is a multiple of a block, which transformers' own dequantisation refuses: here by the formula."""
    values = weight.to(torch.float8_e4m3fn)
    grid = [-(-side // 48) for side in weight.shape]
    scale = torch.rand(*grid) + 0.5
    spread = scale.repeat_interleave(48, 0).repeat_interleave(48, 1)[: weight.shape[0], : weight.shape[1]]
    config = {"quant_method": "fp8", "weight_block_size": [48, 48]}
    return config, {"weight": values, "weight_scale_inv": scale}, values.float() * spread


def compressed(form: str, **arguments: Any) -> Format:
    """By compressed-tensors."""

    def make(weight: Tensor) -> Made:
        given = QuantizationArgs(**arguments)
        scheme = QuantizationScheme(targets=["Linear"], weights=given, format=form)
        outputs, inputs = weight.shape
        parts = weight.reshape(outputs, -1, given.group_size or inputs)
        low, high = (parts.amin(2), parts.amax(2)) if given.strategy != "tensor" else (weight.amin(), weight.amax())
        tensors: dict[str, Tensor] = {"weight": weight}
        over_all = None
        if given.strategy == "tensor_group":
            over_all = tensors["weight_global_scale"] = torch.tensor([448.0 * 6.0]) / weight.abs().max()
        scale, zero = calculate_qparams(low, high, given, global_scale=over_all)
        tensors |= {"weight_scale": scale, "weight_zero_point": zero}
        compressor = BaseCompressor.get_value_from_registry(form)
        packed = compressor.compress(tensors, scheme)
        if over_all is None:
            wide = compressor.decompress({name: each.clone() for name, each in packed.items()}, scheme)["weight"]
        else:  # in float32, not in the 16 bits that the compressor settles for
            numbers = unpack_fp4_from_uint8(packed["weight_packed"], outputs, inputs, dtype=torch.float32)
            exact = packed["weight_scale"].float()
            wide = dequantize(numbers, exact, args=given, global_scale=over_all, dtype=torch.float32)
        config = {
            "quant_method": "compressed-tensors",
            "format": form,
            "config_groups": {"group_0": {"weights": {"num_bits": given.num_bits}}},
        }
        return config, packed, wide.float()

    return make


def pack(numbers: Tensor, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """[n, k] → int32 [n, k · bits / 32], a place of a word at a time."""
    each = 32 // bits
    words = torch.zeros(numbers.shape[0], numbers.shape[1] // each, dtype=torch.int64)
    for place in range(each):
        source = places[place] if places else place
        words |= numbers[:, source::each].long() << (bits * place)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _rounded(weight: Tensor, group: Tensor, bits: int, *, least: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Numbers [inputs, outputs], zeros and scales [groups, outputs], and the weight that they are; `group` [inputs]."""
    turned, count, most = weight.T, int(group.max()) + 1, (1 << bits) - 1
    parts = [turned[group == each] for each in range(count)]
    low, high = torch.stack([part.amin(0) for part in parts]), torch.stack([part.amax(0) for part in parts])
    scales = ((high - low) / most).clamp(min=1e-4).half()
    zeros = (-low / scales.float()).round().clamp(least, most).int()
    numbers = (turned / scales.float()[group] + zeros[group]).round().clamp(0, most).int()
    return numbers, zeros, scales, ((numbers - zeros[group]).float() * scales.float()[group]).T


def awq(weight: Tensor, group: int = 16) -> Made:
    """By AutoAWQ's formula, `gemm`."""
    places = (0, 2, 4, 6, 1, 3, 5, 7)
    numbers, zeros, scales, wide = _rounded(weight, torch.arange(weight.shape[1]) // group, 4, least=0)
    tensors = {"qweight": pack(numbers, 4, places), "qzeros": pack(zeros, 4, places), "scales": scales}
    return {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"}, tensors, wide


def gptq(bits: int = 4, *, ordered: bool = False, second: bool = False, group: int = 16) -> Format:
    """By GPTQModel's formula: `ordered` by importance, `second` form of zeros."""

    def make(weight: Tensor) -> Made:
        groups = torch.arange(weight.shape[1]) // group
        if ordered:
            groups = groups[torch.randperm(len(groups))]
        numbers, zeros, scales, wide = _rounded(weight, groups, bits, least=0 if second else 1)
        tensors = {
            "qweight": pack(numbers.T, bits).T.contiguous(),
            "qzeros": pack(zeros if second else zeros - 1, bits),
            "scales": scales,
            "g_idx": groups.int(),
        }
        config: dict[str, Any] = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": ordered}
        return config | ({"checkpoint_format": "gptq_v2"} if second else {}), tensors, wide

    return make


def by_bitsandbytes(kind: str, *, nested: bool = False, stored_as: torch.dtype = torch.bfloat16) -> Format:
    """By bitsandbytes: "nf4" or "fp4", with `nested` with scales in 8 bits, of a weight in `stored_as`."""
    from bitsandbytes import functional

    def make(weight: Tensor) -> Made:
        codes, state = functional.quantize_4bit(weight.to(stored_as), quant_type=kind, compress_statistics=nested)
        tensors = {"weight": codes, **{f"weight.{part}": each for part, each in state.as_dict(packed=True).items()}}
        with rows_of_blocks(state):
            wide = functional.dequantize_4bit(codes, state).float().view(weight.shape)
        return {"quant_method": "bitsandbytes", "load_in_4bit": True}, tensors, wide

    return make


@contextmanager
def rows_of_blocks(state: Any) -> Iterator[None]:
    """Has bitsandbytes take a weight for one whose rows are a block each: on a CPU it takes the scales of other blocks
    for some weights whose rows are not whole ones (0.50.2)."""
    shape = state.shape
    if shape.numel() % state.blocksize == 0:
        state.shape = torch.Size((shape.numel() // state.blocksize, state.blocksize))
    yield
    state.shape = shape


def by_bitsandbytes_in_8_bits(weight: Tensor) -> Made:
    """By bitsandbytes, as LLM.int8() has weights."""
    from bitsandbytes import functional

    codes, scales, _ = functional.int8_vectorwise_quant(weight.half())
    tensors = {"weight": codes, "SCB": scales, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    return config, tensors, functional.int8_vectorwise_dequant(codes, scales)


def modelopt(algorithm: str) -> Format:
    """As NVIDIA's Model Optimizer writes them, by the formats' definitions: e4m3 and int8 by a float, e2m1 by an e4m3
    for 16 of them and a float for all, and both by a power of two for 32 of them, which e8m0 has."""

    def make(weight: Tensor) -> Made:
        tensors, wide = _MODELOPT[algorithm](weight)
        config = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head", "model.visual*"]}
        return config | {"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}}, tensors, wide

    return make


def _one_scale(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scale = weight.abs().max() / 448
    numbers = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale": scale, "input_scale": torch.tensor(0.07)}, numbers.float() * scale


def _each_output(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scale = weight.abs().amax(1) / 448
    numbers = (weight / scale[:, None]).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale": scale}, numbers.float() * scale[:, None]


def _whole_numbers(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scale = weight.abs().amax(1) / 127
    numbers = (weight / scale[:, None]).round().to(torch.int8)
    return {"weight": numbers, "weight_scale": scale}, numbers.float() * scale[:, None]


def _blocks_of_128(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    rows, columns = (-(-side // 128) for side in weight.shape)
    scale = torch.zeros(rows, 1, columns, 1)
    wide, numbers = torch.zeros_like(weight), weight.to(torch.float8_e4m3fn)
    for row in range(rows):
        for column in range(columns):
            place = slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128)
            scale[row, 0, column, 0] = each = weight[place].abs().max() / 448
            numbers[place] = (weight[place] / each).to(torch.float8_e4m3fn)
            wide[place] = numbers[place].float() * each
    return {"weight": numbers, "weight_scale": scale}, wide


def _fours(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes of two e2m1, the first in the lower half, and their numbers: the nearest to weight / scale, which is of
    each number."""
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    code = ((weight / scale).abs()[..., None] - magnitudes).abs().argmin(-1)
    sign = torch.where(weight < 0, -1.0, 1.0)
    bits = (code + 8 * (weight < 0)).to(torch.uint8)
    return bits[:, ::2] | bits[:, 1::2] << 4, magnitudes[code] * sign


def _nv_fours(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    whole = weight.abs().max() / (6 * 448)
    most = weight.unflatten(1, (-1, 16)).abs().amax(2)
    scale = (most / (6 * whole)).clamp(min=2**-9).to(torch.float8_e4m3fn)
    each = (scale.float() * whole).repeat_interleave(16, 1)
    packed, numbers = _fours(weight, each)
    tensors = {"weight": packed, "weight_scale": scale, "weight_scale_2": whole, "input_scale": torch.tensor([0.07])}
    return tensors, numbers * each


def _powers(weight: Tensor, most: float) -> tuple[Tensor, Tensor]:
    """e8m0 of each 32 inputs, and what they are of each number."""
    exponent = (weight.unflatten(1, (-1, 32)).abs().amax(2) / most).log2().ceil().clamp(min=-127)
    return (exponent + 127).to(torch.uint8), exponent.exp2().repeat_interleave(32, 1)


def _mx_eights(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    powers, each = _powers(weight, 448)
    numbers = (weight / each).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale": powers}, numbers.float() * each


def _mx_fours(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    powers, each = _powers(weight, 6)
    packed, numbers = _fours(weight, each)
    return {"weight": packed, "weight_scale": powers}, numbers * each


def modelopt_mixed(weight: Tensor) -> Made:
    """Of several formats, by a weight's shape: what makes more of its inputs is in 4 bits."""
    algorithm = "W4A16_NVFP4" if len(weight) > weight.shape[1] else "FP8"
    _, tensors, wide = modelopt(algorithm)(weight)
    layers = {"mlp": {"quant_algo": "W4A16_NVFP4", "group_size": 16}, "self_attn": {"quant_algo": "FP8"}}
    stated = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "ignore": ["lm_head"]}
    return {"quant_method": "modelopt", **stated}, tensors, wide


_MODELOPT: dict[str, Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]] = {
    "FP8": _one_scale,
    "FP8_PER_CHANNEL_PER_TOKEN": _each_output,
    "FP8_PB_WO": _blocks_of_128,
    "NVFP4": _nv_fours,
    "W4A16_NVFP4": _nv_fours,
    "MXFP8": _mx_eights,
    "W4A8_MXFP4_FP8": _mx_fours,
    "W8A16": _whole_numbers,
}

BYTE = {"type": "int", "num_bits": 8, "strategy": "channel"}
GROUPS = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 16}
FLOAT = {"type": "float", "num_bits": 8, "symmetric": True}
FORMATS: dict[str, Format] = {
    "fp8 in blocks": fp8(16),
    "fp8 in ragged blocks": ragged_fp8,
    "float-quantized, a scale an output": compressed("float-quantized", **FLOAT, strategy="channel"),
    "float-quantized, one scale": compressed("float-quantized", **FLOAT, strategy="tensor"),
    "int-quantized": compressed("int-quantized", **BYTE, symmetric=True),
    "int-quantized, with zeros": compressed("int-quantized", **BYTE, symmetric=False),
    "pack-quantized": compressed("pack-quantized", **GROUPS, symmetric=True),
    "pack-quantized, with zeros": compressed("pack-quantized", **GROUPS, symmetric=False),
    "pack-quantized, a scale an output": compressed(
        "pack-quantized", type="int", num_bits=4, strategy="channel", symmetric=True
    ),
    "pack-quantized, 8 bits": compressed("pack-quantized", **GROUPS | {"num_bits": 8}, symmetric=False),
    "nvfp4": compressed(
        "nvfp4-pack-quantized",
        **FLOAT | {"num_bits": 4},
        strategy="tensor_group",
        group_size=16,
        scale_dtype=torch.float8_e4m3fn,
        zp_dtype=torch.float8_e4m3fn,
    ),
    "awq": awq,
    "gptq": gptq(),
    "gptq in order of importance": gptq(ordered=True),
    "gptq of 8 bits": gptq(8),
    "gptq, second form": gptq(second=True),
    **{f"modelopt {name}": modelopt(name) for name in _MODELOPT if name != "W4A16_NVFP4"},
    "modelopt mixed": modelopt_mixed,
}

_LINEAR = re.compile(
    r"layers\.\d+\.(attention(\.indexer)?\.(wq|wo|wk|wq_b|wkv_a_with_mqa|wkv_b)|(shared_experts|experts\.\d+)\.w[123])\.weight"
    r"|.*(layers|transformer\.blocks)\.\d+\.(self_attn(\.indexer)?|mlp(\.shared_experts?|\.experts\.\d+)?|feed_forward|linear_attn)\.(\w+_proj(_with_mqa)?|wq_b|wk|linear_gate|(attn|ff)_out|in_proj_qkv|in_proj_z)\.weight"
)
"""Matrices of the text layers, but for routers, and what decides how a gated delta net forgets."""
_EXPERTS = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")


def quantize_checkpoint(
    source: Path, made: Format, root: Path, prefix: str = "", *, experts_too: bool = True
) -> tuple[Path, Path]:
    """Two checkpoints: one whose text layers are quantised, experts one by one, unless only what is dense is to be; one
    with the weights that they are. Names of these layers' tensors begin with `prefix`."""
    torch.manual_seed(11)
    quantized, wide = root / "quantized", root / "wide"
    config: dict[str, Any] = {}
    files: dict[Path, dict[str, Tensor]] = {quantized: {}, wide: {}}
    for folder in files:
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("model*.safetensors*"))
    for file in sorted(source.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            if experts_too and (experts := _EXPERTS.fullmatch(name)):
                rebuilt = []
                for number, expert in enumerate(tensor):  # [out, in]
                    kinds = ("gate_proj", "up_proj") if experts[2] == "gate_up_proj" else ("down_proj",)
                    alone = []
                    for kind, matrix in zip(kinds, expert.chunk(len(kinds)), strict=True):
                        config, tensors, dequantized = made(matrix)
                        alone.append(dequantized)
                        path = f"{experts[1]}.{number}.{kind}"
                        files[quantized] |= {f"{path}.{part}": each for part, each in tensors.items()}
                    rebuilt.append(torch.cat(alone))
                files[wide][name] = torch.stack(rebuilt)
            elif _LINEAR.fullmatch(name) and name.startswith(prefix) and (experts_too or ".experts." not in name):
                config, tensors, files[wide][name] = made(tensor)
                files[quantized] |= {f"{name.removesuffix('weight')}{kind}": each for kind, each in tensors.items()}
            else:
                files[quantized][name] = files[wide][name] = tensor
    for folder, content in files.items():
        tensors = {name: each.contiguous() for name, each in content.items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    path = quantized / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    return quantized, wide
