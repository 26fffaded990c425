"""Mamba-2 as a layer's mixer: its projections, and its weights in a checkpoint."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from llm_service.layers.cache_spec import SequenceState, StateCache
from llm_service.layers.linear.parallel import PackedLinear
from llm_service.layers.linear.placement import Place, Stored, fill, length
from llm_service.layers.mamba2.backend import Mamba2Backend, Mamba2Batch, Mamba2Input, Mamba2Shape, Mamba2Weights
from llm_service.layers.mamba2.choose import choose
from llm_service.layers.mixer import Rotary
from llm_service.layers.tensor_parallel import TensorGroup
from llm_service.model_config.state import Mamba2Config
from llm_service.model_config.text import TextConfig


class Mamba2Heads(nn.Module):
    """The parameters of this rank's heads besides products. `channels` are its ranges of the convolution, `heads` its
    range of heads, and `values` that of their outputs; see `Mamba2Weights`."""

    def __init__(
        self, sizes: Mamba2Config, channels: tuple[slice, ...], heads: slice, values: slice, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self._channels, self._heads, self._values = channels, heads, values
        count, self._has_bias = sum(map(length, channels)), sizes.bias

        def empty(*sizes: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
            return nn.Parameter(torch.empty(sizes, dtype=dtype), requires_grad=False)

        self.conv, self.conv_bias = empty(count, sizes.width, dtype=dtype), empty(count, dtype=dtype).zero_()
        self.a_log, self.dt_bias, self.d = (empty(length(heads)) for _ in range(3))
        self.gain = empty(length(values), dtype=dtype)

    def targets(self, _: str, /) -> dict[str, Place]:
        """See `Placed`."""
        bias: dict[str, Place] = {"conv1d.bias": lambda stored: fill(self.conv_bias, self._convolved(stored))}
        return (bias if self._has_bias else {}) | {
            "conv1d.weight": lambda stored: fill(self.conv, self._convolved(stored).squeeze(1)),
            "A_log": partial(self._place_heads, self.a_log),
            "dt_bias": partial(self._place_heads, self.dt_bias),
            "D": partial(self._place_heads, self.d),
            "norm.weight": lambda stored: fill(self.gain, stored[self._values]),
        }

    def _convolved(self, stored: Stored) -> Tensor:
        return torch.cat([stored[part] for part in self._channels])

    def _place_heads(self, parameter: Tensor, stored: Stored) -> None:
        fill(parameter, stored[self._heads])


class Mamba2(nn.Module):
    """Heads are shared among ranks by their groups."""

    stored_as: ClassVar[str] = "mixer"

    def __init__(self, config: TextConfig, group: TensorGroup, dtype: torch.dtype) -> None:
        super().__init__()
        self._group, self._eps = group, config.norm_eps
        assert config.mamba2 is not None, "a layer of this kind needs them"
        sizes = config.mamba2
        groups, heads = group.partition(sizes.groups), group.partition(sizes.heads)
        values, keys = _numbers(heads, sizes.head_dim), _numbers(groups, sizes.state_dim)
        self.shape = Mamba2Shape(
            length(groups), length(heads), sizes.head_dim, sizes.state_dim, sizes.width, sizes.least_step
        )
        all_values, all_keys = sizes.heads * sizes.head_dim, sizes.groups * sizes.state_dim
        channels = values, _from(all_values, keys), _from(all_values + all_keys, keys)
        projected = values, *(_from(all_values, part) for part in channels), _from(2 * (all_values + all_keys), heads)
        whole = slice(0, config.hidden_size)
        self.in_proj = PackedLinear(whole, {"in_proj": projected}, bias=False, dtype=dtype)
        self.heads = Mamba2Heads(sizes, channels, heads, values, dtype)
        self.out = PackedLinear(values, {"out_proj": whole}, bias=False, dtype=dtype)
        self._state = self.shape.state(dtype)

    def cache_spec(self) -> SequenceState:
        """The last projected tokens, and the heads' states."""
        return self._state

    def state_backend(self) -> Mamba2Backend:
        """The best one of the weights' device."""
        return choose(self.shape, self.heads.conv.dtype, self.heads.conv.device)

    def project(self, x: Tensor, _: Rotary, /) -> tuple[Tensor, ...]:
        """x [n, hidden] → the fields of `Mamba2Input`, in order."""
        z, xbc, dt = self.in_proj(x).split([self.shape.values, self.shape.channels, self.shape.heads], dim=1)
        return z, xbc, dt

    def mix(self, inputs: tuple[Tensor, ...], cache: StateCache, batch: Mamba2Batch) -> Tensor:
        """See `MixerPart`: this rank's heads [n, values]."""
        own = self.heads
        weights = Mamba2Weights(own.conv, own.conv_bias, own.a_log, own.dt_bias, own.d, own.gain, self._eps)
        return batch.run(Mamba2Input(*inputs), weights, cache)

    def join(self, mixed: Tensor) -> Tensor:
        """All ranks' heads → [n, hidden]."""
        return self._group.sum(self.out(mixed))


def _numbers(parts: slice, each: int) -> slice:
    """Those of some parts of so many each.

    >>> _numbers(slice(2, 4), 16)
    slice(32, 64, None)
    """
    return slice(parts.start * each, parts.stop * each)


def _from(first: int, part: slice) -> slice:
    """A range shifted by `first`."""
    return slice(first + part.start, first + part.stop)
