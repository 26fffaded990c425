"""A feed-forward part, with gates and without."""

from __future__ import annotations

from statistics import NormalDist

import torch
from torch import Tensor, nn
from torch.nn import functional

from llm_service.families.gates import Gates
from llm_service.layers.elementwise import sigmoid
from llm_service.layers.linear.parallel import PackedLinear, RowParallelLinear
from llm_service.layers.ops import TORCH, RowOps
from llm_service.layers.tensor_parallel import TensorGroup
from llm_service.model_config.feed_forward import Activation


def act_and_mul(ops: RowOps, activation: Activation | Gates, x: Tensor, ends: Tensor | None = None) -> Tensor:
    """x [n, 2 · inner] → activation(first half) · second half, [n, inner], or as gates of another kind are opened, by
    torch's operators; `ends` as in `RowOps.silu_and_mul`."""
    if not isinstance(activation, Activation):
        gate, up = x.chunk(2, dim=-1)
        opened: Tensor = activation.opened(gate, up, sigmoid)
        return opened
    return (ops.silu_and_mul if activation is Activation.SILU else ops.gelu_and_mul)(x, ends)


class MLP(nn.Module):
    """down(activation(gate(x)) · up(x))."""

    ops: RowOps = TORCH

    def __init__(
        self,
        hidden: int,
        inner: int,
        group: TensorGroup,
        dtype: torch.dtype,
        *,
        activation: Activation | Gates = Activation.SILU,
        fused: bool = False,
        stored_as: str = "",
    ) -> None:
        """With `fused` a checkpoint has gate and up in one matrix, stacked; `stored_as` is the name of the whole, if it
        differs from the module's."""
        super().__init__()
        if stored_as:
            self.stored_as = stored_as
        self._group, self.activation = group, activation
        own, whole = group.partition(inner), slice(0, hidden)
        parts: dict[str, slice | tuple[slice, ...]] = {"gate_proj": own, "up_proj": own}
        if fused:
            parts = {"gate_up_proj": (own, slice(inner + own.start, inner + own.stop))}
        self.gate_up = PackedLinear(whole, parts, bias=False, dtype=dtype)
        self.down = PackedLinear(own, {"down_proj": whole}, bias=False, dtype=dtype)

    def run(self, x: Tensor) -> Tensor:
        """[n, hidden] → this rank's part of [n, hidden]."""
        out: Tensor = self.down(act_and_mul(self.ops, self.activation, self.gate_up(x)))
        return out

    def forward(self, x: Tensor) -> Tensor:
        """[n, hidden] → the same."""
        return self._group.sum(self.run(x))


class CutMLP(MLP):
    """Keeps only gates that exceed their mean by so many standard deviations, over all ranks, less that threshold: a
    `share` of normal numbers is below it (Lu et al. 2025, Spark Transformer)."""

    def __init__(
        self,
        hidden: int,
        inner: int,
        group: TensorGroup,
        dtype: torch.dtype,
        *,
        activation: Activation | Gates = Activation.SILU,
        share: float,
    ) -> None:
        super().__init__(hidden, inner, group, dtype, activation=activation)
        self._deviations, self._inner = NormalDist().inv_cdf(share), inner

    def run(self, x: Tensor) -> Tensor:
        """See `MLP.run`."""
        gates = self.gate_up(x)
        own, _ = gates.chunk(2, dim=-1)
        numbers = own.float()
        mean = self._mean(numbers)
        deviation = self._mean((numbers - mean).square()).sqrt()
        own.sub_((mean + deviation * self._deviations).to(own.dtype)).relu_()
        out: Tensor = self.down(act_and_mul(self.ops, self.activation, gates))
        return out

    def _mean(self, own: Tensor) -> Tensor:
        """[n, this rank's] → [n, 1], of all ranks'."""
        return self._group.sum(own.sum(dim=-1, keepdim=True)) / self._inner


class SquaredMLP(nn.Module):
    """down(relu(up(x))²), without gates (So et al. 2021, Primer)."""

    def __init__(
        self,
        hidden: int,
        inner: int,
        group: TensorGroup,
        dtype: torch.dtype,
        *,
        stored_as: str = "",
        biases: bool = False,
    ) -> None:
        """`stored_as` is as in `MLP`; with `biases` both products have some."""
        super().__init__()
        if stored_as:
            self.stored_as = stored_as
        self._group = group
        own, whole = group.partition(inner), slice(0, hidden)
        self.up = PackedLinear(whole, {"up_proj": own}, bias=biases, dtype=dtype)
        self.down = RowParallelLinear(own, {"down_proj": whole}, group, bias=biases, dtype=dtype)

    def run(self, x: Tensor) -> Tensor:
        """See `MLP.run`."""
        out: Tensor = self.down(self.between(self.up(x)))
        return out

    def between(self, x: Tensor) -> Tensor:
        """The part between the products, [n, inner] → the same."""
        return squared_relu(x)

    def forward(self, x: Tensor) -> Tensor:
        """[n, hidden] → the same."""
        return self._group.sum(self.run(x))


class PlainReluMLP(SquaredMLP):
    """down(relu(up(x)))."""

    def between(self, x: Tensor) -> Tensor:
        """See `SquaredMLP.between`."""
        return functional.relu(x)


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)², element by element."""
    return functional.relu(x).square_()
