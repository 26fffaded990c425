"""xIELU between the products of a feed-forward part."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from llm_service.layers.linear.placement import Place, Stored, fill
from llm_service.layers.mlp import SquaredMLP


class Xielu(nn.Module):
    """a·x² + β·x above 0, and b·(exp(min(x, ε)) − 1 − x) + β·x elsewhere, with one a and one b per layer (Huang and
    Schlag 2025, Deriving Activation Functions Using Integration). A checkpoint stores the inputs of softplus for a and
    b − β; the four are kept and computed in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.coefficients = nn.Parameter(torch.empty(4, dtype=torch.float32), requires_grad=False)

    def targets(self, own: str) -> dict[str, Place]:
        """See `Placed`."""
        names = ("alpha_p", "alpha_n", "beta", "eps")
        return {f"{own}.{name}": self._at(index) for index, name in enumerate(names)}

    def _at(self, index: int) -> Place:
        def place(stored: Stored) -> None:
            fill(self.coefficients[index], stored[...].float().reshape(()))

        return place

    def forward(self, x: Tensor) -> Tensor:
        """[n, inner] → the same."""
        raised, sunk, slope, least = self.coefficients.unbind()
        above, below = functional.softplus(raised), functional.softplus(sunk) + slope
        numbers = x.float()
        curved = torch.where(numbers > 0, numbers.square() * above, (numbers.minimum(least).expm1() - numbers) * below)
        return torch.addcmul(curved, numbers, slope).to(x.dtype)


class XieluMLP(SquaredMLP):
    """down(xIELU(up(x)))."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.act_fn = Xielu()

    def between(self, x: Tensor) -> Tensor:
        """See `SquaredMLP.between`."""
        out: Tensor = self.act_fn(x)
        return out
