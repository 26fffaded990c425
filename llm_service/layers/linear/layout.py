"""The form of a final weight that is computed with fastest on its device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from common.cpu.linear import BlockedWeight, LaidOut
from llm_service.layers.cpu import selection
from llm_service.layers.linear.quantized_weight import Number, QuantizedWeight, StackedWeight
from llm_service.layers.linear.weight_dtype import EXACT, Rounded


def laid_out(weight: Tensor, rounded: Rounded = EXACT) -> LaidOut | None:
    """A final weight in the fastest form here; None if that is its current form. It may be rounded to 8 bits on any
    device, to bfloat16 if `selection.computes_bfloat16`."""
    if weight.device.type == "cpu" and selection.allows_panels():
        from llm_service.layers.cpu.pair_panels import PairPanels  # numba takes its time
        from llm_service.layers.cpu.panels import PanelWeight

        panels: LaidOut | None
        if rounded.int8:
            panels = None if rounded.bfloat16 or rounded.inputs else PanelWeight.rounded(weight)
        else:
            panels = (PairPanels if rounded.bfloat16 else PanelWeight).of(weight)
        if panels is not None:
            return panels
    if rounded.int8:
        return quantized([QuantizedWeight.rounded(weight, inputs=rounded.inputs)], rounded=rounded)
    return BlockedWeight.of(weight)


def quantized(parts: Sequence[QuantizedWeight], order: Tensor | None = None, *, rounded: Rounded = EXACT) -> LaidOut:
    """Weights over the same inputs, stacked, in the fastest form here; `order` int64 [outputs] says where each of their
    outputs goes; of `rounded`, only `bfloat16` applies. Raises ValueError for invalid weights."""
    each: Sequence[LaidOut] = parts
    if parts[0].codes.device.type == "cpu" and (plain := _as_plain(parts, order, rounded)) is not None:
        return plain
    if (form := _form(parts[0].codes.device, rounded)) is not None:
        alike = len({part.input_scale for part in parts}) == 1  # else a row is rounded for each of them
        if alike and (together := form(parts, order)):
            return together
        each = [form([part], None) or part for part in parts]
    places = None if order is None else order.argsort().to(parts[0].codes.device)
    return each[0] if len(each) == 1 and places is None else StackedWeight(each, places)


def _as_plain(parts: Sequence[QuantizedWeight], order: Tensor | None, rounded: Rounded) -> LaidOut | None:
    """The dequantised weights, if our CPU kernels compute with these; else None."""
    if not selection.allows_panels() or not all(part.number in (Number.NF4, Number.FP4) for part in parts):
        return None
    from llm_service.layers.cpu.pair_panels import PairPanels  # numba takes its time
    from llm_service.layers.cpu.panels import PanelWeight

    wide = torch.cat([part.wide() for part in parts])
    wide = wide if order is None else wide[order.argsort()]
    return (PairPanels.of(wide) if rounded.bfloat16 else None) or PanelWeight.of(wide)


def _form(
    device: torch.device, rounded: Rounded
) -> Callable[[Sequence[QuantizedWeight], Tensor | None], LaidOut | None] | None:
    """The function that lays out quantised weights for a device, if there is one."""
    if device.type == "cuda":
        from llm_service.layers.gpu.int8_weight import Int8Weight  # not everywhere is a Triton
        from llm_service.layers.gpu.quantized_weight import GpuWeight

        return lambda parts, order: Int8Weight.of(parts, order) or GpuWeight.of(parts, order)
    if device.type == "cpu" and selection.allows_panels():
        from llm_service.layers.cpu.quad_panels import QuadPanels  # numba takes its time
        from llm_service.layers.cpu.quantized_panels import QuantizedPanels

        wide = partial(QuantizedPanels.of, bfloat16=rounded.bfloat16)
        return lambda parts, order: QuadPanels.of(parts, order) or wide(parts, order)
    return None
