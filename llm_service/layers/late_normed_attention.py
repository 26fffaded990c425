"""Attention whose heads are normed once they are rotated, as in HunyuanOCR."""

from __future__ import annotations

from torch import Tensor

from llm_service.layers.ops import RMSNorm
from llm_service.layers.self_attention import SelfAttention


class LateNormedAttention(SelfAttention):
    """Self-attention that norms what is rotated: a weight for each number of a head says something else before."""

    @property
    def gains(self) -> None:
        """Nothing is normed before."""
        return

    def parts(self, rotated: Tensor, heads: Tensor) -> tuple[Tensor, ...]:
        """See `SelfAttention.parts`."""
        query, key, *others = super().parts(rotated, heads)
        return self._normed(self.q_norm, query), self._normed(self.k_norm, key), *others

    def _normed(self, norm: object, heads: Tensor) -> Tensor:
        assert isinstance(norm, RMSNorm), "its family norms heads"
        normed: Tensor = norm(heads.reshape(-1, self.head_dim))
        return normed.view(heads.shape)
