"""Tables of rotary angles, for positions on the axes of time, height and width (M-RoPE)."""

from __future__ import annotations

import math
from typing import Self

import torch
from torch import Tensor, nn

from llm_service.model_config.rotary import RotaryConfig, RotaryScaling


class MultimodalRotary(nn.Module):
    """Makes cosine and sine tables for a batch, of the `dim` numbers of a head that are rotated; built once, shared by
    all layers."""

    def __init__(
        self,
        dim: int,
        theta: float,
        sections: tuple[int, int, int],
        *,
        interleaved: bool,
        device: torch.device,
        scaling: RotaryScaling | None = None,
        space_first: bool = False,
    ) -> None:
        """See `RotaryConfig`."""
        super().__init__()
        self._magnitude = 1.0 if scaling is None else scaling.magnitude
        pairs = torch.arange(0, dim, 2, dtype=torch.float32, device=device)
        turns = axes_in_space(sections) if space_first else axis_of_pairs(sections, interleaved=interleaved)
        axes = torch.tensor(turns, dtype=torch.int64, device=device)
        self._frequencies: Tensor  # [dim / 2], as the axis of each pair is
        self._axis: Tensor
        frequencies = 1.0 / theta ** (pairs / dim)
        if scaling is not None:
            kept = kept_shares(frequencies, theta, scaling)
            frequencies = frequencies * (kept + (1 - kept) / scaling.factor)
        self.register_buffer("_frequencies", frequencies, persistent=False)
        self.register_buffer("_axis", axes, persistent=False)

    @classmethod
    def of(cls, config: RotaryConfig, device: torch.device) -> Self:
        """Makes the tables of a configuration."""
        given = config.dim, config.theta, config.sections
        return cls(
            *given,
            interleaved=config.interleaved,
            device=device,
            scaling=config.scaling,
            space_first=config.space_first,
        )

    def tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """int [3, n] → cosine and sine, each [n, 1, dim] in `dtype`."""
        return self.of_angles(positions[self._axis].float().t() * self._frequencies, dtype)

    def of_angles(self, turns: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The same of the angles of pairs, float32 [n, dim / 2]."""
        turns = torch.cat([turns, turns], dim=-1).unsqueeze(1)
        cosine, sine = turns.cos(), turns.sin()
        if self._magnitude != 1:
            cosine, sine = cosine * self._magnitude, sine * self._magnitude
        return cosine.to(dtype), sine.to(dtype)


def kept_shares(frequencies: Tensor, theta: float, scaling: RotaryScaling) -> Tensor:
    """How much of its frequency each pair [dim / 2] keeps, the rest being divided; see `RotaryScaling`. Llama 3 goes by
    the turns of a pair in the original context, YaRN interpolates between the pairs with so many turns."""
    if scaling.kind == "linear":
        return torch.zeros_like(frequencies)
    if scaling.kind == "llama3":
        turns = scaling.original * frequencies / (2 * math.pi)
        return ((turns - scaling.slow) / (scaling.fast - scaling.slow)).clamp(0, 1)
    count = len(frequencies)
    if scaling.kind == "proportional":
        return (torch.arange(count, device=frequencies.device) < int(scaling.share * count)).float()

    def pair_of(turns: float) -> float:
        return count * math.log(scaling.original / (2 * math.pi * turns)) / math.log(theta)

    first, last = pair_of(scaling.fast), pair_of(scaling.slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * count - 1)
    numbers = torch.arange(count, dtype=torch.float32, device=frequencies.device)
    return 1 - ((numbers - first) / (last - first or 0.001)).clamp(0, 1)


def axis_of_pairs(sections: tuple[int, int, int], *, interleaved: bool) -> list[int]:
    """Which axis (0 time, 1 height, 2 width) turns each pair of a head.

    >>> axis_of_pairs((2, 1, 1), interleaved=False)
    [0, 0, 1, 2]
    >>> axis_of_pairs((2, 1, 1), interleaved=True)
    [0, 1, 2, 0]
    """
    if not interleaved:
        return [axis for axis, count in enumerate(sections) for _ in range(count)]
    axes = [0] * sum(sections)
    for axis in (1, 2):
        axes[axis : sections[axis] * 3 : 3] = [axis] * len(axes[axis : sections[axis] * 3 : 3])
    return axes


def axes_in_space(sections: tuple[int, int, int]) -> list[int]:
    """The same, where height and width turn as many pairs in turns, and time those behind them.

    >>> axes_in_space((1, 2, 2))
    [1, 2, 1, 2, 0]
    """
    time, height, _ = sections
    return [1, 2] * height + [0] * time
