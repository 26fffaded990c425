"""Plans of steps that no request has asked for: a runner is warmed up, measured and tried with them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from llm_service.plan import Appended, Chunk, Draw, RowSlice, StepPlan
from llm_service.settings import EngineSettings


def largest_step(settings: EngineSettings, row_bytes: int) -> tuple[StepPlan, int]:
    """A plan as large as any, and the number of blocks that it uses: one token of as many sequences as may run, and a
    prefill that fills the step up, with media rows as far as the arena has any; each draws a token by sorting the
    vocabulary, with penalties, and tells how likely it was."""
    decodes = settings.max_running - 1
    rest = settings.max_step_tokens - decodes
    width = -(-rest // settings.block_size)
    chunks = [Chunk(0, 1, row) for row in range(decodes)]
    chunks.append(Chunk(0, rest, decodes))
    tables = [appended(row, [row]) for row in range(decodes)]
    tables.append(appended(decodes, range(decodes, decodes + width)))
    ids = array("i", [0] * settings.max_step_tokens)
    places = [*range(decodes), settings.max_step_tokens - 1]
    draws = [
        Draw(at=place, temperature=1.0, top_p=0.9, repetition_penalty=1.1, prompt=bytes(4), logprobs=0)
        for place in places
    ]
    rows = [RowSlice(decodes, 0, count)] if (count := min(rest, settings.row_arena_bytes // row_bytes)) else []
    slots = list(range(len(chunks)))
    made = StepPlan(ids.tobytes(), (ids * 3).tobytes(), chunks, rows, draws, slots=slots, appended=tables)
    return made, decodes + width


def prompt_plan(count: int, block_size: int) -> tuple[StepPlan, int]:
    """A plan of one sequence of so many tokens, and the number of its blocks."""
    ids, width = array("i", [0] * count), -(-count // block_size)
    draws, tables = [Draw(at=count - 1)], [appended(0, range(width))]
    chunks = [Chunk(0, count, 0)]
    return StepPlan(ids.tobytes(), (ids * 3).tobytes(), chunks, [], draws, slots=[0], appended=tables), width


def appended(row: int, blocks: Iterable[int]) -> Appended:
    """A whole table."""
    return Appended(row, 0, array("i", blocks).tobytes())
