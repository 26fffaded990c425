"""A weight on a CPU in bfloat16, in panels of 64 outputs with two inputs side by side, as AVX512-BF16 multiplies them,
and AMX, whose tiles are faster. Rows are rounded to bfloat16; sums are float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import torch
from torch import Tensor

from common.cpu import tile_kernel
from common.cpu.jit import Array
from common.cpu.vectors.tiles import BLOCK
from common.cpu.weight_panels import panels_of_pairs, product_by_torch
from llm_service.layers.cpu import pair_kernel, selection


@dataclass(frozen=True, slots=True)
class PairPanels:
    """A weight [outputs, inputs] as `panels` [⌈outputs / 64⌉, ⌈inputs / 2⌉, 32] uint64, padded with zeros: the 64 words
    of 32 bits of a pair have one output each, of the first input in the lower half. With `tiles` pairs are padded to a
    multiple of 16."""

    outputs: int
    inputs: int
    panels: Array
    tiles: bool

    @classmethod
    def of(cls, weight: Tensor) -> PairPanels | None:
        """Lays out a weight [outputs, inputs] that is final, rounded; None where the kernel does not run."""
        if weight.device.type != "cpu" or not weight.numel() or not selection.computes_bfloat16():
            return None
        tiles = selection.computes_tiles()
        return cls(weight.shape[0], weight.shape[1], panels_of_pairs(weight, BLOCK if tiles else 1), tiles)

    @property
    def nbytes(self) -> int:
        """See `LaidOut`."""
        return int(self.panels.nbytes)

    @property
    def kernels(self) -> frozenset[str]:
        """See `NumbaCompiled`."""
        return frozenset({f"{self._kernel.__name__}:product"})

    @property
    def _kernel(self) -> ModuleType:
        return tile_kernel if self.tiles else pair_kernel

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x […, inputs] → x Wᵀ + b, […, outputs], in the type of x."""
        rows = x.reshape(-1, self.inputs).float()
        wide = None if bias is None else bias.float()
        if selection.is_numba():
            out = torch.from_numpy(self.array_product(wide)(rows.numpy()))
        else:
            out = product_by_torch(rows, self.panels, wide, self.outputs)
        return out.to(x.dtype).view(*x.shape[:-1], self.outputs)

    def array_product(self, bias: Tensor | None = None) -> Callable[[Array], Array]:
        """The product of arrays, float32 [m, inputs] → [m, outputs]; ValueError for rows that do not fit."""
        added = None if bias is None else bias.numpy()
        product = self._kernel.product
        return partial(product, panels=self.panels, bias=added, inputs=self.inputs, outputs=self.outputs)
