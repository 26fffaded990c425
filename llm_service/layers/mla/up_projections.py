"""The matrices by which heads make keys and values from the shared latent."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from llm_service.layers.linear.placement import Place, Stored, fill
from llm_service.layers.tensor_parallel import TensorGroup
from llm_service.model_config.latent import LatentHeads


class KvUpProjections(nn.Module):
    """This rank's heads' matrices, [heads, plain + value, rank]: the one for the plain part of a key, followed by the
    one for a value. Keys need not be expanded to multiply them with a query: q · (K c) = (Kᵀ q) · c. Nor do values: Σ w
    (V c) = V (Σ w c). Quantised matrices are dequantised when read, since queries use them transposed."""

    def __init__(self, shape: LatentHeads, heads: int, group: TensorGroup, dtype: torch.dtype) -> None:
        super().__init__()
        self._shape, own, rows = shape, group.partition(heads), shape.plain + shape.value
        self._rows = slice(own.start * rows, own.stop * rows)
        weight = torch.empty(own.stop - own.start, rows, shape.rank, dtype=dtype)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def targets(self, _: str, /) -> dict[str, Place]:
        """See `Placed`."""
        return {"kv_b_proj.weight": self._place}

    def _place(self, stored: Stored) -> None:
        fill(self.weight.view(-1, self.weight.shape[2]), stored[self._rows, :])

    def absorbed(self, query: Tensor) -> Tensor:
        """Queries [n, heads, rotated + plain] → absorbed ones, to be multiplied with the cache, [n, heads, rank +
        rotated]."""
        rotated, plain = query.split([self._shape.rotated, self._shape.plain], dim=2)
        absorbed = torch.bmm(plain.transpose(0, 1), self.weight[:, : self._shape.plain]).transpose(0, 1)
        return torch.cat([absorbed, rotated], dim=2)

    def values(self, mixed: Tensor) -> Tensor:
        """Weighted sums of latents [n, heads, rank] → those of values, [n, heads · value]."""
        matrices = self.weight[:, self._shape.plain :].transpose(1, 2)
        return torch.bmm(mixed.transpose(0, 1), matrices).transpose(0, 1).flatten(1)

    def expand(self, latents: Tensor, head: int) -> tuple[Tensor, Tensor]:
        """Latents [m, rank] → the plain part of a head's keys [m, plain], and its values [m, value]."""
        made = latents @ self.weight[head].t()
        return made[:, : self._shape.plain], made[:, self._shape.plain :]
