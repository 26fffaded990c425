"""Chooses the kind of tables for a configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import Self

import torch
from torch import Tensor

from llm_service.families.family import FAR
from llm_service.layers.mixer import Rotary
from llm_service.layers.rotary.learned import LearnedRotary
from llm_service.layers.rotary.multimodal import MultimodalRotary
from llm_service.layers.rotary.tempered import TemperedRotary
from llm_service.model_config.rotary import LONG, RotaryConfig


class FourAxisRotary(MultimodalRotary):
    """Positions on four axes, the first of which is a token's own number in its sequence; each number of a head,
    instead of each pair, belongs to an axis, as in HunyuanOCR."""

    @classmethod
    def of(cls, config: RotaryConfig, device: torch.device) -> Self:
        """See `MultimodalRotary.of`."""
        made = super().of(config, device)
        axes = [axis for axis, count in enumerate(config.own_sections) for _ in range(2 * count)]
        made._axis = torch.tensor(axes, device=device)  # [dim]
        return made

    def tables(self, positions: Tensor, dtype: torch.dtype) -> Rotary:
        """int [4, n] → as `MultimodalRotary.tables`."""
        places = positions[self._axis].float().t().contiguous()  # or tables would not lie in order
        angles = (places * self._frequencies.repeat(2)).unsqueeze(1)
        return angles.cos().to(dtype), angles.sin().to(dtype)


class LongRangeRotary(MultimodalRotary):
    """Sequences that are long turn by frequencies of their own. Their places are counted from `FAR`."""

    _if_long: Tensor

    @classmethod
    def of(cls, config: RotaryConfig, device: torch.device) -> Self:
        """See `MultimodalRotary.of`."""
        scaling = config.scaling
        assert scaling is not None, "it says how slowly each pair turns"
        made = super().of(replace(config, scaling=None), device)
        turns = config.theta ** (torch.arange(0, config.dim, 2, dtype=torch.float32, device=device) / config.dim)
        made._frequencies = 1.0 / (torch.tensor(scaling.each, device=device) * turns)
        made.register_buffer(
            "_if_long", 1.0 / (torch.tensor(scaling.each_if_long, device=device) * turns), persistent=False
        )
        made._magnitude = scaling.magnitude
        return made

    def tables(self, positions: Tensor, dtype: torch.dtype) -> Rotary:
        """See `MultimodalRotary.tables`."""
        long = positions >= FAR
        frequencies = torch.where(long[0].unsqueeze(1), self._if_long, self._frequencies)  # [n, dim / 2]
        return self.of_angles((positions - FAR * long)[self._axis].float().t() * frequencies, dtype)


def rotary_of(config: RotaryConfig, device: torch.device) -> MultimodalRotary:
    """Makes the tables."""
    if config.own_sections:
        return FourAxisRotary.of(config, device)
    if config.learned:
        return LearnedRotary.of(config, device)
    if config.scaling is not None and config.scaling.kind == LONG:
        return LongRangeRotary.of(config, device)
    if config.tempering is None:
        return MultimodalRotary.of(config, device)
    rotary = TemperedRotary.of(config, device)
    rotary.tempering = config.tempering
    return rotary
