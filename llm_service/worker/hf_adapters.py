"""LoRA adapters (Hu et al. 2021) on a text model that transformers computes: added to the outputs of its linear layers,
for the rows of sequences that have an adapter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from safetensors.torch import load
from torch import Tensor, nn

from common.hf.classes import blank_of, decoder_of
from llm_service.layers.lora.slots import LowRank
from llm_service.model_config.adapter_folder import Adaptable, Adapter
from llm_service.models.hf.decoder import HfDecoder
from llm_service.models.hf.linear import TextLinear
from llm_service.plan import StepPlan


def hf_linears(text: nn.Module) -> dict[str, nn.Linear | TextLinear]:
    """The linear layers of a text model, which adapters may change, by transformers' names."""
    return {name: part for name, part in text.named_modules() if isinstance(part, nn.Linear | TextLinear)}


def hf_adaptable(config: Any, max_rank: int) -> Adaptable:
    """The same of a configuration of transformers', as `adapter_folder.read` takes it."""
    linears = hf_linears(decoder_of(blank_of(config)))
    return Adaptable({name: (each.out_features, each.in_features) for name, each in linears.items()}, max_rank)


class HfAdapters:
    """Used in place of `RankAdapters`. Products are torch's, slot by slot, and are not captured in graphs."""

    def __init__(self, decoder: HfDecoder, slots: int) -> None:
        self._linears = hf_linears(decoder.text)
        self._dtype, self._device = decoder.dtype, decoder.device
        self._loaded: dict[int, dict[str, LowRank]] = {}
        self._slots: list[dict[str, LowRank]] = [{} for _ in range(slots)]
        self._rows: list[tuple[int, Tensor]] = []
        self._count = 0
        """Rows of the step that is computed."""
        for name, linear in self._linears.items():
            linear.register_forward_hook(self._adding_to(name))

    @property
    def for_graphs(self) -> None:
        """See `RankAdapters`: nothing."""
        return

    def kernels(self) -> set[str]:
        """None of ours."""
        return set()

    def warm_up(self) -> None:
        """Nothing is compiled."""

    def load(self, number: int, adapter: Adapter) -> None:
        """See `RankAdapters`. Raises RuntimeError if it adapts a layer that does not exist."""
        if unknown := sorted(adapter.scales.keys() - self._linears.keys()):
            raise RuntimeError(f"transformers' text has no {unknown[0]}, which an adapter is for")
        tensors = load(adapter.weights)
        pairs: dict[str, LowRank] = {}
        for target, scale in adapter.scales.items():
            halves = (tensors[f"{adapter.names[target]}.lora_{half}.weight"] for half in "AB")
            a, b = (half.to(self._device, self._dtype) for half in halves)
            pairs[target] = LowRank(a, b, scale)
        self._loaded[number] = pairs

    def drop(self, number: int) -> None:
        """See `RankAdapters`."""
        self._loaded.pop(number, None)

    def begin(self, plan: StepPlan) -> None:
        """See `RankAdapters`."""
        for slot, number in plan.adapters.filled:
            self._slots[slot] = self._loaded[number]
        self._rows, self._count = [], plan.tokens
        if plan.adapters.slots:
            of_row = np.repeat(plan.adapters.slots, [chunk.count for chunk in plan.chunks])
            found = [(int(slot), np.flatnonzero(of_row == slot)) for slot in np.unique(of_row) if slot >= 0]
            self._rows = [(slot, torch.from_numpy(rows).to(self._device)) for slot, rows in found]

    def numbers(self) -> list[np.ndarray]:
        """Nothing that would have to be moved with a step."""
        return []

    def put(self, numbers: Sequence[Tensor]) -> None:
        """Nothing is on the device."""

    def _adding_to(self, name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def add(_: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> None:
            """To out [1, n, outputs], of x [1, n, inputs], in place."""
            for slot, rows in self._rows:
                if (pair := self._slots[slot].get(name)) is not None:
                    assert out.shape[:-1] == (1, self._count), "it computes a step's rows, all of them"
                    inner = given[0][0, rows] @ pair.a.T
                    out[0, rows] += (inner @ pair.b.T).mul_(pair.scale)

        return add
