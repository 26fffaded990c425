"""Kimi Delta Attention as a layer's mixer: its projections, and its weights in a checkpoint."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from llm_service.layers.cache_spec import SequenceState, StateCache
from llm_service.layers.kda.backend import KdaBackend, KdaBatch, KdaInput, KdaShape, KdaWeights
from llm_service.layers.kda.choose import choose
from llm_service.layers.linear.parallel import PackedLinear
from llm_service.layers.linear.placement import Place, Stored, fill, length
from llm_service.layers.mixer import Rotary
from llm_service.layers.tensor_parallel import TensorGroup
from llm_service.model_config.text import TextConfig


class KimiDeltaWeights(nn.Module):
    """The parameters of this rank's `heads` besides products; `channels` are its ranges of the convolution; see
    `KdaWeights`."""

    def __init__(self, shape: KdaShape, channels: tuple[slice, ...], heads: slice) -> None:
        super().__init__()
        self._channels, self._heads, self._values = channels, heads, channels[0]

        def empty(*sizes: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(sizes, dtype=torch.float32), requires_grad=False)

        self.conv, self.gain = empty(shape.channels, shape.width), empty(shape.head_dim)
        self.a_log, self.dt_bias = empty(shape.heads), empty(shape.values)

    def targets(self, _: str, /) -> dict[str, Place]:
        """See `Placed`."""
        return {
            "conv1d.weight": self._place_conv,
            "forget_gate.A_log": partial(self._place_part, self.a_log, self._heads),
            "forget_gate.dt_bias": partial(self._place_part, self.dt_bias, self._values),
            "o_norm.weight": lambda stored: fill(self.gain, stored[:]),
        }

    def _place_conv(self, stored: Stored) -> None:
        fill(self.conv, torch.cat([stored[part].squeeze(1) for part in self._channels]))

    def _place_part(self, parameter: Tensor, own: slice, stored: Stored) -> None:
        fill(parameter, stored[own])


class KimiDeltaAttention(nn.Module):
    """Heads are split over ranks. Decays and gates are made through as many numbers as a head has, which each rank
    computes."""

    stored_as: ClassVar[str] = "self_attn"

    def __init__(self, config: TextConfig, group: TensorGroup, dtype: torch.dtype) -> None:
        super().__init__()
        self._group, sizes = group, config.kimi_delta
        assert sizes is not None, "a layer of this kind needs them"
        own, dim, every = group.partition(sizes.heads), sizes.head_dim, sizes.heads * sizes.head_dim
        values = slice(own.start * dim, own.stop * dim)
        self._eps, self._least, self._dtype = config.norm_eps, sizes.least, dtype
        self.shape = KdaShape(length(own), dim, sizes.width)
        whole, narrow, linear = slice(0, config.hidden_size), slice(0, dim), partial(PackedLinear, bias=False)
        short = partial(linear, dtype=dtype, rounds=False)  # few weights, whose effect accumulates over a whole prompt
        self.qkv = linear(whole, {f"{each}_proj": values for each in "qkv"}, dtype=dtype)
        self.narrow = short(whole, {"forget_gate.f_a_proj": narrow, "g_a_proj": narrow})
        self.fading = short(narrow, {"forget_gate.f_b_proj": values})
        self.gates = short(narrow, {"g_b_proj": values})
        self.learned = short(whole, {"b_proj": own})
        channels = tuple(slice(each * every + values.start, each * every + values.stop) for each in range(3))
        self.channels = KimiDeltaWeights(self.shape, channels, own)
        self.out = linear(values, {"o_proj": whole}, dtype=dtype)
        self._state = self.shape.state(dtype)

    def cache_spec(self) -> SequenceState:
        """The last projected tokens, and the heads' states."""
        return self._state

    def state_backend(self) -> KdaBackend:
        """The best one of the weights' device."""
        return choose(self.shape, self._dtype, self.channels.conv.device)

    def project(self, x: Tensor, _: Rotary, /) -> tuple[Tensor, ...]:
        """x [n, hidden] → the fields of `KdaInput`, in order. Places count in the convolution, not by angles."""
        fading, gates = self.narrow(x).chunk(2, dim=1)
        return self.qkv(x), self.gates(gates), self.fading(fading), self.learned(x)

    def mix(self, inputs: tuple[Tensor, ...], cache: StateCache, batch: KdaBatch) -> Tensor:
        """See `MixerPart`: this rank's heads [n, values]."""
        own = self.channels
        weights = KdaWeights(own.conv, own.a_log, own.dt_bias, own.gain, self._eps, self._least)
        return batch.run(KdaInput(*inputs), weights, cache)

    def join(self, mixed: Tensor) -> Tensor:
        """All ranks' heads → [n, hidden]."""
        return self._group.sum(self.out(mixed))
