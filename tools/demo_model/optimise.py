"""The optimiser: Muon for the matrices inside the blocks, AdamW for the rest.

Muon (Jordan et al., 2024) steps along the orthogonalised momentum, found by a quintic Newton-Schulz iteration; it needs
markedly fewer steps than Adam here. Matrices of one shape are orthogonalised together.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


def orthogonalised(batch: Tensor, rounds: int = 5) -> Tensor:
    """Nearly the orthogonal factor of each matrix of `batch` [n, rows, columns]."""
    x = batch.bfloat16()
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(rounds):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    result: Tensor = (x.mT if tall else x).to(batch.dtype)
    return result


class Muon:
    """Momentum with Nesterov's look-ahead, orthogonalised, scaled so that an update's size does not depend on shape."""

    def __init__(self, parameters: Iterable[nn.Parameter], momentum: float = 0.95, decay: float = 0.02) -> None:
        self.momentum, self.decay = momentum, decay
        self.groups: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for parameter in parameters:
            self.groups.setdefault(tuple(parameter.shape), []).append(parameter)
        self.buffers = {shape: torch.zeros(len(group), *shape) for shape, group in self.groups.items()}

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for shape, group in self.groups.items():
            if all(parameter.grad is None for parameter in group):
                continue
            gradient = torch.stack([p.grad if p.grad is not None else torch.zeros_like(p) for p in group])
            buffer = self.buffers[shape].lerp_(gradient, 1 - self.momentum)
            update = orthogonalised(gradient.lerp(buffer, self.momentum))
            scale = rate * max(1.0, shape[0] / shape[1]) ** 0.5
            for parameter, change in zip(group, update, strict=True):
                parameter.mul_(1 - rate * self.decay).sub_(change, alpha=scale)

    def state(self) -> dict[str, Tensor]:
        return {"x".join(map(str, shape)): buffer for shape, buffer in self.buffers.items()}

    def load(self, state: dict[str, Tensor]) -> None:
        for shape, buffer in self.buffers.items():
            buffer.copy_(state["x".join(map(str, shape))])


OTHER_RATES = (("patch_embed", 0.1), ("merger", 0.3), ("", 1.0))
"""Shares of Adam's rate by name. A patch's pixels are much alike, so small steps of all their weights add up."""


class Optimiser:
    """Both optimisers under one rate in 0..1."""

    def __init__(
        self, named: list[tuple[str, nn.Parameter]], matrix_rate: float = 0.02, other_rate: float = 2e-3
    ) -> None:
        blocks = {name: p for name, p in named if p.ndim == 2 and ("blocks." in name or "layers." in name)}
        self.rate = matrix_rate
        self.muon = Muon(blocks.values())
        groups: dict[tuple[float, float], list[nn.Parameter]] = {}
        for name, parameter in named:
            if name not in blocks:
                share = next(share for part, share in OTHER_RATES if part in name)
                decay = 0.02 if parameter.ndim > 1 else 0.0
                groups.setdefault((other_rate * share, decay), []).append(parameter)
        self.rates = [rate for rate, _ in groups]
        settings = [{"params": members, "weight_decay": decay} for (_, decay), members in groups.items()]
        self.adam = torch.optim.AdamW(settings, lr=other_rate, betas=(0.9, 0.98), fused=True)

    def step(self, share: float) -> None:
        self.muon.step(self.rate * share)
        for group, rate in zip(self.adam.param_groups, self.rates, strict=True):
            group["lr"] = rate * share
        self.adam.step()

    def state(self) -> dict[str, Any]:
        return {"muon": self.muon.state(), "adam": self.adam.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self.muon.load(state["muon"])
        self.adam.load_state_dict(state["adam"])
