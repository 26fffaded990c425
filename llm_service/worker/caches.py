"""All that a rank's layers keep of sequences, and the back ends that compute with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import methodcaller
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from llm_service.families.sight import SpanRule
from llm_service.layers.attention.backend import (
    AttentionBackend,
    AttentionBatch,
    CacheShape,
    MakesBackend,
    NumbaCompiled,
    PagedChunk,
    Span,
    WarmBackend,
)
from llm_service.layers.attention.choose import choose
from llm_service.layers.attention.metadata import AttentionMetadata, Tiling
from llm_service.layers.cache_spec import (
    CacheSpec,
    IndexedCache,
    IndexedKV,
    PagedKV,
    Segment,
    SequenceState,
    SharedKV,
    StateCache,
    cache_shapes,
    layer_caches,
    read_by,
    slot_bytes,
)
from llm_service.layers.mixer import (
    CachedPart,
    IndexBackend,
    IndexPart,
    StableIndexBackend,
    StableStateBackend,
    StateBackend,
    StateMetadata,
)
from llm_service.layers.self_attention.layer import SelfAttention
from llm_service.settings import CacheDtype


@runtime_checkable
class StableBackend(AttentionBackend, Protocol):
    """A back end whose batches read metadata that can be refilled, cut into tiles by `tiling`."""

    tiling: Tiling

    def over(self, metadata: AttentionMetadata) -> AttentionBatch:
        """A batch that reads these metadata at each use."""
        ...


@dataclass(frozen=True)
class PagedLayers:
    """Layers with keys and values of the same shape: `cache` is [layers, …], as made by `CacheShape.new_cache`."""

    shape: CacheShape
    cache: Tensor
    backend: AttentionBackend

    @cached_property
    def stable(self) -> StableBackend | None:
        """The back end, if it is stable. Computed once: checking a protocol takes as long as copying a step's numbers
        to the device."""
        return self.backend if isinstance(self.backend, StableBackend) else None


def _scales_of(mixers: Sequence[CachedPart], specs: Sequence[CacheSpec]) -> list[Tensor | None]:
    """The factors by layer of what an e4m3 cache contains: a layer's own, or those of the layer whose cache it uses."""
    found: list[Tensor | None] = []
    for mixer, spec in zip(mixers, specs, strict=True):
        own = mixer.kv_scales if isinstance(mixer, SelfAttention) else None
        found.append(found[spec.layer] if isinstance(spec, SharedKV) else own)
    return found


