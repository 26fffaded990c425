"""What a dense layer does before and after attention, for few rows of float32 on a CPU.

It is what the layer's modules do, by the same kernels, over NumPy's arrays. A kernel takes microseconds for a few rows;
torch's modules, views and operators between them, whose code the weights have pushed out of the caches, take as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.linear import Linear
from llm_service.layers.cpu import row_kernels, selection
from llm_service.layers.cpu.jit import Array
from llm_service.layers.cpu.panels import PanelWeight
from llm_service.layers.norm import RMSNorm


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

    def __init__(
        self, products: Sequence[Callable[[Array], Array]], heads: Heads, norms: tuple[RMSNorm, RMSNorm]
    ) -> None:
        self._qkv, self._o, self._gate_up, self._down = products
        self._heads = heads
        self._gains = row_kernels.both_gains(heads.gains, heads.eps, heads.size)
        self._before, self._after = ((norm.weight.numpy(), norm.eps) for norm in norms)

    @classmethod
    def of(cls, linears: Sequence[Linear], heads: Heads, norms: tuple[RMSNorm, RMSNorm]) -> FewRows | None:
        """Of a layer's four products, in order; None where one of them has its weight not in panels."""
        forms = [(linear.laid_out, linear.bias) for linear in linears]
        products = [form.array_product(bias) for form, bias in forms if isinstance(form, PanelWeight)]
        return cls(products, heads, norms) if len(products) == len(linears) else None

    def takes(self, x: Tensor) -> bool:
        """Whether x [n, hidden] is few rows, and our kernels compute."""
        return x.shape[0] <= row_kernels.FEW and selection.is_numba()

    def before(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """See `Layer.before`."""
        queries, keys = self._heads.queries, self._heads.keys
        product = self._qkv(row_kernels.rms_norm_rows(x.numpy(), *self._before))
        heads = product.reshape(x.shape[0], -1, self._heads.size)
        cosine, sine = rotary
        rotated = row_kernels.qk_norm_rotary_rows(heads, cosine.numpy(), sine.numpy(), queries, keys, *self._gains)
        both, value = torch.from_numpy(rotated), torch.from_numpy(heads)[:, queries + keys :]
        return both[:, :queries], both[:, queries:], value

    def after(self, x: Tensor, attended: Tensor) -> Tensor:
        """See `Layer.after`."""
        joined = self._o(attended.numpy())
        np.add(joined, x.numpy(), out=joined)
        inner = self._gate_up(row_kernels.rms_norm_rows(joined, *self._after))
        out = self._down(row_kernels.silu_and_mul_rows(inner))
        np.add(out, joined, out=out)
        return torch.from_numpy(out)
