"""The LoRA adapters of one rank: its partition of the loaded ones, and the slots from which layers compute."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from safetensors.torch import load
from torch import Tensor, nn

from common.gpu.transfer import to_device
from llm_service.families.registry import TEXT_FAMILIES
from llm_service.layers.cpu import selection
from llm_service.layers.linear.parallel import PackedLinear
from llm_service.layers.linear.placement import path_within
from llm_service.layers.linear.weight_dtype import narrowed
from llm_service.layers.lora.linear_adapters import AdapterKernel, AdapterRows, LinearAdapters
from llm_service.layers.lora.row_tiles import RowTiles
from llm_service.layers.lora.slots import LowRank, told_of
from llm_service.layers.tensor_parallel import ALONE
from llm_service.model_config.adapter_folder import Adaptable, Adapter
from llm_service.model_config.text import TextConfig
from llm_service.models.decoder import Decoder
from llm_service.plan import StepPlan

_PORTION = 16 << 20
"""Bytes after which further matrices go to a GPU in another copy."""


def adapted_linears(module: nn.Module, path: str = "") -> Iterator[tuple[str, PackedLinear, str]]:
    """The layers that adapters may change: the name of each matrix in a checkpoint behind the decoder's stem, its
    module, and its part of that module. The head, routers and experts are excluded."""
    for attribute, child in module.named_children():
        if isinstance(child, PackedLinear):
            for part in child.parts:
                yield f"{path}{part}", child, part
        else:
            yield from adapted_linears(child, path_within(path, attribute, child))


def shapes_of(config: TextConfig) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of every matrix that an adapter may change, all ranks' together."""
    whole = Decoder(config, ALONE, torch.float32, torch.device("meta"))
    found = adapted_linears(whole.layers, "layers.")
    return {name: (len(linear.places(part)), linear.inputs) for name, linear, part in found}


def adaptable_of(config: dict[str, Any], max_rank: int, bases: Collection[str] = (), max_context: int = 0) -> Adaptable:
    """What adapters may change of a native model, or of a transformers model whose text our decoder computes, by its
    configuration."""
    family = TEXT_FAMILIES.get(str(config.get("model_type")))
    own_name = str if family is None else family.own_name
    return Adaptable(shapes_of(TextConfig.of(config, max_context)), max_rank, bases, own_name)


