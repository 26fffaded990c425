"""Divides a step's tokens into those computed in chunks and those computed one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llm_service.layers.cache_spec import Segment
from llm_service.layers.recurrent.backend import CHUNK

FEW = 16
"""Drafts up to this number cost a CPU less one by one than as a chunk."""


def split(segments: Sequence[Segment], few: int = 0) -> tuple[list[Segment], list[list[Segment]]]:
    """Runs, which are computed chunk by chunk, and rounds of steps of one token each, which come after them, one round
    after the other. A run's last token is a step where it would be alone in its chunk, as it is one where the sequence
    is cut before it. What has a copy is a run of whole chunks. Up to `few` tokens that begin where no prompt is cut,
    which are drafts, are steps as well: the bits are those of tokens that come one by one.

    >>> runs, rounds = split([Segment(0, 1, 7, fresh=False), Segment(1, 66, 3, fresh=True)])
    >>> [(run.begin, run.end, run.slot) for run in runs], [(step.begin, step.slot, step.fresh) for step in rounds[0]]
    ([(1, 65, 3)], [(0, 7, False), (65, 3, False)])
    >>> _, rounds = split([Segment(0, 1, 7, fresh=False), Segment(1, 4, 3, fresh=False, context=70)], 16)
    >>> [[(step.begin, step.slot) for step in steps] for steps in rounds]
    [[(0, 7), (1, 3)], [(2, 3)], [(3, 3)]]
    """
    runs: list[Segment] = []
    rounds: list[list[Segment]] = []
    for segment in segments:
        count = segment.end - segment.begin
        drafts = count <= few and segment.context % CHUNK > 0
        first = segment.begin if drafts else segment.end - (count % CHUNK == 1)
        if first > segment.begin:
            runs.append(replace(segment, end=first))
        for number, row in enumerate(range(first, segment.end)):
            if number == len(rounds):
                rounds.append([])
            rounds[number].append(Segment(row, row + 1, segment.slot, segment.fresh and row == segment.begin))
    return runs, rounds
