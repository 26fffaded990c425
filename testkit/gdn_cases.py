"""Gated delta nets against transformers' operators, sequence by sequence, on any device and by any back end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from testkit import reference as _reference  # isort: skip  # noqa: F401 - before transformers
from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs  # isort: skip

from llm_service.layers.cache_spec import Segment, SequenceState, StateCache
from llm_service.layers.gdn.backend import GdnInput, GdnShape, GdnWeights
from llm_service.layers.mixer import StateBackend

SHAPES = (GdnShape(2, 4, 32, 16), GdnShape(3, 3, 16, 32))
COUNTS = ((1, 1, 1), (64,), (1, 130, 1, 65, 7), (2, 63, 128))
"""How many tokens of each sequence are in a batch."""
NEAR = {torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 1.2e-2}
"""Twice as far as any was with tensor cores' products; transformers' own numbers are as far from those of float64."""
_EPS = 1e-6


State = tuple[Tensor, Tensor]
"""A sequence's last tokens, as they were projected, and what is carried on."""


class StateCase(Protocol):
    """What a back end is checked with: tokens of some sequences, and what transformers makes of parts of them."""

    given: Any
    weights: Any
    near: Mapping[torch.dtype, float]

    def part(self, begin: int, end: int) -> Any:
        """What is projected from these tokens."""
        ...

    def states(self, slots: int) -> StateCache:
        """For so many sequences; nothing in them is a number."""
        ...

    def by_transformers(self, part: Any, state: State | None, /) -> tuple[Tensor, State]:
        """One sequence's output behind a state, and the state behind it."""
        ...


@dataclass(slots=True)
class Case:
    """Weights, and tokens of some sequences one after the other."""

    shape: GdnShape
    weights: GdnWeights
    given: GdnInput
    near: Mapping[torch.dtype, float] = field(default_factory=lambda: NEAR)

    @classmethod
    def drawn(cls, shape: GdnShape, tokens: int, dtype: torch.dtype, device: str = "cpu") -> Case:
        random = torch.Generator().manual_seed(tokens)

        def normal(*size: int, scale: float = 1.0) -> Tensor:
            return (scale * torch.randn(size, generator=random)).to(device, dtype)

        weights = GdnWeights(
            conv=normal(shape.channels, shape.width, scale=0.5),
            a_log=normal(shape.value_heads),
            dt_bias=normal(shape.value_heads),
            gain=1 + normal(shape.value_dim, scale=0.1),
            eps=_EPS,
        )
        # Parts of wider products, as packed layers give them.
        qkv, z = normal(tokens, shape.channels + shape.values).split([shape.channels, shape.values], dim=1)
        a, b = normal(tokens, 2 * shape.value_heads).chunk(2, dim=1)
        return cls(shape, weights, GdnInput(qkv, z, a, b))

    def alike(self) -> None:
        """Makes all tokens the same, and nothing fade: the system of a chunk is then as far from diagonal as it gets,
        and its powers grow to 10^18."""
        self.given.qkv.copy_(self.given.qkv[:1].expand_as(self.given.qkv))
        self.given.b.fill_(9.0)
        self.weights.a_log.fill_(-12.0)

    def part(self, begin: int, end: int) -> GdnInput:
        given = self.given
        return GdnInput(given.qkv[begin:end], given.z[begin:end], given.a[begin:end], given.b[begin:end])

    def states(self, slots: int) -> StateCache:
        return unwritten(self.shape.state(self.given.qkv.dtype), slots, self.given.qkv.device)

    def by_transformers(self, part: GdnInput, state: State | None) -> tuple[Tensor, State]:
        return by_transformers(self, part, state)


def unwritten(kept: SequenceState, slots: int, device: torch.device) -> StateCache:
    """In which nothing is a number, so that whoever reads a slot before it is written shows."""
    cache = kept.new_cache(slots, device)
    for each in cache.tensors:
        each.fill_(torch.nan)
    return cache


