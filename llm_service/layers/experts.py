"""A mixture of experts: each token goes through the few feed-forward parts that a router picks for it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from common.linear import LaidOut, Linear
from llm_service.layers.group import TensorGroup
from llm_service.layers.linear import Stored, laid_out
from llm_service.layers.ops import TORCH, RowOps


class Experts(nn.Module):
    """All experts' weights, stacked: gate_up_proj [experts, 2 · inner, hidden], down_proj [experts, hidden, inner].

    `inner` is this rank's share; gate and up are each split, so that the halves stay side by side.
    """

    ops: RowOps = TORCH

    def __init__(self, count: int, hidden: int, inner: int, group: TensorGroup, dtype: torch.dtype) -> None:
        super().__init__()
        self._inner, self._share = inner, group.share(inner)
        self.laid_out: list[tuple[LaidOut, LaidOut]] = []
        self._missing = {"gate_up_proj", "down_proj"}
        share = self._share.stop - self._share.start
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * share, hidden, dtype=dtype), requires_grad=False)
        self.down_proj = nn.Parameter(torch.empty(count, hidden, share, dtype=dtype), requires_grad=False)

    def place(self, kind: str, stored: Stored) -> None:
        """Reads this rank's share of a stacked tensor; raises ValueError on a wrong shape.

        Published checkpoints keep each expert's matrices the other way round, [experts, in, out]; where the shape fits
        both ways, it is that one.
        """
        target, shape, share = getattr(self, kind), tuple(stored.get_shape()), self._share
        if kind == "gate_up_proj":
            up = slice(self._inner + share.start, self._inner + share.stop)
            if shape[1:] == (target.shape[2], 2 * self._inner):  # as published
                parts = [stored[:, :, part].transpose(1, 2) for part in (share, up)]
            else:
                parts = [stored[:, part] for part in (share, up)]
            source = torch.cat(parts, dim=1)
        elif shape[1:] == (self._inner, target.shape[1]):  # as published
            source = stored[:, share].transpose(1, 2)
        else:
            source = stored[:, :, share]
        if source.shape != target.shape:
            raise ValueError(f"it is {shape}, which does not fit {tuple(target.shape)}")
        target.copy_(source)
        self._missing.discard(kind)

    def whole(self) -> bool:
        """Whether all weights have been read."""
        return not self._missing

    def run_grouped(self, x: Tensor, ends: Tensor) -> Tensor:
        """[m, hidden] → this rank's part of [m, hidden]; the rows of expert e end before row `ends[e]`, int32."""
        inner = self.ops.silu_and_mul(functional.grouped_mm(x, self.gate_up_proj.transpose(1, 2), offs=ends))
        return functional.grouped_mm(inner, self.down_proj.transpose(1, 2), offs=ends)

    def finalize(self, *, int8: bool = False) -> None:
        """Called when the weights are final: on a CPU they are laid out for speed, or rounded to 8 bits. `run_grouped`
        needs the plain ones."""
        if self.gate_up_proj.device.type != "cpu":
            return
        every = []
        for weights in zip(*self._weights(), strict=True):
            gate_up, down = (laid_out(weight, int8=int8) for weight in weights)
            if gate_up is None or down is None:
                return
            every.append((gate_up, down))
        self.laid_out = every
        for name in ("gate_up_proj", "down_proj"):
            setattr(self, name, nn.Parameter(getattr(self, name).new_empty(0), requires_grad=False))

    def _weights(self) -> tuple[Tensor, Tensor]:
        return self.gate_up_proj.detach(), self.down_proj.detach()

    def run(self, expert: int, x: Tensor) -> Tensor:
        """[n, hidden] → this rank's part of [n, hidden], through one expert."""
        if self.laid_out:
            gate_up, down = self.laid_out[expert]
            return down.product(self.ops.silu_and_mul(gate_up.product(x)))
        return functional.linear(
            self.ops.silu_and_mul(functional.linear(x, self.gate_up_proj[expert])), self.down_proj[expert]
        )


class SparseMLP(nn.Module):
    """Routes each token to the `per_token` likeliest experts and sums their outputs by their normalised weights."""

    def __init__(
        self, experts: int, per_token: int, hidden: int, inner: int, group: TensorGroup, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self._group, self._per_token, self._experts = group, per_token, experts
        self.gate = Linear(hidden, experts, bias=False, dtype=dtype)
        self.experts = Experts(experts, hidden, inner, group, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[n, hidden] → [n, hidden]."""
        weights, chosen = self.gate(x).float().softmax(-1).topk(self._per_token, dim=-1)  # [n, per_token]
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        grouped = x.device.type == "cuda"
        return self._group.sum(self._together(x, weights, chosen) if grouped else self._in_turn(x, weights, chosen))

    def _in_turn(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """One chosen expert after the other, each with all of its tokens: for CPUs, where few are read."""
        out = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            token, place = torch.where(chosen == expert)
            out.index_add_(0, token, self.experts.run(expert, x[token]) * weights[token, place].unsqueeze(1))
        return out

    def _together(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """All experts in one product over rows that are sorted by expert. Nothing is asked of the device, so that this
        can be captured, and sums are in the order of the choice, so that it gives the same each time."""
        order = chosen.flatten().argsort(stable=True)  # [n · per_token]
        counts = torch.zeros(self._experts, dtype=torch.int32, device=x.device)
        counts.scatter_add_(0, chosen.flatten(), torch.ones_like(order, dtype=torch.int32))
        sorted_out = self.experts.run_grouped(x[order // self._per_token], counts.cumsum(0, dtype=torch.int32))
        out = torch.empty_like(sorted_out)
        out[order] = sorted_out
        return (out.view(*chosen.shape, -1) * weights.unsqueeze(-1)).sum(1)
