"""Gates of feed-forward parts that are more than an activation: bounded, or with weights of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class BoundedGates:
    """silu(gate), at most `limit`, times the up projection clamped to ± `limit`, as in Step 3.7."""

    limit: float

    def opened(self, gate: Any, up: Any, sigmoid: Callable[[Any], Any]) -> Any:
        """Tensors [n, inner] each, and σ for such tensors → [n, inner]."""
        return (gate * sigmoid(gate)).clamp(max=self.limit) * up.clamp(-self.limit, self.limit)


@dataclass(frozen=True, slots=True)
class CutGates:
    """silu of the gate clamped to at most `limit`, times the up projection clamped to ± `limit`, as in GLM-5 Next."""

    limit: float

    def opened(self, gate: Any, up: Any, sigmoid: Callable[[Any], Any]) -> Any:
        """Tensors [n, inner] each, and σ for such tensors → [n, inner]."""
        gate = gate.clamp(max=self.limit)
        return gate * sigmoid(gate) * up.clamp(-self.limit, self.limit)


@dataclass(frozen=True, slots=True)
class RaisedGates:
    """gate · sigmoid(sharpness · gate) times the up projection plus 1, with the gate at most `limit` and the up
    projection clamped to ± `limit`, as in MiniMax M3."""

    sharpness: float
    limit: float

    def opened(self, gate: Any, up: Any, sigmoid: Callable[[Any], Any]) -> Any:
        """Tensors [n, inner] each, and σ for such tensors → [n, inner]."""
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * sigmoid(gate * self.sharpness) * (up + 1.0)


Gates = BoundedGates | CutGates | RaisedGates