class RankAdapters:
    """`slots` for adapters up to rank `rank`. Loaded adapters without a slot are in host memory."""

    def __init__(self, decoder: Decoder, slots: int, rank: int, kernel: AdapterKernel | None = None) -> None:
        """`kernel` adds to few rows; None: the fastest one for the decoder's device."""
        self._rows = AdapterRows(kernel=_kernel_for(decoder, rank) if kernel is None else kernel)
        self._number = slots
        self._linears = {name: (linear, part) for name, linear, part in adapted_linears(decoder.layers, "layers.")}
        self._dtype, self._device = decoder.kv_dtype, decoder.device
        self._loaded: dict[int, dict[PackedLinear, dict[str, LowRank]]] = {}
        panels = self._rows.kernel is AdapterKernel.CPU  # CPU kernels need the stored type, others the type computed in
        like = torch.empty(0, dtype=decoder.kv_dtype if panels else decoder.dtype, device=decoder.device)
        self._slots = {
            linear: LinearAdapters(linear, slots, rank, self._rows, like) for linear, _ in self._linears.values()
        }
        for linear, its in self._slots.items():
            linear.adapters = its

    def kernels(self) -> set[str]:
        """Names of our kernels for CPUs that these need, as `common.cpu.jit.find` takes them."""
        if self._rows.kernel is not AdapterKernel.CPU:
            return set()
        from llm_service.layers.cpu.lora_kernel import KERNELS  # numba takes its time

        return set(KERNELS)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Has a GPU's kernels compiled, so that no request waits."""
        for layer in self._slots.values():
            layer.warm_up()

    def load(self, number: int, adapter: Adapter) -> None:
        """Keeps this rank's partition of an adapter, which was checked, under a number that is not reused."""
        tensors = load(adapter.weights)
        partitions: dict[PackedLinear, dict[str, LowRank]] = {}
        for target, scale in adapter.scales.items():
            places = self._places(target)
            whole, stacked = (tensors[f"{adapter.names[target]}.lora_{half}.weight"] for half in "AB")
            for (linear, part), rows in zip(places, stacked.chunk(len(places)), strict=True):
                a, b = map(self._kept, linear.partition(part, whole, rows))
                partitions.setdefault(linear, {})[part] = LowRank(a, b, scale)
        self._loaded[number] = partitions

    def _places(self, target: str) -> list[tuple[PackedLinear, str]]:
        """The places of a matrix: transformers has gates and up projections in one, checkpoints may have two."""
        if target in self._linears:
            return [self._linears[target]]
        stem = target.removesuffix("gate_up_proj")
        return [self._linears[f"{stem}{part}"] for part in ("gate_proj", "up_proj")]

    def _kept(self, part: Tensor) -> Tensor:
        """Copies a part, rounded like the decoder's matrices, or in 16 bits if these hold all of its numbers."""
        longer = part.dtype.itemsize > self._dtype.itemsize
        return narrowed(part.to(self._dtype) if longer else part).clone()

    def drop(self, number: int) -> None:
        """Drops an adapter; no later plan names it."""
        self._loaded.pop(number, None)

    def begin(self, plan: StepPlan) -> None:
        """Fills the slots that a plan fills, and routes its rows through their slots."""
        for slot, number in plan.adapters.filled:
            self._fill(slot, self._loaded[number])
        if not plan.adapters.slots:
            self._rows.clear()
            return
        rows = np.repeat(plan.adapters.slots, [chunk.count for chunk in plan.chunks])
        self._rows.use(rows, np.arange(len(rows)) if plan.prompt_logprobs else np.array(plan.wanted))

    def _fill(self, slot: int, partitions: Mapping[PackedLinear, Mapping[str, LowRank]]) -> None:
        """Loads an adapter into a slot; a GPU gets it in portions, which are put in place there."""
        if self._device.type == "cpu" and self._rows.kernel is not AdapterKernel.GPU:
            for linear, its in self._slots.items():
                its.put(slot, partitions.get(linear, {}))
            return
        portion, size = list[tuple[LinearAdapters, list[LowRank | None]]](), 0
        for linear, its in self._slots.items():
            pairs = its.ordered(partitions.get(linear, {}))
            portion.append((its, pairs))
            size += sum(half.nbytes for pair in pairs if pair is not None for half in (pair.a, pair.b))
            if size >= _PORTION:
                self._move(slot, portion)
                portion, size = [], 0
        if portion:
            self._move(slot, portion)

    def _move(self, slot: int, portion: Sequence[tuple[LinearAdapters, Sequence[LowRank | None]]]) -> None:
        """Fills a slot of some layers, by one copy from locked memory."""
        given: list[np.ndarray] = []
        for _, pairs in portion:
            given.append(told_of(pairs))
            given += [_bytes_of(half) for pair in pairs if pair is not None for half in (pair.a, pair.b)]
        there = iter(to_device(given, self._device))
        for its, pairs in portion:
            told = next(there)
            its.put_ordered(slot, [pair and _laid_over(pair, next(there), next(there)) for pair in pairs], told)

    def numbers(self) -> list[np.ndarray]:
        """What must be on the device for the plan's rows, if no graph computes them."""
        return self._rows.numbers()

    def put(self, numbers: Sequence[Tensor]) -> None:
        """Takes `numbers`, copied to the device."""
        self._rows.put(numbers)

    @property
    def for_graphs(self) -> RankAdapters | None:
        """What graphs compute from; None if steps with adapters are not captured."""
        return self if self._rows.kernel is AdapterKernel.GPU else None

    def tiles(self, tokens: int) -> RowTiles:
        """What a graph of so many tokens reads: room for any batch that fits, filled with a batch without adapters."""
        return RowTiles.nobody(tokens, self._number, self._device)

    def over(self, tiles: RowTiles | None) -> AbstractContextManager[None]:
        """See `AdapterRows`."""
        return self._rows.over(tiles)


def _bytes_of(half: Tensor) -> np.ndarray:
    """A matrix on the host, uint8, row by row."""
    return half.contiguous().view(-1).view(torch.uint8).numpy()


def _laid_over(pair: LowRank, a: Tensor, b: Tensor) -> LowRank:
    """A pair whose matrices are these bytes in another memory."""
    first, second = (each.view(half.dtype).view(half.shape) for each, half in ((a, pair.a), (b, pair.b)))
    return LowRank(first, second, pair.scale)


def _kernel_for(decoder: Decoder, rank: int) -> AdapterKernel:
    if decoder.device.type == "cuda":
        from llm_service.layers.gpu import lora_tiles, row_kernels

        computes = row_kernels.run_on(decoder.device) and lora_tiles.computes(rank, decoder.dtype, decoder.device)
        every = decoder.group.all_reduce_min(int(computes))  # ranks capture the same graphs
        return AdapterKernel.GPU if every else AdapterKernel.NONE
    fits = decoder.dtype == torch.float32 and selection.allows_panels() and selection.fused_vectors()
    return AdapterKernel.CPU if fits else AdapterKernel.NONE
