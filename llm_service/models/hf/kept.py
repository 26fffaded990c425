"""What layers of transformers keep of a sequence, and their rules of attention, as found by computing one token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from common.checkpoints.checkpoint import CheckpointError
from llm_service.families.sight import Sight, SpanRule
from llm_service.layers.attention.backend import AttentionKind
from llm_service.layers.attention.general_backend import AttentionRule
from llm_service.layers.cache_spec import CacheSpec, IndexedKV, PagedKV, SequenceState, SharedKV
from llm_service.layers.sparse_attention.index import Chosen, IndexQuery
from llm_service.models.hf.attention import layer_of
from llm_service.models.hf.latents import rank_of
from llm_service.models.hf.linear import TextLinear
from llm_service.models.hf.states import Held
from llm_service.models.hf.step import HfStep


class Kept:
    """By layer number: the `rules` of attention, the shapes of `keys` and values, sizes of index keys (`index_dims`),
    and `states`. `narrower`: values have fewer numbers than keys and are not part of them."""

    def __init__(self) -> None:
        self.rules = dict[int, AttentionRule]()
        self.keys = dict[int, PagedKV]()
        self.index_dims = dict[int, int]()
        self.states = dict[int, SequenceState]()
        self.narrower = False

    def attend_by_kinds(self, spans: SpanRule) -> None:
        """Has our decoder's back ends attend, which know rules by kind; `spans` says in which layers tokens see later
        ones."""
        for layer, spec in self.keys.items():
            kind = self.rules[layer].kind
            self.keys[layer] = replace(spec, kind=replace(kind, sight=kind.sight.with_spans(spans)))

    def use_spans(self, spans: SpanRule) -> None:
        """Has all layers' tokens see later ones by this rule, for a back end that is told of all else in each step."""
        kind = AttentionKind(Sight(spans=spans))
        self.keys = {layer: replace(spec, kind=kind) for layer, spec in self.keys.items()}

    @property
    def places(self) -> dict[int, int]:
        """The index of each layer among those that keep something."""
        return {layer: at for at, layer in enumerate(sorted((*self.keys, *self.states)))}

    def specs(self, sources: Mapping[int, int]) -> list[CacheSpec]:
        """What each of these keeps, in order; layers in `sources` use the keys and values of another one."""
        places, made = self.places, list[CacheSpec]()
        for layer in places:
            if (state := self.states.get(layer)) is not None:
                made.append(state)
                continue
            kv = SharedKV(places[sources[layer]]) if layer in sources else self.keys[layer]
            made.append(IndexedKV(kv, self.index_dims[layer]) if layer in self.index_dims else kv)
        return made


@dataclass(frozen=True, slots=True)
class _FirstStep:
    """See `HfStep`: notes what each layer asks for."""

    kept: Kept
    kind: AttentionKind
    chunks: Mapping[int, int]

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        layer, width, rank = layer_of(module), max(key.shape[-1], value.shape[-1]), rank_of(module)
        self.kept.rules[layer] = rule
        self.kept.narrower |= key.shape[-1] != value.shape[-1] and not rank
        spec = PagedKV(query.shape[1], key.shape[1], width, self.kind, rank)
        if self.kept.keys.setdefault(layer, spec) != spec:
            raise CheckpointError(f"{type(module).__name__} attends twice in one layer")
        return query.new_zeros(*query.shape[:2], value.shape[-1])

    def choose(self, layer: int, asked: IndexQuery) -> tuple[Chosen, ...]:
        self.kept.index_dims[layer] = asked.key.shape[-1]
        return ()

    def carry(self, layer: int, compute: Callable[[Tensor, Any], Tensor], tokens: Tensor) -> Tensor:
        made = compute(tokens, held := Held())
        self.kept.states[layer] = held.spec(self.chunks[layer])
        return made


def find_kept(
    text: Any, kind: AttentionKind, chunks: Mapping[int, int], ranks: int, compute: Callable[[HfStep], object]
) -> Kept:
    """What the layers of a text keep, for a back end of that kind; `compute` has the text compute one token in a step.
    Layers in `chunks` keep states, and compute so many tokens at once. Raises CheckpointError if the text does not run
    like this, or over so many ranks, or a layer keeps something else."""
    kept, name = Kept(), type(text).__name__
    try:
        with torch.inference_mode():
            compute(_FirstStep(kept, kind, chunks))
    except AttributeError as error:
        of_ours = f"'{TextLinear.__name__}' object" in str(error)
        what = "asks a linear layer in 8 or 4 bits" if of_ours else "cannot compute a token"
        raise CheckpointError(f"{name} {what}: {error}") from error
    except RuntimeError as error:
        if ranks == 1:
            raise
        raise CheckpointError(f"{name}'s heads cannot be split over {ranks} ranks") from error
    if not kept.keys:
        raise CheckpointError(f"{name} does not let others compute its attention")
    layers = text.config.num_hidden_layers
    if (count := len(kept.keys) + len(kept.states)) < layers:  # another sequence's, or none, would be read there
        raise CheckpointError(f"{layers - count} of {name}'s {layers} layers keep states, and no keys and values")
    return kept
