"""A gated short convolution as a layer's mixer: out(C · convolve(B · x)), where B, C and x are projections of a
token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from llm_service.layers.cache_spec import Segment, SequenceState, StateCache
from llm_service.layers.linear.parallel import PackedLinear
from llm_service.layers.linear.placement import Place, Stored, fill, length
from llm_service.layers.mixer import Rotary, StateBackend
from llm_service.layers.recurrent.backend import CHUNK
from llm_service.layers.recurrent.convolution import Steps, convolve_run, convolve_steps
from llm_service.layers.tensor_parallel import TensorGroup
from llm_service.model_config.text import TextConfig


class Convolves(Protocol):
    """A batch, for all back ends."""

    def run(self, x: Tensor, weight: Tensor, cache: StateCache) -> Tensor:
        """x [n, channels], weight [channels, width] → [n, channels]; each segment's slot has its last tokens
        afterwards."""
        ...


@dataclass(frozen=True, slots=True)
class ConvolutionBatch:
    """By torch's operators. Of a step: `runs` of tokens in their order, and then the sequences' last ones that come
    alone."""

    runs: tuple[Segment, ...]
    steps: list[Steps]

    def run(self, x: Tensor, weight: Tensor, cache: StateCache) -> Tensor:
        """See `Convolves`."""
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        for run in self.runs:
            (before,) = cache.read(run)
            out[run.begin : run.end], after = convolve_run(x[run.begin : run.end], before, weight)
            cache.write(run, [after])
        (states,) = cache.tensors
        for steps in self.steps:
            out[steps.rows], states[steps.slots] = convolve_steps(x[steps.rows], steps.read(states), weight)
        return out


class ConvolutionBackend:
    """Makes batches of torch's operators."""

    name = "torch"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def batch(self, segments: Sequence[Segment]) -> ConvolutionBatch:
        """See `StateBackend`.

        >>> cuts = [Segment(0, 1, 4, fresh=False), Segment(1, 17, 7, fresh=True, copy=9)]
        >>> batch = ConvolutionBackend(torch.device("cpu")).batch([*cuts, Segment(17, 18, 7, fresh=False)])
        >>> [(run.begin, run.end) for run in batch.runs], [steps.rows.tolist() for steps in batch.steps]
        ([(1, 17)], [[0, 17]])
        """
        alone: list[Segment] = []
        runs: list[Segment] = []
        for segment in segments:
            (alone if segment.end - segment.begin == 1 and segment.copy < 0 else runs).append(segment)
        return ConvolutionBatch(tuple(runs), Steps.of([alone] if alone else [], self._device))


def backend_on(device: torch.device) -> StateBackend:
    """Our kernels on a GPU, if they run there; else torch's operators."""
    if device.type == "cuda":
        from llm_service.layers.gpu import row_kernels  # not everywhere is a Triton

        if row_kernels.run_on(device):
            from llm_service.layers.gpu.short_convolution import ConvolutionKernelBackend

            return ConvolutionKernelBackend(device)
    return ConvolutionBackend(device)


class ChannelWeights(nn.Module):
    """This rank's convolution weights, [channels, width]."""

    def __init__(self, channels: slice, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._channels = channels
        self.weight = nn.Parameter(torch.empty(length(channels), width, dtype=dtype), requires_grad=False)

    def targets(self, own: str, /) -> dict[str, Place]:
        """See `Placed`."""
        return {f"{own}.weight": self._place}

    def _place(self, stored: Stored) -> None:
        fill(self.weight, stored[self._channels].squeeze(1))


class ShortConvolution(nn.Module):
    """Channels are shared among ranks."""

    stored_as: ClassVar[str] = "conv"

    def __init__(self, config: TextConfig, group: TensorGroup, dtype: torch.dtype) -> None:
        super().__init__()
        self._group = group
        hidden, width = config.hidden_size, config.convolution_width
        own, whole = group.partition(hidden), slice(0, hidden)
        self._channels = length(own)
        parts = tuple(slice(first + own.start, first + own.stop) for first in (0, hidden, 2 * hidden))
        self.in_proj = PackedLinear(whole, {"in_proj": parts}, bias=False, dtype=dtype)
        self.conv = ChannelWeights(own, width, dtype)
        self.out = PackedLinear(own, {"out_proj": whole}, bias=False, dtype=dtype)
        self._kept = (((self._channels, width - 1), dtype),)

    def cache_spec(self) -> SequenceState:
        """The last inputs of the convolution. On a GPU sequences are cut where tiles of the kernels end."""
        return SequenceState(self._kept, CHUNK if self.conv.weight.device.type == "cuda" else 1)

    def state_backend(self) -> StateBackend:
        """That of the weights' device."""
        return backend_on(self.conv.weight.device)

    def project(self, x: Tensor, _: Rotary, /) -> tuple[Tensor, ...]:
        """x [n, hidden] → the convolution's input, and the gate of its output, [n, channels] each."""
        before, behind, own = self.in_proj(x).split(self._channels, dim=1)
        return before * own, behind

    def mix(self, inputs: tuple[Tensor, ...], cache: StateCache, batch: Convolves) -> Tensor:
        """See `MixerPart`: this rank's [n, channels]."""
        x, gates = inputs
        return gates * batch.run(x, self.conv.weight, cache)

    def join(self, mixed: Tensor) -> Tensor:
        """All ranks' channels → [n, hidden]."""
        return self._group.sum(self.out(mixed))
