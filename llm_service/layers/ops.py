"""What a decoder does to its rows between two products: norms, rotary positions, gates, routes to experts; and who does
it, torch's operators or a device's kernels."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from llm_service.layers.elementwise import gelu, silu
from llm_service.layers.linear import Place, Stored, fill
from llm_service.model_config.rotary import RotaryConfig, RotaryScaling
from llm_service.model_config.text import TextConfig

Pair = tuple[Tensor, Tensor]


class Routes(NamedTuple):
    """Rows sorted by expert, the n · per_token that they are with one for each choice: `rows` [m] are where they come
    from, `places` [m] where each choice's row is, `ends` int32 [experts] behind which row each expert's end. Rows of
    experts that another rank has are behind all others, and of their choices the place is −1."""

    rows: Tensor
    places: Tensor
    ends: Tensor


class RowOps(Protocol):
    """Done by `TorchOps`, by Triton's kernels (`gpu.row_ops`) or by numba's (`cpu.row_kernels.NumbaOps`)."""

    def rms_norm(self, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        """x [n, size], whose rows may be apart, over the root of each row's mean square, times gain [size] → [n, size].
        Computed in float32, returned in the type of x, to which it is rounded before a gain of that type, and after a
        gain in float32."""
        ...

    def add_rms_norm(self, x: Tensor, more: Tensor, gain: Tensor, eps: float) -> Pair:
        """x and more [n, size], of one type → their sum, in that type, and what `rms_norm` gives of it."""
        ...

    def qk_norm_rotary(
        self, x: Tensor, rotary: tuple[Tensor, ...], queries: int, keys: int, gains: Pair | None, eps: float
    ) -> Tensor:
        """Rotates the first heads of x [n, queries + keys or more, head_dim] by the angles of each token → [n, queries
        + keys, head_dim].

        `rotary` is cosine and sine, [n, 1, rotary_dim] each, in the type of x; what of a head is behind rotary_dim
        stays as it is. With `gains`, [head_dim] for queries and for keys, each head is first normed, as `rms_norm`
        does.
        """
        ...

    def silu_and_mul(self, x: Tensor, ends: Tensor | None = None) -> Tensor:
        """x [n, 2 · inner] → silu(first half) · second half, [n, inner]. With the `ends` of `Routes` rows behind the
        last of them may be left as anything."""
        ...

    def gelu_and_mul(self, x: Tensor, ends: Tensor | None = None) -> Tensor:
        """The same with gelu, by its hyperbolic tangent."""
        ...

    def route(self, logits: Tensor, per_token: int) -> Pair:
        """logits [n, experts] → weights of the likeliest experts of each row, in the type of the logits, which sum up
        to 1, and which these are, integers; [n, per_token] each. The softmax is one in float32."""
        ...

    def sort_by_expert(self, chosen: Tensor, experts: int, own: slice | None = None) -> Routes:
        """Of what `route` chose; rows of one expert stay in order. This rank has the `own` of all experts, None: it has
        all. Nothing is asked of the device, so that this can be captured."""
        ...

    def weighted_sum(self, x: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        """x [m, hidden], sorted by expert → [n, hidden]: for each row of weights [n, per_token] the sum of its choices'
        rows, each times its weight, in the order of the choices. One whose place is −1 adds nothing."""
        ...


class TorchOps:
    """Torch's operators, for every device and type; see `RowOps`."""

    def rms_norm(self, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        """[n, size] or [n, heads, size] → the same."""
        if x.dtype == torch.float32:
            return functional.rms_norm(x, gain.shape, gain, eps)
        if gain.dtype == torch.float32:
            return functional.rms_norm(x.float(), gain.shape, gain, eps).to(x.dtype)
        return gain * functional.rms_norm(x.float(), gain.shape, None, eps).to(x.dtype)

    def add_rms_norm(self, x: Tensor, more: Tensor, gain: Tensor, eps: float) -> Pair:
        """See `RowOps`."""
        total = x + more
        return total, self.rms_norm(total, gain, eps)

    def qk_norm_rotary(
        self, x: Tensor, rotary: tuple[Tensor, ...], queries: int, keys: int, gains: Pair | None, eps: float
    ) -> Tensor:
        """See `RowOps`."""
        heads = x[:, : queries + keys]
        if gains is not None:
            both = zip(heads.split([queries, keys], dim=1), gains, strict=True)
            heads = torch.cat([self.rms_norm(part, gain, eps) for part, gain in both], dim=1)
        return apply_rotary(heads, *rotary)

    def silu_and_mul(self, x: Tensor, ends: Tensor | None = None) -> Tensor:  # noqa: ARG002 - all are computed
        """See `RowOps`."""
        gate, up = x.chunk(2, dim=-1)
        return silu(gate).mul_(up)

    def gelu_and_mul(self, x: Tensor, ends: Tensor | None = None) -> Tensor:  # noqa: ARG002 - all are computed
        """See `RowOps`."""
        gate, up = x.chunk(2, dim=-1)
        return gelu(gate).mul_(up)

    def route(self, logits: Tensor, per_token: int) -> Pair:
        """See `RowOps`."""
        weights, chosen = logits.float().softmax(-1).topk(per_token, dim=-1)
        return (weights / weights.sum(-1, keepdim=True)).to(logits.dtype), chosen

    def sort_by_expert(self, chosen: Tensor, experts: int, own: slice | None = None) -> Routes:
        """See `RowOps`."""
        flat, others = chosen.flatten(), None
        if own is not None and own.stop - own.start < experts:
            others = (flat < own.start) | (flat >= own.stop)
            experts = own.stop - own.start
            flat = (flat - own.start).masked_fill(others, experts)
        order = flat.argsort(stable=True)
        counts = torch.zeros(experts + 1, dtype=torch.int32, device=flat.device)
        counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=flat.device)
        places = places if others is None else places.masked_fill_(others, -1)
        return Routes(order // chosen.shape[1], places, counts[:experts].cumsum(0, dtype=torch.int32))

    def weighted_sum(self, x: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        """See `RowOps`."""
        there = (places >= 0).view(*weights.shape, 1)
        return torch.where(there, x[places].view(*weights.shape, x.shape[1]) * weights.unsqueeze(-1), 0.0).sum(1)


TORCH = TorchOps()


def apply_rotary(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turns each pair (i, i + rotary_dim / 2), of the first rotary_dim numbers of x [n, heads, head_dim], by its
    angle."""
    dim = cosine.shape[-1]
    x, rest = x[..., :dim], x[..., dim:]
    others = torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], dim=-1)
    rotated = x * cosine + others * sine
    return torch.cat([rotated, rest], dim=-1) if rest.shape[-1] else rotated


def use_ops(module: nn.Module, ops: RowOps) -> None:
    """Has every part of a module that has `ops` compute with these."""
    for part in module.modules():
        if hasattr(part, "ops"):
            vars(part)["ops"] = ops


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last dimension (Zhang and Sennrich 2019).

    Where it is `zero_centred` a checkpoint has the weight less 1. The sum needs more digits than 16 bits have; a
    `long_gain` has them as well. `stored_as` is its name in a checkpoint, if that is not its attribute's.
    """

    ops: RowOps = TORCH

    def __init__(
        self,
        size: int,
        eps: float,
        dtype: torch.dtype,
        *,
        zero_centred: bool = False,
        long_gain: bool = False,
        stored_as: str = "",
    ) -> None:
        super().__init__()
        self.eps = eps
        if stored_as:
            self.stored_as = stored_as
        self._zero_centred = zero_centred
        kept = torch.float32 if zero_centred or long_gain else dtype
        self.weight = nn.Parameter(torch.empty(size, dtype=kept), requires_grad=False)

    @classmethod
    def of(
        cls,
        config: TextConfig,
        size: int,
        dtype: torch.dtype,
        stored_as: str = "",
        *,
        eps: float | None = None,
        last: bool = False,
    ) -> Self:
        """One of a decoder's, with the eps that its configuration states, unless it is given; `last`: behind all
        layers."""
        whole = last and config.family.norms.plain_final
        zero_centred = config.family.norms.zero_centred and not whole
        long_gain = config.family.norms.float32_weights or whole
        eps = config.norm_eps if eps is None else eps
        return cls(size, eps, dtype, zero_centred=zero_centred, long_gain=long_gain, stored_as=stored_as)

    def targets(self, own: str) -> dict[str, Place]:
        """See `Placed`."""
        return {f"{own}.weight": self._place}

    def _place(self, stored: Stored) -> None:
        fill(self.weight, stored[:].float() + 1 if self._zero_centred else stored[:])

    def forward(self, x: Tensor) -> Tensor:
        """[n, size] → the same."""
        return self.ops.rms_norm(x, self.weight, self.eps)

    def after_adding(self, x: Tensor, more: Tensor | None) -> Pair:
        """[n, size] each → their sum, and its norm; of x alone where there is no more."""
        if more is None:
            return x, self(x)
        return self.ops.add_rms_norm(x, more, self.weight, self.eps)


class PlainNorm(RMSNorm):
    """One without a weight, which is 1."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, **given: Any) -> None:
        super().__init__(size, eps, dtype, **given)
        self.weight.fill_(1.0)

    def targets(self, _: str) -> dict[str, Place]:
        """There are none."""
        return {}


class LayerNorm(RMSNorm):
    """(x - mean(x)) / deviation(x) · weight over the last dimension (Ba, Kiros and Hinton 2016), without a bias."""

    def forward(self, x: Tensor) -> Tensor:
        """[n, size] → the same."""
        return functional.layer_norm(x, self.weight.shape, self.weight, None, self.eps)

    def after_adding(self, x: Tensor, more: Tensor | None) -> Pair:
        """See `RMSNorm`."""
        total = x if more is None else x + more
        return total, self(total)


class BiasedLayerNorm(LayerNorm):
    """The same with a bias."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, **given: Any) -> None:
        super().__init__(size, eps, dtype, **given)
        self.bias = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)

    def targets(self, own: str) -> dict[str, Place]:
        """See `Placed`."""
        return {**super().targets(own), f"{own}.bias": self._place_bias}

    def _place_bias(self, stored: Stored) -> None:
        fill(self.bias, stored[:])

    def forward(self, x: Tensor) -> Tensor:
        """[n, size] → the same."""
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class Unnormed(nn.Module):
    """Stands where a layer has no norm."""

    def after_adding(self, x: Tensor, more: Tensor | None) -> Pair:
        """[n, size] each → their sum, twice."""
        total = x if more is None else x + more
        return total, total


def norm_of(
    config: TextConfig, dtype: torch.dtype, stored_as: str = "", *, eps: float | None = None, last: bool = False
) -> RMSNorm:
    """One of what a decoder's layers hand on, of its family's kind; see `RMSNorm.of`."""
    kind = RMSNorm
    if config.family.norms.layer_norm:
        kind = BiasedLayerNorm if config.family.norms.biases else LayerNorm
    return kind.of(config, config.hidden_size, dtype, stored_as, eps=eps, last=last)


class MultimodalRotary(nn.Module):
    """Makes cosine and sine tables for a batch, of the `dim` numbers of a head that are rotated; built once, shared by
    all layers."""

    def __init__(
        self,
        dim: int,
        theta: float,
        sections: tuple[int, int, int],
        *,
        interleaved: bool,
        device: torch.device,
        scaling: RotaryScaling | None = None,
        space_first: bool = False,
    ) -> None:
        """See `RotaryConfig`."""
        super().__init__()
        self._magnitude = 1.0 if scaling is None else scaling.magnitude
        pairs = torch.arange(0, dim, 2, dtype=torch.float32, device=device)
        turns = axes_in_space(sections) if space_first else axis_of_pairs(sections, interleaved=interleaved)
        axes = torch.tensor(turns, dtype=torch.int64, device=device)
        self._frequencies: Tensor  # [dim / 2], as the axis of each pair is
        self._axis: Tensor
        frequencies = 1.0 / theta ** (pairs / dim)
        if scaling is not None:
            kept = kept_shares(frequencies, theta, scaling)
            frequencies = frequencies * (kept + (1 - kept) / scaling.factor)
        self.register_buffer("_frequencies", frequencies, persistent=False)
        self.register_buffer("_axis", axes, persistent=False)

    @classmethod
    def of(cls, config: RotaryConfig, device: torch.device) -> Self:
        """What makes the tables of a configuration."""
        given = config.dim, config.theta, config.sections
        return cls(
            *given,
            interleaved=config.interleaved,
            device=device,
            scaling=config.scaling,
            space_first=config.space_first,
        )

    def tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """int [3, n] → cosine and sine, each [n, 1, dim] in `dtype`."""
        return self.of_angles(positions[self._axis].float().t() * self._frequencies, dtype)

    def of_angles(self, turns: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The same of the angles of pairs, float32 [n, dim / 2]."""
        turns = torch.cat([turns, turns], dim=-1).unsqueeze(1)
        cosine, sine = turns.cos(), turns.sin()
        if self._magnitude != 1:
            cosine, sine = cosine * self._magnitude, sine * self._magnitude
        return cosine.to(dtype), sine.to(dtype)


def kept_shares(frequencies: Tensor, theta: float, scaling: RotaryScaling) -> Tensor:
    """How much of its frequency each pair [dim / 2] keeps, the rest being divided; see `RotaryScaling`. Llama 3 goes by
    the turns of a pair in the original context, YaRN by the pairs' numbers between the two of so many turns."""
    if scaling.kind == "linear":
        return torch.zeros_like(frequencies)
    if scaling.kind == "llama3":
        turns = scaling.original * frequencies / (2 * math.pi)
        return ((turns - scaling.slow) / (scaling.fast - scaling.slow)).clamp(0, 1)
    count = len(frequencies)
    if scaling.kind == "proportional":
        return (torch.arange(count, device=frequencies.device) < int(scaling.share * count)).float()

    def pair_of(turns: float) -> float:
        return count * math.log(scaling.original / (2 * math.pi * turns)) / math.log(theta)

    first, last = pair_of(scaling.fast), pair_of(scaling.slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * count - 1)
    numbers = torch.arange(count, dtype=torch.float32, device=frequencies.device)
    return 1 - ((numbers - first) / (last - first or 0.001)).clamp(0, 1)


def axis_of_pairs(sections: tuple[int, int, int], *, interleaved: bool) -> list[int]:
    """Which axis (0 time, 1 height, 2 width) turns each pair of a head.

    >>> axis_of_pairs((2, 1, 1), interleaved=False)
    [0, 0, 1, 2]
    >>> axis_of_pairs((2, 1, 1), interleaved=True)
    [0, 1, 2, 0]
    """
    if not interleaved:
        return [axis for axis, count in enumerate(sections) for _ in range(count)]
    axes = [0] * sum(sections)
    for axis in (1, 2):
        axes[axis : sections[axis] * 3 : 3] = [axis] * len(axes[axis : sections[axis] * 3 : 3])
    return axes


def axes_in_space(sections: tuple[int, int, int]) -> list[int]:
    """The same, where height and width turn as many pairs in turns, and time those behind them.

    >>> axes_in_space((1, 2, 2))
    [1, 2, 1, 2, 0]
    """
    time, height, _ = sections
    return [1, 2] * height + [0] * time
