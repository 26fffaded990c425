"""One plan of questions for every engine: the same questions, in the same order, timed in the same way.

Each row of the table is measured between two readings of the engine's counters. If its content should be new and a
cache had some of it, it gives no figure.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from benchmarks.hits import Hits, check_new, since
from benchmarks.workload import CONCURRENT, Plan, Question

TITLES = {
    "ttft_new": "TTFT, new picture",
    "ttft_repeated_picture": "TTFT, *repeated* picture, new question",
    "ttft_repeated_prompt": "TTFT, *repeated* picture and question",
    "per_token": "time per output token",
    **{f"tokens_per_second_{many}": f"tokens/s at {many} concurrent" for many in CONCURRENT},
}
"""The rows, in the order in which they are measured."""
REPEATED = {name for name, title in TITLES.items() if "*repeated*" in title}
_WARM_UP_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Timed:
    """One answer: seconds to the first token, seconds in all, tokens, seconds by stage where the engine tells, and the
    longest time between two of its parts where that is taken."""

    first: float
    whole: float
    tokens: int
    stages: Mapping[str, float] = field(default_factory=dict)
    pause: float = 0.0

    @property
    def per_token(self) -> float:
        """Seconds for each token behind the first."""
        return (self.whole - self.first) / (self.tokens - 1)


@dataclass(frozen=True, slots=True)
class Measured:
    """Medians (seconds; tokens a second), what caches gave, and medians of a new picture's stages in seconds."""

    figures: dict[str, float] = field(default_factory=dict)
    hits: dict[str, Hits] = field(default_factory=dict)
    stages: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Job:
    """What an engine in a process of its own is to measure."""

    plan: Plan
    tokens: int


class Side(Protocol):
    """An engine that is ready."""

    name: str

    async def ask(self, question: Question, tokens: int) -> Timed:
        """One greedy answer of exactly so many tokens."""
        ...

    async def together(self, questions: Sequence[Question], tokens: int) -> float:
        """Seconds until all of several such answers are there, all asked for at once. Pictures are made before."""
        ...

    async def hits(self) -> Hits:
        """What its caches have given since it began; empty where it has none."""
        ...


async def measure(side: Side, plan: Plan, tokens: int) -> Measured:
    """All rows, each told on standard error as soon as it is there: tables come at the end, which a run may not reach.
    Raises NotNewError where new content was in a cache."""
    await side.together(plan.warm_up, _WARM_UP_TOKENS)
    found = Measured()

    async def row(name: str, work: Callable[[], Awaitable[float]]) -> None:
        before = await side.hits()
        found.figures[name] = await work()
        found.hits[name] = since(before, await side.hits())
        if name not in REPEATED:
            check_new(f"{side.name}, {TITLES[name]}", found.hits[name])
        print(f"{side.name}, {TITLES[name]}: {found.figures[name]:.4g}", file=sys.stderr, flush=True)

    async def first(questions: Sequence[Question]) -> float:
        answers = [await side.ask(question, 1) for question in questions]
        if not found.stages:
            found.stages.update(_stages(answers))
        return statistics.median(answer.first for answer in answers)

    async def later() -> float:
        return statistics.median([(await side.ask(question, tokens)).per_token for question in plan.long])

    async def rate(rounds: Sequence[Sequence[Question]]) -> float:
        rates = [len(questions) * tokens / await side.together(questions, tokens) for questions in rounds]
        return statistics.median(rates)

    await row("ttft_new", lambda: first(plan.first))
    await row("ttft_repeated_picture", lambda: first(plan.repeated_pictures))
    await row("ttft_repeated_prompt", lambda: first(plan.repeated_prompts))
    await row("per_token", later)
    for many, rounds in plan.together.items():
        await row(f"tokens_per_second_{many}", lambda rounds=rounds: rate(rounds))  # type: ignore[misc]
    return found


def _stages(answers: Sequence[Timed]) -> dict[str, float]:
    return {stage: statistics.median(each.stages.get(stage, 0.0) for each in answers) for stage in answers[0].stages}
