"""A step of transformers' layers over our caches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from common.checkpoints.checkpoint import CheckpointError
from llm_service.layers.attention.general_backend import AttentionRule
from llm_service.layers.sparse_attention.index import Chosen, IndexQuery
from llm_service.model_config.rotary import Tempering
from llm_service.models.hf.attention import layer_of
from llm_service.models.hf.kept import Kept


@dataclass(frozen=True, slots=True)
class CachedStep:
    """See `HfStep`. `places` are those of layers in `caches` and `batches`. `by_rule`: batches are told the rule of
    each call; others know that of the layer. Queries of some layers are tempered by `positions` [axes, n]."""

    kept: Kept
    places: Mapping[int, int]
    caches: Sequence[Any]
    batches: Sequence[Any]
    positions: Tensor
    tempering: Mapping[int, Tempering]
    by_rule: bool

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        """See `HfStep.attend`."""
        layer = layer_of(module)
        at = self.places[layer]
        batch, cache = self.batches[at], self.caches[at].kv if layer in self.kept.index_dims else self.caches[at]
        if (tempering := self.tempering.get(layer)) is not None:
            query = (query * tempering.factors(self.positions[0]).view(-1, 1, 1)).to(query.dtype)
        out: Tensor
        if self.by_rule:
            out = batch.attend(query, key, value, cache, rule)
        elif rule == self.kept.rules[layer]:
            out = batch.attend(*(each.contiguous() for each in (query, key, value)), cache)
        else:
            raise CheckpointError(f"{type(module).__name__} attends by another rule in each step")
        return out.view(*query.shape[:2], -1)

    def choose(self, layer: int, asked: IndexQuery) -> tuple[Chosen, ...]:
        """See `HfStep.choose`."""
        at = self.places[layer]
        chosen: tuple[Chosen, ...] = self.batches[at].choose(asked, self.caches[at].index)
        return chosen

    def carry(self, layer: int, compute: Callable[[Tensor, Any], Tensor], tokens: Tensor) -> Tensor:
        """See `HfStep.carry`."""
        at = self.places[layer]
        made: Tensor = self.batches[at].carry(compute, tokens, self.caches[at])
        return made
