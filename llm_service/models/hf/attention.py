"""Our attention in transformers' layers: the function that transformers calls, the settings that it passes for a layer,
and which of these our back ends support."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from common.checkpoints.checkpoint import CheckpointError
from llm_service.families.sight import Sight
from llm_service.layers.attention.backend import CAUSAL, AttentionKind
from llm_service.layers.attention.general_backend import AttentionRule
from llm_service.layers.cache_spec import CacheSpec
from llm_service.layers.mixer import StateBackend
from llm_service.layers.sparse_attention.index import Chosen
from llm_service.models.hf.index import NO_MASK
from llm_service.models.hf.latents import absorbed, rank_of, values_of
from llm_service.models.hf.states import HfStates
from llm_service.models.hf.step import this_step
from llm_service.models.layer_rules import answer_window_of, chunk_of

NAME = "twinlens"
"""Our attention's among transformers'."""

_WITHOUT_MEANING = frozenset({"dropout", "position_ids", "use_cache"})
"""Arguments that transformers' layers pass to attention and that do not matter here."""


def attend_as_ours(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | tuple[Chosen, ...] | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    indices: tuple[Chosen, ...] | None = None,
    block_indices: tuple[Chosen, ...] | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Called by transformers: query [1, heads, n, width], key and value [1, kv_heads, n, …] → [1, n, heads, depth]."""
    if isinstance(attention_mask, tuple):  # of layers that make one of what was chosen
        attention_mask, indices = None, attention_mask
    indices = block_indices if indices is None else indices
    if attention_mask is not None and attention_mask is not NO_MASK:
        raise CheckpointError(f"{type(module).__name__} has a mask of its own")
    if unknown := [name for name, value in more.items() if value is not None and name not in _WITHOUT_MEANING]:
        raise CheckpointError(f"{type(module).__name__} hands on a {unknown[0]}, which our attention does not know")
    sight = Sight(sliding_window or 0, answer_window_of(module), chunk_of(module))
    rule = AttentionRule(AttentionKind(sight, scaling, softcap), s_aux, indices)
    if indices is not None and replace(rule.kind, scale=None) != CAUSAL:
        raise CheckpointError(
            f"{type(module).__name__} chooses tokens by an index, and attends by another rule besides"
        )
    queries, keys, values = (each[0].transpose(0, 1) for each in (query, key, value))
    if rank_of(module):
        mixed = this_step().attend(module, absorbed(module, queries), keys, values, rule)
        return values_of(module, mixed).unsqueeze(0), None
    out = this_step().attend(module, queries, keys, values, rule)
    return out.unsqueeze(0), None


class HfMixer:
    """A layer's attention, or what has a state in its place, as the caches see it."""

    def __init__(self, spec: CacheSpec) -> None:
        self._spec = spec

    def cache_spec(self) -> CacheSpec:
        """Keys and values, as wide as the wider of both; index keys where the layer has an index; or a state."""
        return self._spec

    def state_backend(self) -> StateBackend:
        """What makes batches of layers with states."""
        return HfStates()


def layer_of(module: nn.Module) -> int:
    """The number of an attention module's layer; raises CheckpointError if it has none."""
    index = getattr(module, "layer_idx", None)
    if not isinstance(index, int):
        raise CheckpointError(f"{type(module).__name__} does not know which layer it is of")
    return index


def beyond_kernels(rule: AttentionRule) -> str:
    """The part of a rule that our decoder's back ends do not support; empty if none."""
    sight = rule.kind.sight
    asked = {
        "heads have sinks": rule.sinks is not None,
        "layers attend within chunks": sight.chunk > 0,
        "a window for answers is beside one for all": sight.window > 0 and sight.answer_window > 0,
        "layers choose by an index what they see": rule.chosen is not None,
    }
    return next((what for what, given in asked.items() if given), "")
