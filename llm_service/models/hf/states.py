"""Layers of transformers that keep states: computed by transformers over our slots, which answer as its cache would,
for the sequences of one call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from llm_service.layers.cache_spec import Segment, SequenceState, StateCache
from llm_service.models.hf.step import this_step

CHUNKS = {"Glm5NextTextLinearAttention": 64}
"""The layers served, and how many tokens they compute at once: a sequence cut at multiples of these gives the same
bits."""


class Held:
    """The states of some sequences, in the form of transformers' cache: the last tokens that a convolution sees [b,
    channels, width], and the recurrent state [b, …]. Initially they are what a layer writes first."""

    def __init__(self, states: Sequence[Tensor] = ()) -> None:
        self._tokens = states[0] if states else None
        self._carried = states[1] if states else None

    @property
    def states(self) -> list[Tensor]:
        """As they are after a call."""
        return [each for each in (self._tokens, self._carried) if each is not None]

    def get_conv_state(self, *_: Any, **__: Any) -> Tensor | None:
        """The last tokens, which may be written to."""
        return self._tokens

    def update_conv_state(self, tokens: Tensor, *_: Any, conv_kernel_size: int, **__: Any) -> Tensor:
        """Takes tokens [b, channels, n] → the tokens before them, and them."""
        before = self._tokens
        if before is None:
            before = tokens.new_zeros(*tokens.shape[:-1], conv_kernel_size)
        every = torch.cat([before, tokens], dim=-1)
        self._tokens = every[..., -conv_kernel_size:]
        return every

    def get_recurrent_state(self, *_: Any, **__: Any) -> Tensor | None:
        """The recurrent state."""
        return self._carried

    def update_recurrent_state(self, state: Tensor, *_: Any, **__: Any) -> Tensor:
        """Takes it."""
        self._carried = state
        return state

    def spec(self, chunk: int) -> SequenceState:
        """What one sequence keeps."""
        return SequenceState(tuple((tuple(each.shape[1:]), each.dtype) for each in self.states), chunk)


def take_states(text: nn.Module) -> dict[int, int]:
    """Has the known layers of a text keep their states in our slots. Returns how many tokens each computes at once, by
    layer number."""
    found: dict[int, int] = {}
    parts: list[Any] = list(text.modules())
    for part in parts:
        if (chunk := CHUNKS.get(type(part).__name__)) is not None:
            found[part.layer_idx] = chunk
            name = "cache" if "cache" in inspect.signature(part.forward).parameters else "cache_params"  # before 5.24
            part.forward = partial(_carried, part.layer_idx, part.forward, name)
    return found


def _carried(layer: int, compute: Callable[..., Tensor], cache: str, /, hidden_states: Tensor, **_: Any) -> Tensor:
    return this_step().carry(layer, partial(_computed, compute, cache), hidden_states)


def _computed(compute: Callable[..., Tensor], cache: str, hidden: Tensor, held: Held) -> Tensor:
    return compute(hidden_states=hidden, **{cache: held})


class HfStates:
    """Makes the batches of such a layer: the segments of a step."""

    name = "transformers"

    def batch(self, segments: Sequence[Segment]) -> StateSegments:
        """See `StateBackend`."""
        alone = [each for each in segments if each.end - each.begin == 1 and each.copy < 0 and not each.fresh]
        return StateSegments([each for each in segments if each not in alone], alone)


class StateSegments:
    """Runs of tokens, computed one after the other, and single tokens (`alone`), computed together; the single token of
    a sequence comes after its run."""

    def __init__(self, runs: Iterable[Segment], alone: Sequence[Segment]) -> None:
        self._runs, self._alone = tuple(runs), alone

    def carry(self, compute: Callable[[Tensor, Held], Tensor], hidden: Tensor, cache: StateCache) -> Tensor:
        """hidden [1, n, hidden] → the same; each segment's slot has its state afterwards."""
        out = torch.empty_like(hidden)
        for run in self._runs:
            here = slice(run.begin, run.end)
            held = Held([each.unsqueeze(0).clone() for each in cache.read(run)])
            out[:, here] = compute(hidden[:, here], held)
            cache.write(run, [each[0] for each in held.states])
        if self._alone:
            rows = torch.tensor([each.begin for each in self._alone], device=hidden.device)
            slots = torch.tensor([each.slot for each in self._alone], device=hidden.device)
            held = Held([each[slots] for each in cache.tensors])
            out[0, rows] = compute(hidden[0, rows].unsqueeze(1), held).squeeze(1)
            for each, state in zip(cache.tensors, held.states, strict=True):
                each[slots] = state.to(each.dtype)
        return out
