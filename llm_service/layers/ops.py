"""Operations on rows between products: norms, rotary positions, gates, routing to experts; by torch's operators or a
device's kernels."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from llm_service.layers.elementwise import gelu, silu

Pair = tuple[Tensor, Tensor]


class Routes(NamedTuple):
    """Rows sorted by expert, n · per_token of them, one for each choice: `rows` [m] are where they come from, `places`
    [m] where each choice's row is, `ends` int32 [experts] the end of each expert's rows. Rows of experts on other ranks
    are behind all others, and the place of their choices is −1."""

    rows: Tensor
    places: Tensor
    ends: Tensor


class RowOps(Protocol):
    """Done by `TorchOps`, by Triton's kernels (`gpu.row_ops`) or by numba's (`cpu.row_kernels.NumbaOps`)."""

    def rms_norm(self, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        """x [n, size], whose rows may be strided, divided by each row's root mean square, times gain [size] → [n,
        size]. Computed in float32, returned in the type of x, rounded before a gain of that type, and after a float32
        gain."""
        ...

    def add_rms_norm(self, x: Tensor, more: Tensor, gain: Tensor, eps: float) -> Pair:
        """x and more [n, size], of one type → their sum in that type, and its `rms_norm`."""
        ...

    def qk_norm_rotary(
        self, x: Tensor, rotary: tuple[Tensor, ...], queries: int, keys: int, gains: Pair | None, eps: float
    ) -> Tensor:
        """Rotates the first heads of x [n, queries + keys or more, head_dim] by each token's angles → [n, queries +
        keys, head_dim].

        `rotary` is cosine and sine, [n, 1, rotary_dim] each, in the type of x; the rest of a head beyond rotary_dim
        stays. With `gains`, [head_dim] for queries and for keys, each head is first normed, as by `rms_norm`.
        """
        ...

    def silu_and_mul(self, x: Tensor, ends: Tensor | None = None) -> Tensor:
        """x [n, 2 · inner] → silu(first half) · second half, [n, inner]. With the `ends` of `Routes`, rows behind the
        last may stay undefined."""
        ...

    def gelu_and_mul(self, x: Tensor, ends: Tensor | None = None) -> Tensor:
        """The same with gelu, by its hyperbolic tangent."""
        ...

    def route(self, logits: Tensor, per_token: int) -> Pair:
        """logits [n, experts] → weights of the likeliest experts of each row, in the type of the logits and summing to
        1, and their numbers; [n, per_token] each. The softmax is computed in float32."""
        ...

    def sort_by_expert(self, chosen: Tensor, experts: int, own: slice | None = None) -> Routes:
        """Sorts the choices of `route`; rows of one expert stay in order. This rank has the `own` of all experts, None:
        all. Nothing is read from the device, so that this can be captured."""
        ...

    def weighted_sum(self, x: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        """x [m, hidden], sorted by expert → [n, hidden]: for each row of weights [n, per_token] the sum of its choices'
        rows, each times its weight, in the order of the choices. A choice with place −1 adds nothing."""
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