def check(backend: StateBackend, case: StateCase, counts: Sequence[int]) -> None:
    """Sequences begin in a batch and go on in another, each in its slot; both give what transformers gives."""
    slots, dtype = len(counts) + 2, case.given.qkv.dtype
    cache = case.states(slots)
    begins = [sum(counts[:index]) for index in range(len(counts))]
    places = [(5 * index + 2) % slots for index in range(len(counts))] if slots % 5 else list(range(1, slots - 1))
    states: dict[int, Any] = {}
    for fresh in (True, False):
        segments = [
            Segment(begin, begin + count, slot, fresh)
            for begin, count, slot in zip(begins, counts, places, strict=True)
        ]
        out = backend.batch(segments).run(case.given, case.weights, cache)
        for segment in segments:
            part = case.part(segment.begin, segment.end)
            expected, states[segment.slot] = case.by_transformers(part, states.get(segment.slot))
            close(out[segment.begin : segment.end], expected, dtype, case.near)
            for pool, state in zip(cache.tensors, states[segment.slot], strict=True):
                close(pool[segment.slot], state, dtype, case.near)
    untouched = set(range(slots)) - set(places)
    assert all(pool[slot].isnan().all() for pool in cache.tensors for slot in untouched)


def check_copies(backend: StateBackend, case: StateCase) -> None:
    """A run of 200 tokens passes two states that are copied, beside one of 70: both are those of its beginning."""
    parts = Segment(0, 64, 1, fresh=True, copy=5), Segment(64, 128, 1, fresh=False, copy=0)
    segments = [*parts, Segment(128, 200, 1, fresh=False), Segment(200, 270, 3, fresh=True)]
    dtype, cache = case.given.qkv.dtype, case.states(6)
    out = backend.batch(segments).run(case.given, case.weights, cache)
    for begin, end, slot in ((0, 64, 5), (0, 128, 0), (0, 200, 1), (200, 270, 3)):
        expected, state = case.by_transformers(case.part(begin, end), None)
        close(out[begin:end], expected, dtype, case.near)
        for pool, tensor in zip(cache.tensors, state, strict=True):
            close(pool[slot], tensor, dtype, case.near)
    assert all(pool[[2, 4]].isnan().all() for pool in cache.tensors)


def by_transformers(case: Case, part: GdnInput, state: State | None) -> tuple[Tensor, State]:
    """What Qwen3_5GatedDeltaNet does between its projections, for one sequence → its output and state."""
    shape, weights, device = case.shape, case.weights, part.qkv.device
    count, dtype = len(part.qkv), part.qkv.dtype
    if state is None:
        convolution = torch.zeros(shape.channels, shape.width - 1, dtype=dtype, device=device)
        recurrent = torch.zeros(shape.value_heads, shape.key_dim, shape.value_dim, device=device)
    else:
        convolution, recurrent = state[0].clone(), state[1]
    mixed = theirs.causal_conv1d_update(part.qkv.t()[None], convolution[None], weights.conv, activation="silu")[0].t()
    query, key, value = mixed.split([shape.keys, shape.keys, shape.values], dim=1)
    rule = theirs.torch_recurrent_gated_delta_rule if count == 1 else theirs.torch_chunk_gated_delta_rule
    query, key = (  # versions before 5.23 leave it to the layer to repeat what several value heads share
        part.reshape(1, count, shape.key_heads, shape.key_dim).repeat_interleave(shape.group, dim=2)
        for part in (query, key)
    )
    read, recurrent = rule(
        query,
        key,
        value.reshape(1, count, shape.value_heads, shape.value_dim),
        g=-weights.a_log.float().exp() * torch.nn.functional.softplus(part.a.float() + weights.dt_bias)[None],
        beta=part.b.sigmoid()[None],
        initial_state=recurrent[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    norm = theirs.Qwen3_5RMSNormGated(shape.value_dim, eps=weights.eps)
    norm.weight.data = weights.gain
    out = norm(read.reshape(-1, shape.value_dim), part.z.reshape(-1, shape.value_dim))
    return out.view(count, -1), (convolution, recurrent[0])


def close(given: Tensor, expected: Tensor, dtype: torch.dtype, nearness: Mapping[torch.dtype, float]) -> None:
    """As near as a model of a type gets; states are float32 in all."""
    assert given.shape == expected.shape
    assert given.dtype == expected.dtype
    near = nearness[dtype]
    torch.testing.assert_close(given, expected, rtol=near, atol=near)
