"""What config.json states about a quantised checkpoint, and the KV cache it suggests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def stated_quantization(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """`quantization_config`, empty if there is none. Settings that hf_quant_config.json, and some config.json, keep in
    a section are merged into it."""
    text = config.get("text_config") or {}
    given: Mapping[str, Any] = config.get("quantization_config") or text.get("quantization_config") or {}
    return {"quant_method": "modelopt", **given, **given["quantization"]} if "quantization" in given else given


def cache_type_of(config: Mapping[str, Any]) -> str:
    """The type of KV cache that a quantised checkpoint suggests; empty if none."""
    scheme = _cache_scheme(config)
    return f"{scheme.get('type')}{scheme.get('num_bits')}" if isinstance(scheme, Mapping) else str(scheme)


def suggests_fp8_cache(config: Mapping[str, Any]) -> bool:
    """Whether that is e4m3, with scales that the checkpoint has: Model Optimizer calls it `FP8`, AutoFP8 `static`, and
    compressed-tensors, like newer releases of the former, say how many bits of what it has.

    >>> stated = {"num_bits": 8, "type": "float", "strategy": "attn_head", "dynamic": False, "symmetric": True}
    >>> suggests_fp8_cache({"quantization_config": {"kv_cache_scheme": stated}})
    True
    >>> suggests_fp8_cache({"quantization_config": {"kv_cache_scheme": stated | {"dynamic": True}}})
    False
    """
    scheme = _cache_scheme(config)
    if not isinstance(scheme, Mapping):
        return str(scheme).lower() in ("fp8", "static")
    whole = not scheme.get("dynamic") and scheme.get("symmetric", True)
    known = (scheme.get("strategy") or "tensor") in ("tensor", "attn_head")
    return bool(whole and known and scheme.get("type") == "float" and scheme.get("num_bits") == 8)


def _cache_scheme(config: Mapping[str, Any]) -> Mapping[str, Any] | str:
    stated = stated_quantization(config)
    return stated.get("kv_cache_quant_algo") or stated.get("kv_cache_scheme") or ""
