"""Mamba-2 against transformers' operators, sequence by sequence, on any device and by any back end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from testkit import reference as _reference  # isort: skip  # noqa: F401 - before transformers
from transformers.models.nemotron_h import modeling_nemotron_h as theirs  # isort: skip
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated  # isort: skip  # Nemotron-H copies it

from llm_service.layers.cache_spec import Segment, StateCache
from llm_service.layers.mamba2.backend import Mamba2Backend, Mamba2Input, Mamba2Shape, Mamba2Weights

SHAPES = (Mamba2Shape(2, 4, 16, 32, least_step=0.3), Mamba2Shape(1, 3, 32, 16))
COUNTS = ((1, 1, 1), (64,), (1, 130, 1, 65, 7), (2, 63, 128))
"""How many tokens of each sequence are in a batch."""
NEAR = {torch.float32: 2e-5, torch.bfloat16: 6e-2, torch.float16: 1.2e-2}
"""Twice as far as any was with tensor cores' products."""
_EPS = 1e-5
_ENDLESS = float("inf")


@dataclass(frozen=True, slots=True)
class Case:
    """Weights, and tokens of some sequences one after the other."""

    shape: Mamba2Shape
    weights: Mamba2Weights
    given: Mamba2Input

    @classmethod
    def drawn(cls, shape: Mamba2Shape, tokens: int, dtype: torch.dtype, device: str = "cpu") -> Case:
        random = torch.Generator().manual_seed(tokens)

        def normal(*size: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
            return (scale * torch.randn(size, generator=random)).to(device, dtype)

        weights = Mamba2Weights(
            conv=normal(shape.channels, shape.width, scale=0.5, dtype=dtype),
            conv_bias=normal(shape.channels, scale=0.3, dtype=dtype),
            a_log=normal(shape.heads),
            dt_bias=normal(shape.heads) - 1,
            d=normal(shape.heads),
            gain=1 + normal(shape.values, scale=0.1, dtype=dtype),
            eps=_EPS,
        )
        # Parts of a wider product, as packed layers give them.
        sizes = [shape.values, shape.channels, shape.heads]
        return cls(shape, weights, Mamba2Input(*normal(tokens, sum(sizes), dtype=dtype).split(sizes, dim=1)))

    def part(self, begin: int, end: int) -> Mamba2Input:
        given = self.given
        return Mamba2Input(given.z[begin:end], given.xbc[begin:end], given.dt[begin:end])

    def states(self, slots: int) -> StateCache:
        """In which nothing is a number, so that whoever reads a slot before it is written shows."""
        cache = self.shape.state(self.given.z.dtype).new_cache(slots, self.given.z.device)
        for each in cache.tensors:
            each.fill_(torch.nan)
        return cache


def check(backend: Mamba2Backend, case: Case, counts: Sequence[int]) -> None:
    """Sequences begin in a batch, go on in another, and then come token by token, as answers, each in its slot; all
    give what transformers gives."""
    near, slots = NEAR[case.given.z.dtype], len(counts) + 2
    cache = case.states(slots)
    begins = [sum(counts[:index]) for index in range(len(counts))]
    places = list(range(1, len(counts) + 1))[::-1]
    before: dict[int, tuple[Tensor, Tensor] | None] = dict.fromkeys(places)
    for fresh in (True, False):
        segments = [
            Segment(begin, begin + count, slot, fresh)
            for begin, count, slot in zip(begins, counts, places, strict=True)
        ]
        out = backend.batch(segments).run(case.given, case.weights, cache)
        for segment in segments:
            expected, after = of_a_prompt(case, case.part(segment.begin, segment.end), before[segment.slot])
            before[segment.slot] = after
            _compare(out[segment.begin : segment.end], expected, near)
            _compare(cache.tensors[1][segment.slot], after[1].transpose(1, 2), near)
    steps = [Segment(at, at + 1, slot, fresh=False, answers=1) for at, slot in enumerate(places)]
    tokens = case.part(0, len(steps))
    out = backend.batch(steps).run(tokens, case.weights, cache)
    for step in steps:
        expected, after = of_a_token(case, case.part(step.begin, step.end), before[step.slot])
        _compare(out[step.begin : step.end], expected, near)
        _compare(cache.tensors[1][step.slot], after[1].transpose(1, 2), near)


def check_copies(backend: Mamba2Backend, case: Case) -> None:
    """States that a run passes go to other slots as well, in whole chunks, and the run goes on as if they did not."""
    total = len(case.given.z)
    cut, whole = case.states(4), case.states(4)
    segments = [
        Segment(0, 128, 1, fresh=True, copy=3),
        Segment(128, 192, 1, fresh=False, copy=0, context=128),
        Segment(192, total, 1, fresh=False, context=192),
    ]
    out = backend.batch(segments).run(case.given, case.weights, cut)
    _compare(out, backend.batch([Segment(0, total, 1, fresh=True)]).run(case.given, case.weights, whole), 1e-6)
    for count, copy in ((128, 3), (192, 0)):
        backend.batch([Segment(0, count, 2, fresh=True)]).run(case.part(0, count), case.weights, whole)
        for one, other in zip(cut.tensors, whole.tensors, strict=True):
            _compare(one[copy], other[2], 1e-6)


def of_a_prompt(
    case: Case, given: Mamba2Input, before: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """What transformers makes of more tokens of a sequence → [n, values], and the states behind them: the last tokens,
    [channels, width − 1], and [heads, head_dim, state]."""
    shape, weights, count = case.shape, case.weights, len(given.z)
    last, state = (given.xbc.new_zeros(shape.channels, shape.width - 1), None) if before is None else before
    every = torch.cat([last, given.xbc.t()], dim=1)
    mixed = theirs.causal_conv1d_fn(every.unsqueeze(0), weights.conv, weights.conv_bias, activation="silu")
    x, key, query = _heads(shape, mixed[0, :, -count:].t())
    out, after = theirs.mamba2_chunk_scan(
        *(x.unsqueeze(0), given.dt.unsqueeze(0), -weights.a_log.exp(), key.unsqueeze(0), query.unsqueeze(0)),
        chunk_size=32,
        D=weights.d,
        dt_bias=weights.dt_bias,
        dt_softplus=True,
        initial_states=None if state is None else state.unsqueeze(0),
        dt_limit=(shape.least_step, _ENDLESS),
        return_final_states=True,
    )
    return _normed(case, out[0].flatten(1), given.z), (every[:, count:], after[0])


def of_a_token(
    case: Case, given: Mamba2Input, before: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The same of one that follows, as transformers computes those of an answer."""
    assert before is not None, "a sequence that has begun"
    shape, weights, last = case.shape, case.weights, before[0].clone().unsqueeze(0)
    made = theirs.causal_conv1d_update(given.xbc.t().unsqueeze(0), last, weights.conv, weights.conv_bias, "silu")
    x, key, query = _heads(shape, made[0].t())
    state = before[1].clone().unsqueeze(0)
    wide = (shape.heads, shape.head_dim)
    out = theirs.mamba2_selective_state_update(
        *(state, x, given.dt.unsqueeze(2).expand(-1, *wide)),
        -weights.a_log.exp()[:, None, None].expand(*wide, shape.state_dim),
        *(key, query, weights.d[:, None].expand(wide)),
        dt_bias=weights.dt_bias[:, None].expand(wide),
        dt_softplus=True,
    )
    return _normed(case, out.flatten(1), given.z), (last[0], state[0])


def _heads(shape: Mamba2Shape, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, key, query = mixed.split([shape.values, shape.keys, shape.keys], dim=1)
    key, query = (each.unflatten(1, (shape.groups, shape.state_dim)) for each in (key, query))
    return x.unflatten(1, (shape.heads, shape.head_dim)), key, query


def _normed(case: Case, out: Tensor, z: Tensor) -> Tensor:
    norm = Zamba2RMSNormGated(case.shape.values, case.shape.values // case.shape.groups, _EPS)
    norm.weight = torch.nn.Parameter(case.weights.gain, requires_grad=False)
    normed: Tensor = norm(out.to(z.dtype), z)
    return normed


def _compare(found: Tensor, expected: Tensor | None, near: float) -> None:
    assert expected is not None
    scale = float(expected.float().abs().max())
    assert not found.isnan().any()
    assert float((found.float() - expected.float()).abs().max()) <= near * max(1.0, scale)
