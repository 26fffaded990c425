"""Small models of a configuration, with random weights: for trials, and for tests' checkpoints."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from common.hf.classes import class_of, complete, layers_of_levels, without

_SMALL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "intermediate_size_mlp": 80,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 32,
    "hidden_size_per_layer_input": 16,
    "index_kpool": 4,
    "index_topk_blocks": 2,
    "linear_num_heads": 4,
}
_HEADS, _EXPERTS, _WINDOW, _MOST_LAYERS = 4, 4, 8, 8
_KINDS = "layer_types", "indexer_types", "kv_sharing_modes", "no_rope_layers"
"""Per-layer settings that determine a layer's kind."""
_OF_HEADS = "num_attention_heads", "num_key_value_heads"
_REACH = re.compile(r"window|chunk|topk|top_k|block_size|floor_scale")
"""Settings that limit which tokens are seen, or scale what is further away."""
_CAP, _LOW = "softcapping", 1.0
"""Settings that cap scores or logits, and a cap that random weights reach: their scores are about 1."""


def shrink_whole(config: Any, ranks: int = 1) -> None:
    """`shrink` for the text of a model. Layers that levels of rows are for are kept, if there are not too many, and
    become adjacent."""
    layers = sorted(set(layers_of_levels(config)))
    text = config.get_text_config(decoder=True)
    shrink(text, ranks, min(len(layers), _MOST_LAYERS))
    if layers:
        left = {layer: at % text.num_hidden_layers for at, layer in enumerate(layers)}
        config.deepstack_layer_map = [(depth, left[layer]) for depth, layer in config.deepstack_layer_map]
        config.spatial_target_layers = [left[layer] for layer in config.spatial_target_layers]


def shrink(config: Any, ranks: int = 1, layers: int = 2) -> None:
    """Makes a text configuration small enough for an instant model, keeping what distinguishes it: its kinds of layers,
    `layers` of them if there are as many, the shape and sharing of heads, and its window, shortened. Heads can still be
    split over so many ranks."""
    apart = _layers_apart(config)
    heads = config.num_attention_heads
    divided = getattr(config, "head_dim", None) is None  # heads are as wide as they divide the whole
    if divided:
        config.head_dim = config.hidden_size // heads
    pairs = [getattr(config, "num_key_value_heads", None) or heads]
    pairs += [own["num_key_value_heads"] for own in apart.values() if own.get("num_key_value_heads")]
    fewer = min(heads, max(_HEADS, *(ranks * heads // kv for kv in pairs))) if ranks > 1 else min(heads, _HEADS)
    config.num_attention_heads = fewer
    if getattr(config, "num_key_value_heads", None):
        config.num_key_value_heads = max(1, fewer * config.num_key_value_heads // heads)
        if getattr(config, "index_topk_blocks", None):  # chosen by a head of its own for each head of keys
            config.index_n_heads = config.num_key_value_heads
    left = _fewer_layers(config, layers)
    for name, most in _SMALL.items():
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, min(getattr(config, name), most))
    if divided:
        config.hidden_size = fewer * config.head_dim
    _fewer_experts(config)
    for name, value in list(vars(config).items()):  # settings that a short prompt would not show
        if _REACH.search(name) and type(value) is int and value > _WINDOW:
            setattr(config, name, _WINDOW)
        if _CAP in name and isinstance(value, int | float) and value > _LOW:
            setattr(config, name, _LOW)
    for own in apart.values():
        for name in _OF_HEADS:
            if own.get(name):
                own[name] = max(1, fewer * own[name] // heads)
    if apart:
        config.per_layer_config = {left.index(layer): own for layer, own in apart.items() if layer in left}


def _fewer_experts(config: Any) -> None:
    """Leaves two of each group at least, and of layers that have none the first."""
    most = max(_EXPERTS, 2 * (getattr(config, "n_group", None) or 1))
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, min(getattr(config, name), most))
    for name in ("num_experts_per_tok", "top_k_experts"):
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, min(getattr(config, name), 2))
    if getattr(config, "first_k_dense_replace", None):
        config.first_k_dense_replace = 1


def _fewer_layers(config: Any, least: int) -> list[int]:
    """Keeps as many layers as there are kinds, or `least`, and of those that share another's keys and values likewise;
    returns the original numbers."""
    layers = config.num_hidden_layers
    apart = [own for name in _KINDS if (own := getattr(config, name, None)) and len(own) == layers]
    kinds = list(zip(*apart, strict=True))
    shared = getattr(config, "num_kv_shared_layers", None) or 0
    kept = max([2, least, *(kinds.index(kind) + 1 for kind in set(kinds))])
    kept = min(kept, _MOST_LAYERS, layers - shared)
    beyond = sorted(at for at in map(kinds.index, set(kinds)) if kept <= at < layers - shared)
    left = [*range(kept), *beyond, *range(layers - shared, layers - shared + min(shared, kept))]
    config.num_hidden_layers = len(left)
    if shared:
        config.num_kv_shared_layers = len(left) - kept - len(beyond)
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == layers:
            setattr(config, name, [value[layer] for layer in left])
    if sources := getattr(config, _SOURCES, None):
        setattr(config, _SOURCES, [left.index(source) if source in left else at for at, source in enumerate(sources)])
    return left


_SOURCES = "kv_source_layers"
"""The layers whose latents others share."""


def _layers_apart(config: Any) -> dict[int, dict[str, Any]]:
    """Removes settings of single layers from a configuration: as long as they are there, their names cannot be read
    from it."""
    if not config.is_heterogeneous:
        return {}
    found = {int(layer): dict(own) for layer, own in config.to_dict()["per_layer_config"].items()}
    config.per_layer_config = None
    return found


_LARGEST = 4.0


def made_up(config: Any, strip: Callable[[Any], None], seed: int = 0) -> Any:
    """A model of a configuration without the parts that `strip` removes, with random weights: matrices from N(0, 1 /
    fan-in), tables from N(0, 1), and vectors close to transformers' initial values."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        part = without(class_of(config), strip).from_pretrained(None, config=config, state_dict={}, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    tables = {id(each.weight) for each in part.modules() if isinstance(each, nn.Embedding)}
    with torch.no_grad():
        for parameter in part.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:  # transformers leaves some as memory had them
                parameter.nan_to_num_(0.0, 0.0, 0.0).clamp_(-_LARGEST, _LARGEST).add_(0.1 * noise)
            else:
                parameter.copy_(noise if id(parameter) in tables else noise / parameter.shape[-1] ** 0.5)
        redraw_corrections(part, generator)
    return complete(part).eval().requires_grad_(requires_grad=False)


def redraw_corrections(model: nn.Module, generator: torch.Generator) -> None:
    """Draws buffers that transformers initialises to zeros or ones: corrections of routers' scores, factors of layers,
    frequencies, and constants of activations."""
    for name, correction in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            correction.copy_(0.3 * torch.randn(correction.shape, generator=generator))
        if name.endswith("rotary_emb.alpha"):
            correction.copy_(0.1 * torch.randn(correction.shape, generator=generator))
        if name.endswith("layer_scalar"):
            correction.copy_(1 + 0.2 * torch.randn(correction.shape, generator=generator))
    for part in model.modules():  # transformers leaves these as memory had them
        for name, number in part.named_buffers(recurse=False):
            if (stated := getattr(part, f"_{name}_scalar", None)) is not None:
                number.fill_(stated)
