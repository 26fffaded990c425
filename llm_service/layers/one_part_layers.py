"""Layers with a single part, a mixer or a feed-forward part, behind a norm: two of them make up what others have in
one."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from llm_service.layers.mixer import MixerPart, Rotary
from llm_service.layers.norms import RMSNorm


class MixerLayer(nn.Module):
    """x + mixer(norm(x))."""

    compiled: ClassVar[tuple[str, ...]] = ("before", "after")
    is_local, companion = False, None

    def __init__(self, norm: RMSNorm, mixer: MixerPart) -> None:
        super().__init__()
        self.norm, self.mixer = norm, mixer

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        rotary: Rotary,
        cache: Any,
        batch: Any,
        places: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        """See `DecoderLayer.forward`; without per-layer inputs and shared keys."""
        residual, inputs = self.before(x, residual, rotary)
        mixed = self.mixer.mix(inputs, cache, batch)
        return self.after(residual, mixed) if places is None else self.after(residual[places], mixed[places])

    def before(self, x: Tensor, residual: Tensor | None, rotary: Rotary) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See `DecoderLayer.before`."""
        residual, normed = self.norm.after_adding(x, residual)
        return residual, self.mixer.project(normed, rotary)

    def after(self, residual: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """See `DecoderLayer.after`."""
        return self.mixer.join(mixed), residual


class FeedForwardLayer(nn.Module):
    """x + mlp(norm(x)): nothing is kept of a sequence."""

    compiled: ClassVar[tuple[str, ...]] = ("after",)
    is_local, companion = False, None

    def __init__(self, norm: RMSNorm, mlp: nn.Module) -> None:
        super().__init__()
        self.norm, self.mlp = norm, mlp

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        _rotary: Rotary,
        _cache: None,
        _batch: None,
        places: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        """See `DecoderLayer.forward`; each token is by itself."""
        if places is not None:
            x, residual = x[places], None if residual is None else residual[places]
        return self.after(x, residual)

    def after(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """[n, hidden] each → the same, to be added."""
        total, normed = self.norm.after_adding(x, residual)
        return self.mlp(normed), total
