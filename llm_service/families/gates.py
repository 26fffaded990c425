"""Gates of feed-forward parts that are more than an activation: bounded, or with weights of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class BoundedGates:
    """silu(gate), at most `limit`, times what it opens, at most as far from 0, as in Step 3.7."""

    limit: float

    def opened(self, gate: Any, up: Any, sigmoid: Callable[[Any], Any]) -> Any:
        """Tensors [n, inner] each, and σ of such → [n, inner]."""
        return (gate * sigmoid(gate)).clamp(max=self.limit) * up.clamp(-self.limit, self.limit)


@dataclass(frozen=True, slots=True)
class CutGates:
    """silu of a gate that is at most `limit`, times what it opens, at most as far from 0, as in GLM-5 Next."""

    limit: float

    def opened(self, gate: Any, up: Any, sigmoid: Callable[[Any], Any]) -> Any:
        """Tensors [n, inner] each, and σ of such → [n, inner]."""
        gate = gate.clamp(max=self.limit)
        return gate * sigmoid(gate) * up.clamp(-self.limit, self.limit)


@dataclass(frozen=True, slots=True)
class RaisedGates:
    """gate · sigmoid(sharpness · gate) times one more than what it opens, the gate at most `limit` and the other at
    most as far from 0, as in MiniMax M3."""

    sharpness: float
    limit: float

    def opened(self, gate: Any, up: Any, sigmoid: Callable[[Any], Any]) -> Any:
        """Tensors [n, inner] each, and σ of such → [n, inner]."""
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * sigmoid(gate * self.sharpness) * (up + 1.0)


Gates = BoundedGates | CutGates | RaisedGates
