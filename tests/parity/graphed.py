"""Engines with graphs, without a GPU: what a graph would do again is done again, over the same buffers, poisoned
between two replays."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from llm_service.worker.draft_model import DraftModel
from llm_service.worker.graphs import CaptureBounds, GraphRunner
from llm_service.worker.model_runner import ModelRunner
from testkit.local_engine import LocalEngine
from testkit.plain_attention import PlainTables
from tests.plain_states import plain_states

PEOPLE = 6


class Again:
    """Captures by keeping the callable. `room` graphs fit into memory; `most` is how many there were at once."""

    def __init__(self, room: int = 1000) -> None:
        self.captured = self.most = 0
        self._room = room
        self._alive = weakref.WeakSet[Callable[[], None]]()
        self.after: Callable[[], None] = lambda: None

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        self.captured += 1

        def replay() -> None:
            run()
            self.after()

        self._alive.add(replay)
        self.most = max(self.most, len(self._alive))
        return replay

    @property
    def held(self) -> int:
        return 0 if self.captured <= self._room else 1


def graphed(
    folder: Path,
    attention: str = "",
    room: int = 1000,
    step_tokens: int = 64,
    *,
    tokens: int = 64,
    drafts: int = 0,
    **more: Any,
) -> tuple[LocalEngine, Again]:
    """An engine with graphs of up to `tokens`, and for up to so many `drafts` of a sequence, whose buffers are poisoned
    after each replay."""
    kinds = {"attention": attention or PlainTables, "states": plain_states}
    given: dict[str, Any] = {"step_tokens": step_tokens, "speculative_tokens": drafts, **kinds, **more}
    engine = LocalEngine(folder, max_running=PEOPLE, blocks=256, **given)
    capture = Again(room)
    levels = engine.runner.arena.levels
    bounds = CaptureBounds(PEOPLE, tokens, 4096, levels, drafts, engine.scheduler.limits.draft_rows)
    engine.runner.capture(bounds, capture, max_bytes=0, agree=lambda number: number)
    runners = [engine.runner]
    if isinstance(proposer := engine.runner.proposer, DraftModel):
        proposer.capture(bounds, capture, max_bytes=0)
        runners.append(proposer._runner)
    places = [addresses(runner.graphs) for runner in runners if runner.graphs]

    def poison() -> None:
        assert places == [addresses(runner.graphs) for runner in runners if runner.graphs], "a buffer has moved"
        for runner in runners:
            poison_runner(runner)

    capture.after = poison
    return engine, capture


def poison_runner(runner: ModelRunner) -> None:
    """What nobody may read any more."""
    graphs = runner.graphs
    assert graphs is not None
    graphs._buffers.hidden.fill_(torch.nan)
    graphs._buffers.block_table.fill_(10**6)
    graphs._buffers.token_ids.fill_(1)  # padding is looked up as well
    for graph in graphs:
        for read in graph.read:
            read.fill_(10**6)
    for kind in runner.caches.paged.values():
        kind.cache[:, :, -1].fill_(torch.nan)


def addresses(graphs: GraphRunner) -> list[int]:
    buffers = graphs._buffers
    tensors = [buffers.hidden, buffers.deep, buffers.out, buffers.block_table, buffers.token_ids]
    tensors += [read for graph in graphs for read in graph.read]
    return [tensor.data_ptr() for tensor in tensors]
