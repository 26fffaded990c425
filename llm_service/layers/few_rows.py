"""What a dense layer does before and after attention, for few rows of float32 on a CPU.

It is what the layer's modules do, by the same kernels, over NumPy's arrays. A kernel takes microseconds for a few rows;
torch's modules, views and operators between them, whose code the weights have pushed out of the caches, take as long.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.kernels import selection
from common.panels import Array
from llm_service.layers.norm import RMSNorm

Product = Callable[[Array], Array]
"""float32 [m, inputs] → [m, outputs]."""


@dataclass(frozen=True, slots=True)
class Products:
    """A layer's four."""

    qkv: Product
    o: Product
    gate_up: Product
    down: Product


@dataclass(frozen=True, slots=True)
class Heads:
    """How many heads there are for queries and for keys, their size, and the norms of both, if there are any."""

    queries: int
    keys: int
    size: int
    gains: tuple[Tensor, Tensor] | None
    eps: float


class FewRows:
    """A layer whose weights are final, with the norms that come before attention and after it."""

    def __init__(self, products: Products, heads: Heads, norms: tuple[RMSNorm, RMSNorm]) -> None:
        from common.kernels import rows_cpu

        self._kernels = rows_cpu
        self._products = products
        self._heads = heads
        self._gains = rows_cpu.both_gains(heads.gains, heads.eps, heads.size)
        self._before, self._after = ((norm.weight.numpy(), norm.eps) for norm in norms)

    def takes(self, x: Tensor) -> bool:
        """Whether x [n, hidden] is few rows, and our kernels compute."""
        return x.shape[0] <= self._kernels.FEW and selection.is_numba()

    def before(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """See `Layer.before`."""
        queries, keys = self._heads.queries, self._heads.keys
        product = self._products.qkv(self._kernels.rms_norm_rows(x.numpy(), *self._before))
        heads = product.reshape(x.shape[0], -1, self._heads.size)
        cosine, sine = rotary
        rotated = self._kernels.qk_norm_rotary_rows(heads, cosine.numpy(), sine.numpy(), queries, keys, *self._gains)
        both, value = torch.from_numpy(rotated), torch.from_numpy(heads)[:, queries + keys :]
        return both[:, :queries], both[:, queries:], value

    def after(self, x: Tensor, attended: Tensor) -> Tensor:
        """See `Layer.after`."""
        joined = self._products.o(attended.numpy())
        np.add(joined, x.numpy(), out=joined)
        inner = self._products.gate_up(self._kernels.rms_norm_rows(joined, *self._after))
        out = self._products.down(self._kernels.silu_and_mul_rows(inner))
        np.add(out, joined, out=out)
        return torch.from_numpy(out)
