"""Short convolutions by kernels against torch's operators, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llm_service.layers.cache_spec import Segment, SequenceState, StateCache
from llm_service.layers.gpu.short_convolution import ConvolutionKernelBackend
from llm_service.layers.recurrent.short_convolution import ConvolutionBackend

SIZES = ((300, 3), (48, 4))
"""Channels, more than one program takes or fewer, and how many tokens a convolution sees."""
COUNTS = ((1, 1, 1), (2, 130, 1, 65, 7), (64,))
"""How many tokens of each sequence are in a batch."""
NEAR = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}


@dataclass(frozen=True, slots=True)
class Case:
    """What tokens are convolved with, and tokens of some sequences one after the other."""

    weight: Tensor
    x: Tensor

    @classmethod
    def drawn(cls, size: tuple[int, int], tokens: int, dtype: torch.dtype, device: str = "cpu") -> Case:
        random = torch.Generator().manual_seed(tokens)
        weight, x = torch.randn(size, generator=random), torch.randn(tokens, size[0], generator=random)
        return cls(weight.to(device, dtype), x.to(device, dtype))

    def states(self, slots: int) -> StateCache:
        """In which nothing is a number, so that whoever reads a slot before it is written shows."""
        channels, width = self.weight.shape
        cache = SequenceState((((channels, width - 1), self.x.dtype),)).new_cache(slots, self.x.device)
        cache.tensors[0].fill_(torch.nan)
        return cache


def segments_of(counts: Sequence[int], *, fresh: bool) -> list[Segment]:
    """A sequence each, in slots from the last one to 1."""
    begins = [sum(counts[:index]) for index in range(len(counts))]
    slots = range(len(counts), 0, -1)
    return [
        Segment(begin, begin + count, slot, fresh) for begin, count, slot in zip(begins, counts, slots, strict=True)
    ]


def check(case: Case, counts: Sequence[int]) -> None:
    """Sequences begin in a batch, go on in another, and then come token by token."""
    cache, expected = case.states(len(counts) + 2), case.states(len(counts) + 2)
    kernels, plain = ConvolutionKernelBackend(case.x.device), ConvolutionBackend(case.x.device)
    alone = [Segment(at, at + 1, slot, fresh=False) for at, slot in enumerate(range(1, len(counts) + 1))]
    for segments in (segments_of(counts, fresh=True), segments_of(counts, fresh=False), alone):
        x = case.x[: segments[-1].end]
        given = kernels.batch(segments).run(x, case.weight, cache)
        near = plain.batch(segments).run(x, case.weight, expected)
        torch.testing.assert_close(given, near, rtol=NEAR[x.dtype], atol=NEAR[x.dtype])
        torch.testing.assert_close(cache.tensors, expected.tensors, rtol=0, atol=0, equal_nan=True)


def check_copies(case: Case) -> None:
    """States that a run passes go to other slots as well, and the run goes on as if they did not."""
    total, backend = len(case.x), ConvolutionKernelBackend(case.x.device)
    cut, whole = case.states(4), case.states(4)
    segments = [
        Segment(0, 128, 1, fresh=True, copy=3),
        Segment(128, 192, 1, fresh=False, copy=0, context=128),
        Segment(192, total, 1, fresh=False, context=192),
    ]
    out = backend.batch(segments).run(case.x, case.weight, cut)
    assert torch.equal(out, backend.batch([Segment(0, total, 1, fresh=True)]).run(case.x, case.weight, whole))
    for count, copy in ((128, 3), (192, 0)):
        backend.batch([Segment(0, count, 2, fresh=True)]).run(case.x[:count], case.weight, whole)
        assert torch.equal(cut.tensors[0][copy], whole.tensors[0][2])


def check_padding(case: Case, counts: Sequence[int]) -> None:
    """Metadata with room for more, in which other numbers stood, computes these sequences and touches nothing else."""
    tokens, backend = sum(counts), ConvolutionKernelBackend(case.x.device)
    cache, alone, decodes_only = case.states(8), case.states(8), tokens == len(counts)
    metadata = backend.padding(len(case.x), len(counts) + 2, decodes_only=decodes_only)
    segments = segments_of(counts, fresh=True)
    before = segments_of([1] * (len(counts) + 2) if decodes_only else [len(case.x)], fresh=True)
    for given in (before, segments):
        metadata.packed.copy_(torch.from_numpy(metadata.numbers(given)))
    out = backend.over(metadata).run(case.x, case.weight, cache)
    assert torch.equal(out[:tokens], backend.batch(segments).run(case.x[:tokens], case.weight, alone))
    torch.testing.assert_close(cache.tensors, alone.tensors, rtol=0, atol=0, equal_nan=True)
