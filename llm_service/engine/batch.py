"""From what a step computes to the plan that says so: one flattened batch, with all that the workers need."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from llm_service.engine import window
from llm_service.engine.sequence import Sequence
from llm_service.plan import Chunk, Draw, RowSlice, Score, StepPlan


@dataclass(slots=True)
class Step:
    """A plan and whom it is for: (sequence, tokens computed); the sequences that get a token, in draw order; those
    whose prompt is scored, in the order of the scores, with the place of the first token scored; and what it computes
    of prompts: (sequence, place of the first token, tokens)."""

    plan: StepPlan
    work: list[tuple[Sequence, int]]
    drawing: list[Sequence]
    scoring: list[tuple[Sequence, int]]
    prefill: list[tuple[Sequence, int, int]]


def build(work: Mapping[Sequence, int], block_size: int, row_bytes: int) -> Step:
    """The next step for these sequences, which then count as computed so far. At most one token of each may be unknown,
    and that one is chosen by the step before."""
    token_ids = array("i")
    positions = _Positions()
    chunks: list[Chunk] = []
    rows: list[RowSlice] = []
    draws: list[Draw] = []
    carried: list[tuple[int, int]] = []
    drawing: list[Sequence] = []
    scores: list[Score] = []
    scoring: list[tuple[Sequence, int]] = []
    prefill: list[tuple[Sequence, int, int]] = []
    for sequence, count in work.items():
        begin, at = sequence.computed, len(token_ids)
        end = begin + count
        rows.extend(window.rows(sequence, count, at, row_bytes))
        if count == 1 and begin >= sequence.prompt_tokens:
            positions.one(begin + sequence.delta)
            token_ids.append(sequence.tokens[begin])
        else:
            positions.window(window.positions(sequence, count))
            token_ids.extend(sequence.tokens[begin:end])
            prefill.append((sequence, begin, count))
        chunks.append(Chunk(begin, count, sequence.table.blocks[: -(-end // block_size)]))
        if sequence.scored < sequence.prompt_tokens and (asked := window.score(sequence, count, at)):
            scores.append(asked)
            scoring.append((sequence, begin + asked.at - at + 1))
        drawn = -1
        if end == len(sequence.tokens):
            if sequence.unknown:
                carried.append((at + count - 1, sequence.drawn))
            drawn = len(draws)
            draws.append(window.draw(sequence, at + count - 1))
            drawing.append(sequence)
        sequence.planned(count, drawn)
    plan = StepPlan(token_ids.tobytes(), positions.packed(), chunks, rows, draws, carried, scores)
    return Step(plan, list(work.items()), drawing, scoring, prefill)


class _Positions:
    """Collects int32 [3, n]. Decodes, whose three positions are equal, come one by one and are many."""

    def __init__(self) -> None:
        self._windows: list[np.ndarray] = []
        self._ones: list[int] = []

    def one(self, position: int) -> None:
        """A token that stands at the same place in time, height and width."""
        self._ones.append(position)

    def window(self, positions: np.ndarray) -> None:
        """int32 [3, m]"""
        self._gather()
        self._windows.append(positions)

    def _gather(self) -> None:
        if self._ones:
            self._windows.append(np.tile(np.array(self._ones, np.int32), (3, 1)))
            self._ones = []

    def packed(self) -> bytes:
        """All of them, in order."""
        self._gather()
        return np.concatenate(self._windows, axis=1).tobytes()
