"""Tables of angles, and of the growth of queries."""

from __future__ import annotations

import torch
from torch import Tensor

from llm_service.layers.mixer import Rotary
from llm_service.layers.rotary.multimodal import MultimodalRotary
from llm_service.model_config.rotary import Tempering


class TemperedRotary(MultimodalRotary):
    """Tables of angles, and of the factors of queries."""

    tempering: Tempering

    def tables(self, positions: Tensor, dtype: torch.dtype) -> Rotary:
        """int [3, n] → as `MultimodalRotary.tables`, and float32 [n, 1, 1]."""
        factors: Tensor = self.tempering.factors(positions[0]).view(-1, 1, 1)
        return *super().tables(positions, dtype), factors
