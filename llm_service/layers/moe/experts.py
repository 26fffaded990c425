"""The experts of a mixture: many small feed-forward parts, computed together for rows that are sorted by expert."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from common.cpu.linear import LaidOut
from llm_service.families.gates import Gates
from llm_service.layers.linear.layout import laid_out, quantized
from llm_service.layers.linear.placement import Place, Stored, StoredStack, elsewhere, fill, length
from llm_service.layers.linear.quantized_weight import QuantizedWeight
from llm_service.layers.linear.weight_dtype import EXACT, Rounded
from llm_service.layers.mlp import act_and_mul, squared_relu
from llm_service.layers.ops import TORCH, RowOps
from llm_service.layers.tensor_parallel import TensorGroup
from llm_service.model_config.feed_forward import Activation

_WITH_GATES, _WITHOUT_GATES = ("gate_proj", "up_proj", "down_proj"), ("up_proj", "down_proj")
"""An expert's matrices, if each has a tensor of its own."""


class GroupedProduct(Protocol):
    """The matrices of all experts in a form of their own."""

    @property
    def nbytes(self) -> int:
        """Bytes of all that it holds."""
        ...

    def grouped_product(self, x: Tensor, ends: Tensor, among: int = 0) -> Tensor:
        """x [m, inputs] → [m, outputs]: rows of expert e, which end before row `ends[e]`, int32, by its matrix. Rows
        behind the last end are undefined: they belong to other experts, `among` so many as have all of the rows; 0:
        these have."""
        ...


