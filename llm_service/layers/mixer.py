"""The decoder layer's interface to the part that mixes the tokens of a sequence: attention, or a layer with a state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from llm_service.layers.attention.backend import AttentionBackend, PagedChunk
from llm_service.layers.attention.metadata import AttentionMetadata
from llm_service.layers.cache_spec import CacheSpec, Segment

Rotary = tuple[Tensor, ...]
"""Cosine and sine, [n, 1, rotary_dim] each; followed by the growth of queries with their positions, if any."""


KeysAndValues = tuple[Tensor, ...]
"""Of a step's tokens, [n, kv_heads, head_dim] each, as attention takes them."""


@dataclass(slots=True)
class HandedOn:
    """What layers of a step leave to later ones: by window, the `keys` and values of the last layer that had its own,
    and the last `choice` of what is seen, in the form of an index's batch."""

    keys: dict[int, KeysAndValues] = field(default_factory=dict)
    choice: list[Tensor] | None = None

    def narrow(self, places: Tensor) -> None:
        """Leaves keys and values of these places alone, int64 [m]."""
        self.keys = {window: tuple(each[places] for each in both) for window, both in self.keys.items()}


class StateBackend(Protocol):
    """Makes the batches of a mixer that keeps states."""

    def batch(self, segments: Sequence[Segment]) -> Any:
        """The batch of `MixerPart.mix` for a step; its segments are consecutive from token 0 on."""
        ...


class CachedPart(Protocol):
    """A part that keeps something of sequences, as caches see it."""

    def cache_spec(self) -> CacheSpec:
        """What it keeps of sequences."""
        ...

    def state_backend(self) -> StateBackend:
        """Makes batches for all layers with this spec. Only for a `SequenceState`."""
        ...


class IndexBackend(Protocol):
    """Makes the batches of an index of what is attended to."""

    def batch(self, chunks: Sequence[PagedChunk]) -> Any:
        """The index's batch of a step."""
        ...


@runtime_checkable
class StableIndexBackend(IndexBackend, Protocol):
    """An index back end whose batches of one token per sequence follow metadata that can be refilled."""

    def over(self, metadata: AttentionMetadata, /) -> Any:
        """Such a batch, which reads these metadata at each use."""
        ...


@runtime_checkable
class IndexPart(CachedPart, Protocol):
    """A part that keeps `IndexedKV`, and has batches of its own for the index: `mix` takes an `IndexedCache`, and a
    pair of an `AttentionBatch` and one of the index; `HandedOn` as well if layers may see what an earlier one chose."""

    def index_backend(self, attention: AttentionBackend, blocks: int, block_size: int, /) -> IndexBackend:
        """Makes these for all layers with this spec, given the back end for attention to everything, and a cache of so
        many blocks."""
        ...


class StateMetadata(Protocol):
    """What a batch of layers with states reads of a step: int32 [k], in a tensor that stays in place."""

    packed: Tensor

    def numbers(self, segments: Sequence[Segment]) -> np.ndarray:
        """Its content for a step, padding included, int32 [k]."""
        ...


@runtime_checkable
class StableStateBackend(StateBackend, Protocol):
    """A back end whose batches follow metadata that can be refilled."""

    def padding(self, tokens: int, sequences: int, *, decodes_only: bool) -> StateMetadata:
        """Room for any step of so many tokens of so many sequences, none of which has several with `decodes_only`."""
        ...

    def over(self, metadata: Any) -> Any:
        """The batch for `MixerPart.mix`; it reads these metadata, made by `padding`, at each use."""
        ...


class MixerPart(CachedPart, Protocol):
    """A module that mixes, in three parts, since what is before and after `mix` is done for each token alone.

    `stored_as` is its name in a checkpoint's layer. Its spec says what it keeps of sequences: with `PagedKV`, `mix`
    takes a layer's paged cache and an `AttentionBatch`; with `SequenceState`, a `StateCache` and a batch of
    `state_backend`.
    """

    stored_as: ClassVar[str]

    def project(self, x: Tensor, rotary: Rotary, /) -> tuple[Tensor, ...]:
        """Normed x [n, hidden] → the inputs of `mix` for these tokens."""
        ...

    def mix(self, inputs: tuple[Tensor, ...], cache: Any, batch: Any) -> Tensor:
        """→ [n, width], for each token what it gets from those before it; the cache includes this batch afterwards."""
        ...

    def join(self, mixed: Tensor) -> Tensor:
        """[n, width] → all ranks' [n, hidden]."""
        ...
