"""What `quantization_config` says about weights, and which schemes are served."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.checkpoints import bitsandbytes
from common.checkpoints.checkpoint import CheckpointError
from common.telemetry import log
from llm_service.layers.linear.quantized_weight import Number
from llm_service.model_config.stated_quantization import cache_type_of, stated_quantization

_log = log.get("quantized")

_MODELOPT = frozenset(
    {"FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "FP8_PB_REAL", "FP8_BLOCK_SCALES", "MXFP8", "W8A16"}
    | {"W8A8_SQ_PER_CHANNEL", "NVFP4", "NVFP4_AWQ", "W4A16_NVFP4", "W4A8_NVFP4_FP8", "MXFP4", "W4A8_MXFP4_FP8"}
)
"""Model Optimizer's names of the formats served; the types of tensors say which of them a weight has."""
_OTHER_PRODUCTS = {
    "W4A16_AWQ": "its layers scale their inputs",
    "W4A8_AWQ": "its layers scale their inputs",
    "NVFP4_SVD": "its layers have a matrix of low rank besides",
}
_MIXED = "MIXED_PRECISION"
_PACKED = ("pack-quantized", "nvfp4-pack-quantized")
_COMPRESSED = ("float-quantized", "int-quantized", "naive-quantized", *_PACKED)


@dataclass(frozen=True, slots=True)
class Scheme:
    """The method of `quantization_config`, and what tensors do not say themselves. `block` are the outputs and inputs
    per scale, if scales are for blocks; `plus_one`: zeros are stored less one; `rounds_inputs`: weights of these
    numbers are meant for inputs of the same type, each rounded dynamically, or by one scale `stored` for all."""

    method: str
    block: tuple[int, int] | None = None
    bits: int = 0
    group: int = 0
    plus_one: bool = False
    rounds_inputs: Number | None = None
    stored: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Scheme | None:
        """Reads config.json; None if nothing is quantised. Raises CheckpointError for what is not served."""
        stated = _stated(config)
        if not stated:
            return None
        method = str(stated.get("quant_method", ""))
        match method:
            case "fp8":
                block = stated.get("weight_block_size")
                rounds = Number.E4M3 if stated.get("activation_scheme") == "dynamic" else None
                return cls(method, block=(int(block[0]), int(block[1])) if block else None, rounds_inputs=rounds)
            case "compressed-tensors":
                return cls._compressed(stated)
            case "awq":
                if str(stated.get("version", "gemm")).lower() != "gemm":
                    raise CheckpointError(f"AWQ weights in the layout {stated['version']} are not served: gemm is")
                return cls._packed(method, stated)
            case "gptq":
                return cls._packed(method, stated, plus_one=stated.get("checkpoint_format", "gptq") != "gptq_v2")
            case "modelopt":
                return cls._modelopt(stated)
            case bitsandbytes.METHOD:
                return cls(method)
            case _:
                raise CheckpointError(f"weights quantised by {method or 'an unnamed method'} are not served")

    @classmethod
    def _modelopt(cls, stated: Mapping[str, Any]) -> Scheme:
        layers = (stated.get("quantized_layers") or {}).values()
        found = [stated, *layers] if stated["quant_algo"].upper() != _MIXED else layers
        algorithms = {str(each.get("quant_algo")).upper() for each in found}
        for other in sorted(algorithms - _MODELOPT):
            why = f": {_OTHER_PRODUCTS[other]}" if other in _OTHER_PRODUCTS else ""
            raise CheckpointError(f"weights that Model Optimizer quantised as {other} are not served{why}")
        return cls("modelopt", rounds_inputs=Number.E4M3 if algorithms == {"FP8_PER_CHANNEL_PER_TOKEN"} else None)

    @classmethod
    def _packed(cls, method: str, stated: Mapping[str, Any], *, plus_one: bool = False) -> Scheme:
        bits = int(stated.get("bits", stated.get("w_bit", 0)))
        if bits not in ((4,) if method == "awq" else (4, 8)):
            raise CheckpointError(f"{method.upper()} weights of {bits} bits are not served")
        return cls(method, bits=bits, group=int(stated.get("group_size", 0)), plus_one=plus_one)

    @classmethod
    def _compressed(cls, stated: Mapping[str, Any]) -> Scheme:
        groups = list((stated.get("config_groups") or {}).values())
        formats = {str(group.get("format") or stated.get("format")) for group in groups}
        if not groups or not formats <= set(_COMPRESSED):
            raise CheckpointError(f"compressed-tensors in the format {', '.join(sorted(formats))} are not served")
        if (stated.get("sparsity_config") or {}).get("format", "dense") != "dense":
            raise CheckpointError("sparse compressed-tensors are not served")
        blocks = {tuple((group.get("weights") or {}).get("block_structure") or ()) for group in groups} - {()}
        if len(blocks) > 1:
            raise CheckpointError("compressed-tensors with blocks of several sizes are not served")
        block = next(iter(blocks), None)
        bytewise = [group for group in groups if str(group.get("format") or stated.get("format")) not in _PACKED]
        number, stored = _rounds_of(bytewise)
        return cls(
            "compressed-tensors",
            block=(int(block[0]), int(block[1])) if block else None,
            rounds_inputs=number,
            stored=stored,
        )


def _rounds_of(groups: Sequence[Mapping[str, Any]]) -> tuple[Number | None, bool]:
    """What all groups with one number per byte say about their inputs. Tensors do not tell the group of a weight, so if
    groups differ nothing is rounded, and the log says so."""
    rounds = {_rounds_inputs(group.get("input_activations") or {}) for group in groups}
    if len(rounds) > 1:
        _log.warning("groups of 8-bit weights say different things of their inputs: none are rounded")
    return rounds.pop() if len(rounds) == 1 else (None, False)


def _rounds_inputs(stated: Mapping[str, Any]) -> tuple[Number | None, bool]:
    """The type that inputs are rounded to, and whether by a stored scale. Integers are only served with one scale for
    each token or for all, and without zeros."""
    if stated.get("num_bits") == 8:
        match stated.get("type"), stated.get("dynamic", False):
            case "float", True:
                return Number.E4M3, False
            case "int", bool(dynamic) if stated.get("symmetric", True):
                strategy = "token" if dynamic else "tensor"
                if (stated.get("strategy") or strategy) == strategy:
                    return Number.INT8, not dynamic
    return None, False


def quantization_of(config: Mapping[str, Any]) -> str:
    """The `quant_method` of config.json; empty if no weight is quantised."""
    return str((_stated(config) or {}).get("quant_method", ""))


def _stated(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """None if no weight is quantised: Model Optimizer and compressed-tensors state a KV cache alone in the same
    place."""
    given = stated_quantization(config)
    if given.get("quant_method") == "compressed-tensors" and not given.get("config_groups") and cache_type_of(config):
        return None
    if not str(given.get("quant_method", "")).startswith("modelopt"):
        return given or None
    return {**given, "quant_method": "modelopt"} if given.get("quant_algo") else None
