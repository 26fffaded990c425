"""The element type of the KV cache: as configured, or as a checkpoint suggests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.checkpoints.checkpoint import CheckpointError
from common.hardware import E4M3_CAPABILITY, cuda_capability
from llm_service.model_config.stated_quantization import suggests_fp8_cache
from llm_service.settings import CacheDtype

AS_DTYPE = "float32", "bfloat16", "float16"
IN_8_BITS = "int8", "fp8", "fp8_e4m3"


def choose_cache(
    asked: str, config: Mapping[str, Any], *, dtype: str, device: str, attention: str
) -> tuple[CacheDtype, bool]:
    """The type for `--kv-cache-dtype` and config.json, and whether it is the checkpoint's suggestion. A suggestion is
    followed on GPUs that support e4m3 and have a kernel for it; on CPUs only torch attends to such caches. Raises
    CheckpointError if the type asked for is not supported."""
    if asked in IN_8_BITS:
        return CacheDtype(asked.removesuffix("_e4m3")), False
    if asked in AS_DTYPE and asked != dtype:
        raise CheckpointError(f"--kv-cache-dtype {asked} goes with --dtype {asked} alone, and this one is {dtype}")
    kind, _, index = device.partition(":")
    if asked != "auto" or kind != "cuda" or attention not in ("auto", "triton") or not suggests_fp8_cache(config):
        return CacheDtype.AUTO, False
    there = cuda_capability(int(index or 0)) >= E4M3_CAPABILITY
    return (CacheDtype.FP8, True) if there else (CacheDtype.AUTO, False)