class Caches:
    """The cache of each layer, and its batch in every step.

    Layers with keys and values of one shape share a back end and a batch; a sequence's blocks have the same numbers in
    all of them. Layers with states of one shape share slots in the same way. A layer that shares keys and values gets
    the cache of the earlier layer.
    """

    def __init__(
        self,
        mixers: Sequence[CachedPart],
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        attention: str | MakesBackend = "auto",
        states: Callable[[CachedPart], StateBackend] = methodcaller("state_backend"),
        state_slots: int = 0,
        snapshot_slots: int = 0,
        kv_cache_dtype: CacheDtype = CacheDtype.AUTO,
    ) -> None:
        """Allocates `blocks` blocks in `kv_cache_dtype` and, if layers have states, `state_slots` slots for sequences
        and snapshots. `attention` is a back end's name or factory; `states` makes that of a mixer with states. Raises
        CheckpointError if one cannot be used."""
        self.blocks, self.block_size, self.null_block = blocks, block_size, blocks
        specs = [mixer.cache_spec() for mixer in mixers]
        self._specs = read_by(specs)
        self.state_slots, self.snapshot_slots = (state_slots, snapshot_slots) if slot_bytes(specs) else (0, 0)
        self.paged: dict[PagedKV, PagedLayers] = {}
        for kind, shape in cache_shapes(specs, blocks, block_size, kv_cache_dtype).items():
            backend = choose(attention, shape, dtype, device)
            self.paged[kind] = PagedLayers(shape, shape.new_cache(dtype, device), backend)
        self._states: dict[SequenceState, StateBackend] = {}
        shapes = {kind: layers.shape for kind, layers in self.paged.items()}
        paged = {kind: layers.cache for kind, layers in self.paged.items()}
        self.layers = layer_caches(specs, shapes, paged, self.state_slots + self.snapshot_slots, device)
        self._indexes: dict[PagedKV, IndexBackend] = {}
        self._own_specs = specs
        self._scales = _scales_of(mixers, specs) if kv_cache_dtype is CacheDtype.FP8 else [None] * len(specs)
        for mixer, spec, read in zip(mixers, specs, self._specs, strict=True):
            if isinstance(spec, SequenceState) and spec not in self._states:
                self._states[spec] = states(mixer)
            if isinstance(spec, IndexedKV) and isinstance(mixer, IndexPart) and read not in self._indexes:
                assert isinstance(read, PagedKV), "what an index chooses has keys and values"
                self._indexes[read] = mixer.index_backend(self.paged[read].backend, blocks, block_size)

    @property
    def state_chunk(self) -> int:
        """A sequence cut at multiples of this many tokens gives the same bits; 1 if no layer has states."""
        return max((spec.chunk for spec in self._states), default=1)

    def batches(
        self,
        chunks: Sequence[PagedChunk],
        slots: Sequence[int] = (),
        passed: Sequence[tuple[int, int, int]] = (),
        spans: Sequence[Span] = (),
        metadata: AttentionMetadata | None = None,
    ) -> list[Any]:
        """The batch of each layer's mixer: `slots` as in a plan, `passed` as its `states.within`, and spans of the
        batch, [begin, end), whose tokens see each other in layers of that kind. In other layers, back ends that follow
        metadata (`follows_metadata`) read it instead of the chunks, if it is given."""
        made: dict[CacheSpec, Any] = {}
        for spec, layers in self.paged.items():
            if spans and spec.kind.sight.spans is not SpanRule.NOWHERE:
                made[spec] = layers.backend.batch(chunks, spans)
            elif metadata is not None and layers.stable is not None:
                made[spec] = layers.stable.over(metadata)
            else:
                made[spec] = layers.backend.batch(chunks)
        if self._states:
            segments = Segment.of(chunks, slots, passed)
            made |= {spec: backend.batch(segments) for spec, backend in self._states.items()}
        chosen = dict[CacheSpec, Any]()
        for indexed, index in self._indexes.items():
            if metadata is not None and metadata.longest_query == 1 and isinstance(index, StableIndexBackend):
                chosen[indexed] = index.over(metadata)
            else:
                chosen[indexed] = index.batch(chunks)
        return self._of_layers(made, chosen)

    def _of_layers(self, made: Mapping[CacheSpec, Any], chosen: Mapping[CacheSpec, Any]) -> list[Any]:
        """Each layer's batch, by the kind of its cache, with its index's batch if it has one."""
        found: list[Any] = []
        for kept, spec, scales in zip(self._own_specs, self._specs, self._scales, strict=True):
            batch = made[spec] if scales is None else made[spec].with_scales(scales)
            found.append((batch, chosen[spec]) if isinstance(kept, IndexedKV) and spec in chosen else batch)
        return found

    @property
    def decodes_alone(self) -> bool:
        """Whether steps with more than a token of a sequence follow no metadata."""
        return bool(self._indexes)

    @property
    def follows_metadata(self) -> bool:
        """Whether a back end reads a step's metadata on the device."""
        return any(layers.stable is not None for layers in self.paged.values())

    @property
    def tiling(self) -> Tiling:
        """How a step is cut so that every back end can follow its metadata."""
        wanted = [layers.stable.tiling for layers in self.paged.values() if layers.stable is not None]
        return Tiling(max(each.parts for each in wanted), min(each.tile for each in wanted))

    def state_metadata(self, tokens: int, sequences: int, *, decodes_only: bool) -> dict[CacheSpec, StateMetadata]:
        """Room for what layers with states of each kind read of a step; see `StableStateBackend`. Only for caches that
        are capturable (`not_capturable`)."""
        made: dict[CacheSpec, StateMetadata] = {}
        for spec, backend in self._states.items():
            assert isinstance(backend, StableStateBackend), "a back end that does not follow metadata"
            made[spec] = backend.padding(tokens, sequences, decodes_only=decodes_only)
        return made

    def batches_over(self, metadata: AttentionMetadata, states: Mapping[CacheSpec, StateMetadata]) -> list[Any]:
        """As `batches`, over metadata that can be refilled; `states` as returned by `state_metadata`."""
        made: dict[CacheSpec, Any] = {}
        for spec, layers in self.paged.items():
            assert layers.stable is not None, "a back end that does not follow metadata"
            made[spec] = layers.stable.over(metadata)
        for state, backend in self._states.items():
            assert isinstance(backend, StableStateBackend), "a back end that does not follow metadata"
            made[state] = backend.over(states[state])
        chosen = dict[CacheSpec, Any]()
        for indexed, index in self._indexes.items():
            assert isinstance(index, StableIndexBackend), "an index that does not follow metadata"
            chosen[indexed] = index.over(metadata)
        return self._of_layers(made, chosen)

    def not_capturable(self) -> str:
        """Why a step's batches cannot follow metadata; empty if they can."""
        if any(not isinstance(backend, StableIndexBackend) for backend in self._indexes.values()):
            return "the host counts what layers choose by an index"
        for layers in self.paged.values():
            if layers.stable is None:
                return f"--attention {layers.backend.name} launches other kernels for other lengths"
        if any(not isinstance(backend, StableStateBackend) for backend in self._states.values()):
            return "layers with states are computed by torch's operators"
        return ""

    @property
    def block_tensors(self) -> list[Tensor]:
        """All that have a part of each block, [parts, blocks + 1, …]."""
        kept = [cache.index[None] for cache in self.layers if isinstance(cache, IndexedCache) and cache.index.numel()]
        return [*(layers.cache.flatten(0, 1) for layers in self.paged.values()), *kept]

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        """States go from slots into others as well, one pair (source, target) after the other."""
        for cache in self.layers:
            if isinstance(cache, StateCache):
                for source, target in pairs:
                    cache.copy(source, target)

    def warm_up(self) -> None:
        """Has the back ends compile their kernels, if they compile any, so that no request waits for it."""
        for spec, layers in self.paged.items():
            if not isinstance(layers.backend, WarmBackend):
                continue
            own = [scales for read, scales in zip(self._specs, self._scales, strict=True) if read == spec]
            for scales in {scales is None: scales for scales in own}.values():  # kernels of two forms
                layers.backend.warm_up(layers.cache[0], scales)

    def kernels(self) -> set[str]:
        """Names of our kernels for CPUs that the back ends use, as `common.cpu.jit.find` takes them."""
        backends: list[object] = [*(kind.backend for kind in self.paged.values()), *self._states.values()]
        return set[str]().union(*(backend.kernels for backend in backends if isinstance(backend, NumbaCompiled)))
