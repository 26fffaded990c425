"""A configuration's settings of experts, by whichever names it uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.checkpoints.checkpoint import CheckpointError
from llm_service.families.family import EXPERTS_ALONE


@dataclass(frozen=True, slots=True)
class GroupedExperts:
    """Experts are in `groups`, and a token's experts come from the `kept` groups that it scores highest; their weights,
    which sum to 1, are multiplied by `scale`. With `probabilities`, an expert's score is its probability among all."""

    groups: int
    kept: int
    scale: float
    probabilities: bool = False


def first_of(text: Mapping[str, Any], *names: str) -> Any:
    """The first of these settings that is stated and not 0; None if there is none."""
    return next((text[name] for name in names if text.get(name)), None)


def experts_of(text: Mapping[str, Any]) -> int:
    """How many a layer has."""
    found = first_of(text, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return int(found or 0) if text.get("enable_moe_block", True) else 0


def dense_size(text: Mapping[str, Any]) -> int:
    """The inner size of feed-forward parts without experts, of a text that has experts."""
    return int(first_of(text, "intermediate_size_mlp", "dense_intermediate_size", "intermediate_size") or 0)


def expert_size(text: Mapping[str, Any]) -> int:
    """The inner size of an expert."""
    return expert_sizes(text)[0]


def expert_sizes(text: Mapping[str, Any]) -> tuple[int, int]:
    """The inner size of experts, and of media experts, which some configurations state in second place."""
    found = first_of(text, "moe_intermediate_size", "intermediate_size") or 0
    first, *others = found if isinstance(found, list | tuple) else (found,)
    return int(first), int(others[0]) if others else 0


def shared_size(text: Mapping[str, Any]) -> int:
    """The inner size of the shared experts together."""
    count = first_of(text, "n_shared_experts", "moe_num_shared_experts") or 0
    names = "shared_expert_intermediate_size", "share_expert_dim", "shared_intermediate_size"
    stated = first_of(text, *names, "moe_shared_expert_intermediate_size")
    each = first_of(text, "shared_experts_intermediate_size") or (expert_size(text) if count else 0)
    return int(stated or count * each)


def dense_layers(text: Mapping[str, Any], apart: Sequence[str]) -> frozenset[int]:
    """The layers without experts, of a text with experts; `apart` are the types of layers with a single part."""
    if apart:
        return frozenset(layer for layer, kind in enumerate(apart) if kind != EXPERTS_ALONE)
    if kinds := text.get("mlp_layer_types"):
        return frozenset(layer for layer, kind in enumerate(kinds) if kind == "dense")
    if (sparse := text.get("moe_layers")) is not None:
        return frozenset(range(int(text["num_hidden_layers"]))).difference(sparse)
    return frozenset(text.get("mlp_only_layers") or range(text.get("first_k_dense_replace", 0)))


def expert_scale(text: Mapping[str, Any]) -> float:
    """The factor of experts' probabilities. Raises CheckpointError if experts are chosen within groups."""
    if (method := text.get("topk_method", "greedy")) != "greedy":
        raise CheckpointError(f"experts that are chosen as {method} says are not supported")
    return float(text.get("routed_scaling_factor", 1.0))


def grouped_experts(text: Mapping[str, Any], *, probabilities: bool) -> GroupedExperts:
    """The groups of experts; a single group if none are stated."""
    scale = first_of(text, "routed_scaling_factor", "moe_router_scaling_factor") or 1.0
    groups, kept = int(text.get("n_group") or 1), int(text.get("topk_group") or 1)
    return GroupedExperts(groups, kept, float(scale), probabilities)
