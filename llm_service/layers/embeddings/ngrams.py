"""N-gram embeddings that a layer adds to its streams, as in Engram (https://arxiv.org/abs/2601.07372): hashes of a
token and the tokens before it select them, gates weight them for each stream, and a convolution over them follows. A
sequence's state is its last tokens, for the hashes, and the last inputs of the convolution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from llm_service.layers.cache_spec import Segment, SequenceState, StateCache
from llm_service.layers.elementwise import sigmoid, silu
from llm_service.layers.linear.parallel import PackedLinear, VocabParallelEmbedding
from llm_service.layers.linear.placement import Place, Stored, fill
from llm_service.layers.linear.weight_dtype import EXACT, Rounded
from llm_service.layers.recurrent.convolution import Steps, convolve_run, convolve_steps
from llm_service.layers.residual.hyper_connections import StreamNorm
from llm_service.layers.tensor_parallel import TensorGroup
from llm_service.model_config.layer_shapes import NgramShape
from llm_service.model_config.text import TextConfig

_64 = (1 << 64) - 1


def _splitmix(value: int) -> int:
    """The hash of a 64-bit number by SplitMix64 (Steele, Lea and Flood 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _64
    return value ^ (value >> 31)


def multipliers(shape: NgramShape, vocabulary: int, number: int) -> list[int]:
    """Odd multipliers of a token, and of each token before it, for the hashes of layer `number` among those with
    n-grams; products have at most 63 bits."""
    bound = max(1, ((1 << 63) - 1) // max(vocabulary, 1) // 2)
    first = shape.seed + 10_007 * number
    steps = (first + 0x9E3779B97F4A7C15 * (place + 1) & _64 for place in range(shape.size))
    return [2 * (_splitmix(step) % bound) + 1 for step in steps]


def table_sizes(shape: NgramShape, number: int) -> list[int]:
    """Rows of each hash's table, of the layer of that number: primes, none of which any other layer has.

    >>> shape = NgramShape((0, 1), 3, 1, 8, 4, base=20, multiple=8, parts=2, seed=1, end=0)
    >>> table_sizes(shape, 0), table_sizes(shape, 1)
    ([23, 29], [31, 37])
    """
    heads, found, at = (shape.size - 1) * shape.heads, list[int](), shape.base - 1
    while len(found) < (number + 1) * heads:
        at += 1
        if at > 1 and all(at % divisor for divisor in range(2, math.isqrt(at) + 1)):
            found.append(at)
    return found[number * heads :]


class NgramHashes(nn.Module):
    """The rows of a token's n-grams in a table. A checkpoint may state the hashes' constants."""

    def __init__(self, shape: NgramShape, vocabulary: int, number: int) -> None:
        super().__init__()
        self._end, self._heads = shape.end, shape.heads
        sizes = table_sizes(shape, number)
        starts = [sum(sizes[:at]) for at in range(len(sizes))]
        self.rows = -(-sum(sizes) // shape.multiple) * shape.multiple
        self._multipliers: Tensor
        self._sizes: Tensor
        self._starts: Tensor
        for name, numbers in (
            ("_multipliers", multipliers(shape, vocabulary, number)),
            ("_sizes", sizes),
            ("_starts", starts),
        ):
            self.register_buffer(name, torch.tensor(numbers, dtype=torch.int64), persistent=False)

    def whole(self) -> bool:
        """They are made, if they are not read."""
        return True

    def finalize(self, *, rounded: Rounded = EXACT) -> None:
        """Called when they are final."""

    def targets(self, _: str, /) -> dict[str, Place]:
        """See `Placed`."""
        return {
            "layer_multipliers": lambda stored: fill(self._multipliers, stored[:]),
            "ngram_heads_vocab_sizes": lambda stored: fill(self._sizes, stored[:]),
            "ngram_heads_offsets": lambda stored: fill(self._starts, stored[:]),
        }

    def forward(self, tokens: Tensor, before: Tensor) -> Tensor:
        """int64 [n], and the tokens before each, the nearest first, [n, size − 1] → rows int64 [n, hashes]. Tokens
        before the end of a text are replaced by that end."""
        mixed = tokens * self._multipliers[0]
        within = torch.ones_like(tokens, dtype=torch.bool)
        found = list[Tensor]()
        for place in range(before.shape[1]):
            token = torch.where(within, before[:, place], self._end)
            within = token != self._end
            mixed = mixed ^ (token * self._multipliers[place + 1])
            found += [mixed] * self._heads
        return torch.stack(found, dim=1) % self._sizes + self._starts


class NgramTable(VocabParallelEmbedding):
    """Embeddings of all hashes of a layer, split over the ranks by rows; checkpoints have the table in `parts` or
    whole."""

    def __init__(self, total: int, width: int, parts: int, group: TensorGroup, dtype: torch.dtype) -> None:
        super().__init__(total, width, group, dtype)
        self._total, self._parts, self._missing = total, parts, self.weight.shape[0]

    def targets(self, own: str) -> dict[str, Place]:
        """See `Placed`."""
        each = -(-self._total // self._parts)
        apart: dict[str, Place] = {
            f"{own}.shard_{part}.weight": partial(self._place, part * each) for part in range(self._parts)
        }
        return {f"{own}.weight": partial(self._place, 0), **apart}

    def _place(self, first: int, stored: Stored) -> None:
        """Rows from a place of the whole table on, as far as they are this rank's."""
        rows, width = stored.get_shape()
        if width != self.weight.shape[1] or first + rows > self._total:
            raise ValueError(f"it is {(rows, width)}, expected {tuple(self.weight.shape)} in all")
        own = self.partition
        begin, end = max(first, own.start), min(first + rows, own.stop)
        if begin < end:
            fill(
                self.weight[begin - own.start : end - own.start],
                stored[begin - first : end - first],
            )
            self._missing -= end - begin

    def whole(self) -> bool:
        """Whether all rows have been read."""
        return self._missing <= 0

    def finalize(self, *, rounded: Rounded = EXACT) -> None:  # noqa: ARG002 - a table is not rounded
        """As `VocabParallelEmbedding.finalize`."""
        super().finalize()


class NgramBatch:
    """Of a step: `runs` of tokens in their order, and then the sequences' last ones that come alone."""

    def __init__(self, runs: Sequence[Segment] = (), steps: Sequence[Steps] = ()) -> None:
        self.runs, self._steps = runs, steps

    def begun(self) -> Sequence[Steps]:
        """The single tokens."""
        return self._steps

    def before(self, tokens: Tensor, end: int, cache: StateCache) -> Tensor:
        """int64 [n] → the tokens before each, the nearest first, [n, size − 1]; `end` where a sequence begins. The
        state of a sequence, [size − 1], has these minus `end`, since states begin with zeros."""
        (states,) = cache.tensors
        size = states.shape[1]
        out, shifted = tokens.new_zeros(len(tokens), size), tokens - end
        for run in self.runs:
            (kept,) = cache.read(run)
            every, count = torch.cat([kept, shifted[run.begin : run.end]]), run.end - run.begin
            for place in range(size):
                out[run.begin : run.end, place] = every[size - 1 - place : size - 1 - place + count]
            cache.write(run, [every[count:]])
        for steps in self.begun():
            kept = steps.read(states)
            out[steps.rows] = kept.flip(1)
            states[steps.slots] = torch.cat([kept[:, 1:], shifted[steps.rows].unsqueeze(1)], dim=1)
        return out + end

    def convolve(self, x: Tensor, weight: Tensor, apart: int, cache: StateCache) -> Tensor:
        """x [n, channels], weight [channels, reach], with taps `apart` tokens apart → [n, channels]; each segment's
        slot has its last tokens afterwards."""
        out = torch.zeros_like(x)  # rows of padding must be numbers: others' tiles may read them
        for run in self.runs:
            (before,) = cache.read(run)
            out[run.begin : run.end], after = convolve_run(x[run.begin : run.end], before, weight, apart)
            cache.write(run, [after])
        (states,) = cache.tensors
        for steps in self.begun():
            out[steps.rows], states[steps.slots] = convolve_steps(x[steps.rows], steps.read(states), weight, apart)
        return out


@dataclass(frozen=True, slots=True)
class NgramMetadata:
    """Metadata of a step with one token per sequence: `packed` int32 [3 · s], rows, slots, and whether they are fresh.
    Padding repeats the first token."""

    packed: Tensor

    def numbers(self, segments: Sequence[Segment]) -> np.ndarray:
        """See `StateMetadata`."""
        steps = [(each.begin, each.slot, each.fresh) for each in segments]
        padded = [*steps, *steps[:1] * (len(self.packed) // 3 - len(steps))]
        return np.array(padded, np.int32).T.flatten()


class NgramReplay(NgramBatch):
    """Such a step over metadata that can be refilled."""

    def __init__(self, metadata: NgramMetadata) -> None:
        super().__init__()
        self._metadata = metadata

    def begun(self) -> Sequence[Steps]:
        """See `NgramBatch`."""
        rows, slots, fresh = self._metadata.packed.view(3, -1).long()
        return (Steps(rows, slots, fresh.bool()),)


class NgramBackend:
    """Makes batches of torch's operators."""

    name = "torch"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def batch(self, segments: Sequence[Segment]) -> NgramBatch:
        """See `StateBackend`."""
        alone: list[Segment] = []
        runs: list[Segment] = []
        for segment in segments:
            (alone if segment.end - segment.begin == 1 and segment.copy < 0 else runs).append(segment)
        return NgramBatch(runs, Steps.of([alone] if alone else [], self._device))

    def padding(self, tokens: int, sequences: int, *, decodes_only: bool) -> NgramMetadata:
        """See `StableStateBackend`. Raises ValueError for steps with more than a token of a sequence."""
        if not decodes_only:
            raise ValueError("n-grams of prompts follow no metadata")
        return NgramMetadata(torch.zeros(3 * min(tokens, sequences), dtype=torch.int32, device=self._device))

    def over(self, metadata: NgramMetadata) -> NgramReplay:
        """See `StableStateBackend`."""
        return NgramReplay(metadata)


class _Embedding(nn.Module):
    """Hashes, and their table."""

    stored_as: ClassVar[str] = "ple_embedding"

    def __init__(self, config: TextConfig, number: int, group: TensorGroup, dtype: torch.dtype) -> None:
        super().__init__()
        shape = config.ngrams
        assert shape is not None, "a layer of this kind needs them"
        with torch.device("cpu"):
            self.hashes = NgramHashes(shape, config.vocab_size, number)
        width = shape.width // ((shape.size - 1) * shape.heads)
        self.ngram_embedding = NgramTable(self.hashes.rows, width, shape.parts, group, dtype)

    def forward(self, tokens: Tensor, before: Tensor) -> Tensor:
        """→ [n, width]."""
        rows = self.hashes(tokens, before)
        found: Tensor = self.ngram_embedding(rows.flatten()).view(len(tokens), -1)
        return found


class Ngrams(nn.Module):
    """What a layer adds to its streams. Every rank has all of it, except for the table."""

    stored_as: ClassVar[str] = "ple"

    def __init__(self, config: TextConfig, number: int, group: TensorGroup, dtype: torch.dtype) -> None:
        super().__init__()
        shape, streams = config.ngrams, config.streams
        assert shape is not None, "a layer of this kind needs them"
        assert streams is not None, "they are added to streams"
        self._end, self._size, self._hidden = shape.end, shape.size, config.hidden_size
        self._count, channels = streams.count, streams.count * config.hidden_size
        self.embedding = _Embedding(config, number, group, dtype)
        parts = {"key_proj": slice(0, channels), "value_proj": slice(0, config.hidden_size)}
        self.key_value = PackedLinear(slice(0, shape.width), parts, bias=False, dtype=dtype)
        self.norm_key, self.norm_query = StreamNorm(config, dtype), StreamNorm(config, dtype)
        self.norm_conv = StreamNorm(config, dtype)
        self.conv1d = _Channels(channels, shape.reach, dtype)
        self._state = SequenceState(
            (((shape.size - 1,), torch.int64), ((channels, (shape.reach - 1) * shape.size), dtype))
        )

    def cache_spec(self) -> SequenceState:
        """The last tokens, and the last inputs of the convolution."""
        return self._state

    def state_backend(self) -> NgramBackend:
        """That of the weights' device."""
        return NgramBackend(self.conv1d.weight.device)

    def forward(self, streams: Tensor, token_ids: Tensor, cache: StateCache, batch: NgramBatch) -> Tensor:
        """Streams [n, count · hidden] of tokens int [n] → what is added to them."""
        tokens, convolved = (StateCache([each]) for each in cache.tensors)
        ids = token_ids.long()
        key, value = self.key_value(self.embedding(ids, batch.before(ids, self._end, tokens))).split(
            [self._count * self._hidden, self._hidden], dim=1
        )
        both = self.norm_key(key) * self.norm_query(streams)
        gate = both.unflatten(1, (self._count, -1)).sum(dim=2) / math.sqrt(self._hidden)
        gate = sigmoid(gate.abs().clamp_min(_LEAST).sqrt() * gate.sign())
        own = (gate.unsqueeze(2) * value.unsqueeze(1)).flatten(1)
        seen = batch.convolve(self.norm_conv(own), self.conv1d.weight, self._size, convolved)
        out: Tensor = own + silu(seen)
        return out


_LEAST = 1e-6
"""Of a gate, before its root."""


class _Channels(nn.Module):
    """The convolution of all channels, [channels, reach]."""

    def __init__(self, channels: int, reach: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, reach, dtype=dtype), requires_grad=False)

    def targets(self, own: str, /) -> dict[str, Place]:
        """See `Placed`."""
        return {f"{own}.weight": lambda stored: fill(self.weight, stored[:].squeeze(1))}
