"""Scales of keys and values that a checkpoint states for a KV cache of e4m3, under each of the names that its makers
give them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from common.checkpoints.tensors import SliceReader
from common.telemetry import log
from llm_service.layers.self_attention.layer import SelfAttention
from llm_service.model_config.stated_quantization import cache_type_of, suggests_fp8_cache
from llm_service.models.decoder import Decoder

_log = log.get("cache_scales")

_SCALE = re.compile(
    r"(?P<module>.+?)\.(?:"
    r"(?:attn\.)?(?P<own>kv?|v)_scale"  # compressed-tensors; an older one of both
    r"|(?:[kv]|qkv|qkqkv)_proj\.(?P<beside>[kv])_scale"  # Model Optimizer
    r"|(?P<output>[kv])_proj\.output_scale"  # Quark, AutoFP8
    r")"
)
_BIAS = re.compile(r".*\.(?:k_proj\.k_bias|v_proj\.v_bias)")
_OF_CACHE = re.compile(
    r"(?:.*\.)?(?:kv_scale|[qkv]_scale|prob_output_scale|[qkv]_proj\.output_scale|k_proj\.k_bias|v_proj\.v_bias)"
)
_LAYER = re.compile(r"layers\.(\d+)\.")


def is_of_cache(name: str) -> bool:
    """Whether a tensor belongs to a KV cache in 8 or 4 bits, rather than to a weight."""
    return _OF_CACHE.fullmatch(name) is not None


def read_cache_scales(checkpoint: Checkpoint, own_name: Callable[[str], str | None], decoder: Decoder) -> None:
    """Has each layer of a loaded decoder scale e4m3 keys and values by the checkpoint's factors; `own_name` returns the
    decoder's name of a weight. Factors for other kinds of cache are ignored. Raises CheckpointError for an invalid
    factor."""
    stated = cache_type_of(checkpoint.config)
    if stated and not suggests_fp8_cache(checkpoint.config):
        return
    layers = dict(_stated_scales(checkpoint, own_name))
    if not layers:
        return
    if biases := [name for name in checkpoint.tensors if _BIAS.fullmatch(name)]:
        raise CheckpointError(f"keys and values of e4m3 with biases are not served, such as {biases[0]}")
    mixers = {number: getattr(layer, "mixer", None) for number, layer in enumerate(decoder.layers)}
    found = [(number, mixer) for number, mixer in mixers.items() if isinstance(mixer, SelfAttention) and mixer.new_keys]
    with SliceReader(checkpoint) as reader:
        for number, mixer in found:
            if (names := layers.get(number)) is None:
                continue
            pair = [_read(reader, names.get(kind, ""), mixer.all_kv_heads) for kind in "kv"]
            mixer.kv_scales = torch.stack([each[mixer.kv_partition] for each in pair]).to(decoder.device)
    scaled = sum(mixer.kv_scales is not None for _, mixer in found)
    _log.info("keys and values of e4m3 have the checkpoint's scales", layers=scaled, others=len(found) - scaled)


def _stated_scales(
    checkpoint: Checkpoint, own_name: Callable[[str], str | None]
) -> Iterator[tuple[int, Mapping[str, str]]]:
    """The number of each of the decoder's layers that has scales, and their names, by `k` and `v`. A scale belongs to
    the layer of its module's weights, since the decoder has no name for it if transformers renames those."""
    scales: dict[str, dict[str, str]] = {}
    weights: dict[str, list[str]] = {}
    for name in checkpoint.tensors:
        if (found := _SCALE.fullmatch(name)) is not None:
            kinds = found["own"] or found["beside"] or found["output"]
            scales.setdefault(found["module"], {}).update(dict.fromkeys(kinds, name))
        else:
            linear = name.rpartition(".")[0]
            weights.setdefault(linear.rpartition(".")[0], []).append(f"{linear}.weight")
    for module, stated in scales.items():
        owns = (own_name(weight) for weight in weights.get(module, []))
        own = next((own for own in owns if own is not None), "")
        if (layer := _LAYER.match(own)) is not None:
            yield int(layer[1]), stated


def _read(reader: SliceReader, name: str, heads: int) -> Tensor:
    """The factors of the KV heads, float32 [heads]; 1 if none is stated."""
    if not name:
        return torch.ones(heads)
    stored = reader[name]
    scale: Tensor = (stored[:] if stored.get_shape() else stored[...]).flatten().float()
    if len(scale) not in (1, heads):
        raise CheckpointError(f"{name} is neither one scale nor one for each of {heads} heads")
    if not bool((scale.isfinite() & (scale > 0)).all()):
        raise CheckpointError(f"{name} has a scale that is no positive number")
    return scale.expand(heads)
