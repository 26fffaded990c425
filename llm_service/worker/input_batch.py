"""Moves a step's plan to the device for a model: tokens, positions and block tables in one copy, and the metadata that
layers take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from common.gpu.transfer import to_device
from llm_service.layers.attention.backend import Span, parts_at, runs_of
from llm_service.layers.attention.metadata import AttentionMetadata, BatchNumbers
from llm_service.models.model import Model
from llm_service.plan import StepPlan
from llm_service.worker.caches import Caches
from llm_service.worker.device_tables import DeviceTables
from llm_service.worker.graphs import Graph
from llm_service.worker.loaded_adapters import LoadedAdapters


@dataclass(frozen=True, slots=True)
class InputBatch:
    """A plan on the device: `token_ids` int32 [n], `positions` int32 [3, n] (or [4, n], with each token's own number
    first), `wanted` int64 [m] (`StepPlan.wanted`), and `carried` int64 [2, c]. `places` are the tokens whose hidden
    states are computed through all layers; None means all. `read` are the parts of the step's `numbers` that kernels
    read, for a graph or for an eager step; both are empty where no kernel reads any."""

    token_ids: Tensor
    positions: Tensor
    wanted: Tensor
    carried: Tensor
    places: Tensor | None
    read: list[Tensor]
    numbers: BatchNumbers | None


class Inputs:
    """Prepares the inputs of steps, in the order of their plans; each plan's new blocks are appended to the block
    `tables`. For a model whose runner `keeps_hidden`, hidden states of all places are computed."""

    def __init__(
        self, model: Model, caches: Caches, adapters: LoadedAdapters | None = None, *, keeps_hidden: bool
    ) -> None:
        self._model, self._caches, self._adapters, self._keeps_hidden = model, caches, adapters, keeps_hidden
        self.tables = DeviceTables(caches.block_size, model.device)

    def prepare(self, plan: StepPlan, graph: Graph | None) -> InputBatch:
        """Moves everything that the step needs to the device in one copy, and appends the plan's new blocks to the
        block tables."""
        positions = np.frombuffer(plan.positions, np.int32).reshape(3, -1)
        if self._model.position_rows > len(positions):
            own = [np.arange(each.context, each.context + each.count, dtype=np.int32) for each in plan.chunks]
            positions = np.concatenate([np.concatenate(own)[None], positions])
        places = np.array(plan.wanted)
        carried = np.array(plan.carried, np.int64).reshape(-1, 2).T
        appended = self.tables.append(plan.appended)
        numbers: BatchNumbers | None = None
        read: list[np.ndarray] = []
        if self._caches.follows_metadata:
            told = [(each.context, each.count, each.answered, each.row) for each in plan.chunks]
            contexts, counts, answered, rows = np.array(told).T
            tiling = self._caches.tiling if graph is None else graph.tiling
            size = self._caches.block_size
            numbers = BatchNumbers.of(contexts, counts, answered, rows, self.tables.host, size, tiling)
            arrays = AttentionMetadata.arrays(numbers)
            read = [rows, *arrays] if graph is None else graph.of(plan, numbers, positions, rows)
        else:
            appended = []  # tables are read on the host
        given = [np.frombuffer(plan.token_ids, np.int32), positions, places, carried]
        adapted = self._adapters.numbers() if self._adapters is not None and graph is None else []
        there = to_device([*given, *appended, *read, *adapted], self._model.device)
        first, last = len(given), len(given) + len(appended)
        end = last + len(read)
        if self._adapters is not None and graph is None:
            self._adapters.put(there[end:])
        if numbers is not None:
            self.tables.update(there[first:last])
        every = self.keeps_all(plan) or np.array_equal(places, np.arange(positions.shape[1]))
        token_ids, where, wanted, carry = there[:first]
        return InputBatch(token_ids, where, wanted, carry, None if every else wanted, there[last:end], numbers)

    def batches(self, plan: StepPlan, batch: InputBatch) -> list[Any]:
        """The layers' metadata for a step that fits no graph."""
        metadata: AttentionMetadata | None = None
        if batch.numbers is not None:
            rows, *arrays = batch.read
            metadata = AttentionMetadata.over(batch.numbers, arrays, self.tables.gather(rows, batch.numbers.longest))
        chunks, spans = self.tables.chunks(plan.chunks), self.spans(plan)
        return self._caches.batches(chunks, plan.slots, plan.states.within, spans, metadata)

    def at_places(self, plan: StepPlan) -> list[Any] | None:
        """For layers that share keys and values, the metadata of a step that wants the hidden states of only some
        tokens. None where those tokens do not ascend, or one of them attends to tokens behind it, as the first token of
        a prompt does where a bidirectional span begins with it. A later one is the last of its span, if it is in
        one."""
        places = np.array(plan.wanted)
        sees_on = any(begin <= each.at < end - 1 for begin, end in self.spans(plan) for each in plan.pools)
        if sees_on or (np.diff(places) <= 0).any():
            return None
        return self._caches.batches(parts_at(self.tables.chunks(plan.chunks), places))

    def keeps_all(self, plan: StepPlan) -> bool:
        """Whether the hidden states of places outside `wanted` are read."""
        sums = any(each.count > 1 for each in plan.pools)
        reordered = bool(plan.pools) and len(plan.wanted) == plan.tokens  # adapters' rows go by how many they are
        return bool(plan.prompt_logprobs) or sums or reordered or self._keeps_hidden

    def spans(self, plan: StepPlan) -> list[Span]:
        """Runs of rows that attend to each other in both directions, which no graph computes: rows of prompts, or of
        media in them."""
        rule = self._model.chunk_rule
        if rule.of_prompts and not rule.media_tokens:
            return plan.whole
        if rule.of_prompts:
            ids, media = np.frombuffer(plan.token_ids, np.int32), rule.media_tokens
            return [run for begin, end in plan.whole for run in runs_of(np.isin(ids[begin:end], media), begin)]
        return [] if rule.may_end_in_run else [(part.at, part.at + part.count) for part in plan.rows]