class Experts(nn.Module):
    """All experts' weights, stacked: gate_up_proj [experts, 2 · inner, hidden], down_proj [experts, hidden, inner].

    `inner` is this rank's part; gate and up are each split, so that the halves stay adjacent. If the group is
    `expert_parallel`, the rank has its `own` of all `count` experts, whole. A checkpoint has them stacked, with gate
    and up in one or two tensors, or each expert's three matrices apart, as quantised ones do, with the expert's number
    before the matrix's name or behind it. Stacked ones have inputs first with `inputs_first`, or if no other order fits
    their shape. Without `has_gates` there is no gate, and a squared ReLU between two products.
    """

    ops: RowOps = TORCH

    def __init__(
        self,
        count: int,
        hidden: int,
        inner: int,
        group: TensorGroup,
        dtype: torch.dtype,
        *,
        activation: Activation | Gates = Activation.SILU,
        inputs_first: bool = False,
        has_gates: bool = True,
    ) -> None:
        super().__init__()
        self._inputs_first = inputs_first
        self.count, self._inner, self._activation = count, inner, activation
        self.own, self._partition = group.expert_partition(count, inner)
        self._has_gates, self._apart = has_gates, _WITH_GATES if has_gates else _WITHOUT_GATES
        self.laid_out: list[tuple[LaidOut, LaidOut]] = []
        self.grouped: tuple[GroupedProduct, GroupedProduct] | None = None
        self._missing = {(kind, expert) for kind in self._apart for expert in self._numbers()}
        self._quantized: dict[tuple[str, int], QuantizedWeight] = {}
        self.cuts_groups = False  # whether this rank's part of an expert begins or ends within a group of scales
        here, part = length(self.own), length(self._partition)
        opened = (1 + has_gates) * part
        self.gate_up_proj = nn.Parameter(torch.empty(here, opened, hidden, dtype=dtype), requires_grad=False)
        self.down_proj = nn.Parameter(torch.empty(here, hidden, part, dtype=dtype), requires_grad=False)

    def _numbers(self) -> range:
        """Of the experts that this rank has."""
        return range(self.own.start, self.own.stop)

    def targets(self, own: str) -> dict[str, Place]:
        """See `Placed`: either the stacked ones or all others."""
        first = "gate_up_proj" if self._has_gates else "up_proj"
        stacked: dict[str, Place] = {
            f"{own}.{first}": partial(self._place, "gate_up_proj"),
            f"{own}.down_proj": partial(self._place, "down_proj"),
        }
        if self._has_gates:
            stacked |= {f"{own}.{kind}": partial(self._place_half, kind) for kind in ("gate_proj", "up_proj")}
        for kind, expert, place in self._places_apart():
            stacked |= {f"{own}.{expert}.{kind}.weight": place, f"{own}.{kind}.{expert}.weight": place}
        return stacked

    def _places_apart(self) -> Iterator[tuple[str, int, Place]]:
        """The reader of each matrix of each expert, including other ranks'."""
        numbers = self._numbers()
        for kind in self._apart:
            for expert in range(self.count):
                yield kind, expert, partial(self._place_one, kind, expert) if expert in numbers else elsewhere

    def _place(self, kind: str, stored: Stored) -> None:
        """Some checkpoints keep each expert's matrices the other way round, [experts, in, out]."""
        if isinstance(stored, StoredStack):
            self._place_quantized(kind, stored)
            return
        target, shape, part = getattr(self, kind), tuple(stored.get_shape()), self._partition
        if kind == "gate_up_proj":
            up = slice(self._inner + part.start, self._inner + part.stop)
            rows = (part, up) if self._has_gates else (part,)
            if self._has_inputs_first(shape, target.shape[2], len(rows) * self._inner):
                parts = [stored[self.own, :, part].transpose(1, 2) for part in rows]
            else:
                parts = [stored[self.own, part] for part in rows]
            source = torch.cat(parts, dim=1)
        elif self._has_inputs_first(shape, self._inner, target.shape[1]):
            source = stored[self.own, part].transpose(1, 2)
        else:
            source = stored[self.own, :, part]
        if shape[0] != self.count or source.shape != target.shape:
            raise ValueError(f"it is {shape}, which does not fit {tuple(target.shape)}")
        target.copy_(source)
        self._missing -= {each for each in self._missing if (each[0] == "down_proj") == (kind == "down_proj")}

    def _place_quantized(self, kind: str, stored: StoredStack) -> None:
        """The same of weights that stay quantised, each on its own."""
        hidden, shape = self.down_proj.shape[1], tuple(stored.get_shape())
        apart = [each for each in self._apart if (each == "down_proj") == (kind == "down_proj")]
        sides = (hidden, self._inner) if kind == "down_proj" else (len(apart) * self._inner, hidden)
        swapped = self._has_inputs_first(shape, sides[1], sides[0])
        if shape != (self.count, *(sides[::-1] if swapped else sides)):
            raise ValueError(f"it is {shape}, which does not fit {(self.count, *sides)}")
        for expert in self._numbers():
            one = stored.of_expert(expert, inputs_first=swapped)
            for number, each in enumerate(apart):
                self._place_one(each, expert, one, number * self._inner)

    def _has_inputs_first(self, shape: tuple[int, ...], inputs: int, outputs: int) -> bool:
        return self._inputs_first or shape[1:] == (inputs, outputs) != (outputs, inputs)

    def _place_half(self, kind: str, stored: Stored) -> None:
        """One of two stacked matrices that others have in one, [experts, out, in]."""
        if (stated := stored.get_shape()[0]) != self.count:
            raise ValueError(f"it is of {stated} experts, expected {self.count}")
        begin = self.gate_up_proj.shape[1] // 2 if kind == "up_proj" else 0
        fill(self.gate_up_proj[:, begin : begin + self.gate_up_proj.shape[1] // 2], stored[self.own, self._partition])
        self._missing -= {each for each in self._missing if each[0] == kind}

    def _place_one(self, kind: str, expert: int, stored: Stored, first: int = 0) -> None:
        """One matrix of one expert, [out, in], whose outputs begin at `first`."""
        part, size, number = self._partition, length(self._partition), expert - self.own.start
        whole = self.down_proj if kind == "down_proj" else self.gate_up_proj
        source = stored[:, part] if kind == "down_proj" else stored[first + part.start : first + part.stop]
        begin = size if kind == "up_proj" and self._has_gates else 0
        target = whole[number] if kind == "down_proj" else whole[number, begin : begin + size]
        if isinstance(source, QuantizedWeight) and source.shape == target.shape:
            self._quantized[kind, expert] = source
            self.cuts_groups |= kind == "down_proj" and size < self._inner and source.cuts_groups
        else:
            fill(target, source)
        self._missing.discard((kind, expert))
        if len(self._quantized) == len(self._apart) * len(whole):
            self._replace_weights([])  # no more than the short form goes to the device

    def whole(self) -> bool:
        """Whether all weights have been read."""
        return not self._missing

    def run_grouped(self, x: Tensor, ends: Tensor) -> Tensor:
        """[m, hidden] → this rank's part of [m, hidden]; rows of its expert e end before row `ends[e]`, int32. Rows
        behind belong to other ranks, and are undefined."""
        if self.grouped is not None:
            gate_up, down = self.grouped
            inner = self._opened(gate_up.grouped_product(x, ends, self.count), ends)
            return down.grouped_product(inner, ends, self.count)
        inner = self._opened(functional.grouped_mm(x, self.gate_up_proj.transpose(1, 2), offs=ends), ends)
        return functional.grouped_mm(inner, self.down_proj.transpose(1, 2), offs=ends)

    def _opened(self, x: Tensor, ends: Tensor | None = None) -> Tensor:
        if not self._has_gates:
            return squared_relu(x)
        return act_and_mul(self.ops, self._activation, x, ends if length(self.own) < self.count else None)

    def finalize(self, *, rounded: Rounded = EXACT) -> None:
        """Called when the weights are final: on a CPU they are laid out for speed; quantised ones, and those rounded to
        int8, stay in 8 or 4 bits on any device. `run_grouped` needs plain ones, or those for GPUs."""
        device = self.gate_up_proj.device
        if self._quantized:
            self._finalize_quantized(device, rounded)
        elif device.type == "cpu":
            self._finalize_for_cpus(rounded)
        elif rounded.int8:
            form = partial(QuantizedWeight.rounded, inputs=rounded.inputs)
            self._stay_short(*([[form(each)] for each in weight] for weight in self._weights()))

    def _finalize_for_cpus(self, rounded: Rounded) -> None:
        every: list[tuple[LaidOut, LaidOut]] = []
        for weights in zip(*self._weights(), strict=True):
            gate_up, down = (laid_out(weight, rounded) for weight in weights)
            if gate_up is None or down is None:
                return
            every.append((gate_up, down))
        self._replace_weights(every)

    def _finalize_quantized(self, device: torch.device, rounded: Rounded) -> None:
        experts = {expert for _, expert in self._quantized}
        if self.gate_up_proj.numel() or len(self._quantized) < len(self._apart) * len(experts):
            raise ValueError("some experts are quantised and others are not")
        found = [[self._quantized.pop((kind, expert)).to(device) for kind in self._apart] for expert in sorted(experts)]
        if device.type == "cuda":
            self._stay_short([first for *first, _ in found], [[down] for *_, down in found])
        else:
            form = partial(quantized, rounded=rounded)
            self._replace_weights([(form(first), form([down])) for *first, down in found])

    def _stay_short(self, gate_up: list[list[QuantizedWeight]], down: list[list[QuantizedWeight]]) -> None:
        """Has a GPU compute with each expert's matrices as they are."""
        from llm_service.layers.gpu.int8_weight import Int8Weight  # not everywhere is a Triton
        from llm_service.layers.gpu.quantized_weight import GpuWeight

        def form(every: list[list[QuantizedWeight]]) -> GroupedProduct:
            return Int8Weight.of_experts(every) or GpuWeight.of_experts(every)

        self.grouped = form(gate_up), form(down)
        self._replace_weights([])

    def _replace_weights(self, laid_out: list[tuple[LaidOut, LaidOut]]) -> None:
        self.laid_out = laid_out
        for name in ("gate_up_proj", "down_proj"):
            setattr(self, name, nn.Parameter(getattr(self, name).new_empty(0), requires_grad=False))

    def _weights(self) -> tuple[Tensor, Tensor]:
        return self.gate_up_proj.detach(), self.down_proj.detach()

    def run(self, expert: int, x: Tensor) -> Tensor:
        """[n, hidden] → this rank's part of [n, hidden], through one of its `own` experts."""
        number = int(expert - self.own.start)
        if self.laid_out:
            gate_up, down = self.laid_out[number]
            return down.product(self._opened(gate_up.product(x)))
        return functional.linear(self._opened(functional.linear(x, self.gate_up_proj[number])), self.down_proj[number])
