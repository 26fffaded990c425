"""A gated delta net as a layer's mixer: its projections, and its weights in a checkpoint."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from llm_service.layers.cache_spec import SequenceState, StateCache
from llm_service.layers.elementwise import sigmoid
from llm_service.layers.gdn.backend import GdnBackend, GdnBatch, GdnInput, GdnShape, GdnWeights
from llm_service.layers.gdn.choose import choose
from llm_service.layers.linear.parallel import PackedLinear
from llm_service.layers.linear.placement import Place, Stored, fill
from llm_service.layers.mixer import Rotary
from llm_service.layers.tensor_parallel import TensorGroup
from llm_service.model_config.state import GateActivation
from llm_service.model_config.text import TextConfig

_OPEN = 64.0
"""SiLU returns this unchanged in every type: with all gates at this value, outputs are multiplied by a power of two."""


class HeadWeights(nn.Module):
    """The parameters of this rank's heads besides products. `channels` are its ranges of the convolution, `values` its
    range of value heads; see `GdnWeights`."""

    def __init__(self, shape: GdnShape, channels: tuple[slice, ...], values: slice, dtype: torch.dtype) -> None:
        super().__init__()
        self._channels, self._values = channels, values

        def empty(*sizes: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
            return nn.Parameter(torch.empty(sizes, dtype=dtype), requires_grad=False)

        self.conv = empty(shape.channels, shape.width, dtype=dtype)
        self.a_log, self.dt_bias = empty(shape.value_heads), empty(shape.value_heads)
        self.gain = empty(shape.value_dim, dtype=dtype)

    def targets(self, _: str, /) -> dict[str, Place]:
        """See `Placed`."""
        return {
            "conv1d.weight": self._place_conv,
            "A_log": partial(self._place_heads, self.a_log),
            "dt_bias": partial(self._place_heads, self.dt_bias),
            "norm.weight": lambda stored: fill(self.gain, stored[:]),
        }

    def _place_conv(self, stored: Stored) -> None:
        fill(self.conv, torch.cat([stored[part].squeeze(1) for part in self._channels]))

    def _place_heads(self, parameter: Tensor, stored: Stored) -> None:
        fill(parameter, stored[self._values])


class GatedDeltaNet(nn.Module):
    """Value heads are shared among ranks by the key head that they read."""

    stored_as: ClassVar[str] = "linear_attn"

    def __init__(self, config: TextConfig, group: TensorGroup, dtype: torch.dtype) -> None:
        super().__init__()
        self._group = group
        assert config.delta_net is not None, "a layer of this kind needs them"
        sizes = config.delta_net
        keys = group.partition(sizes.key_heads)
        each = sizes.value_heads // sizes.key_heads
        values = slice(keys.start * each, keys.stop * each)
        self._eps, self._gates = config.norm_eps, config.delta_gates
        self.shape = GdnShape(
            keys.stop - keys.start, values.stop - values.start, sizes.key_dim, sizes.value_dim, sizes.width
        )
        all_keys = sizes.key_heads * sizes.key_dim
        channels = (
            _rows(keys, sizes.key_dim),
            _rows(keys, sizes.key_dim, all_keys),
            _rows(values, sizes.value_dim, 2 * all_keys),
        )
        own, whole = _rows(values, sizes.value_dim), slice(0, config.hidden_size)
        self.in_proj = PackedLinear(whole, {"in_proj_qkv": channels, "in_proj_z": own}, bias=False, dtype=dtype)
        gates = {"in_proj_a": values, "in_proj_b": values}  # few weights, whose effect accumulates over a whole prompt
        self.in_proj_ab = PackedLinear(whole, gates, bias=False, dtype=dtype, rounds=False)
        self.heads = HeadWeights(self.shape, channels, values, dtype)
        self.out = PackedLinear(own, {"out_proj": whole}, bias=False, dtype=dtype)
        self._state = self.shape.state(dtype)

    def cache_spec(self) -> SequenceState:
        """The last projected tokens, and the heads' states."""
        return self._state

    def state_backend(self) -> GdnBackend:
        """The best one of the weights' device."""
        return choose(self.shape, self.heads.conv.dtype, self.heads.conv.device)

    def project(self, x: Tensor, _: Rotary, /) -> tuple[Tensor, ...]:
        """x [n, hidden] → the fields of `GdnInput`, in order. Places count in the convolution, not by angles."""
        qkv, z = self.in_proj(x).split([self.shape.channels, self.shape.values], dim=1)
        a, b = self.in_proj_ab(x).chunk(2, dim=1)
        return qkv, z, a, b

    def mix(self, inputs: tuple[Tensor, ...], cache: StateCache, batch: GdnBatch) -> Tensor:
        """See `MixerPart`: this rank's heads [n, values]."""
        heads = self.heads
        weights = GdnWeights(heads.conv, heads.a_log, heads.dt_bias, heads.gain, self._eps)
        if self._gates is GateActivation.SILU:
            return batch.run(GdnInput(*inputs), weights, cache)
        qkv, z, a, b = inputs
        read = batch.run(GdnInput(qkv, torch.full_like(z, _OPEN), a, b), weights, cache)
        return read * (sigmoid(z.float()) / _OPEN).to(read.dtype)

    def join(self, mixed: Tensor) -> Tensor:
        """All ranks' heads → [n, hidden]."""
        return self._group.sum(self.out(mixed))


def _rows(heads: slice, dim: int, first: int = 0) -> slice:
    """The rows of some heads of `dim` rows each, which begin at a row.

    >>> _rows(slice(2, 4), 16, 100)
    slice(132, 164, None)
    """
    return slice(first + heads.start * dim, first + heads.stop * dim)
