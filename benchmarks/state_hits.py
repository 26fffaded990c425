"""`python -m benchmarks.state_hits`: what conversations take from the prefix cache of a model with states.

*Repeated*: a system prompt of 300 tokens, a picture behind it, each conversation so far; all else is new. The scheduler
is the real one, nothing is computed. Beside it what blocks of 528 tokens would give, computed, without any limit."""

from __future__ import annotations

import argparse
import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from llm_service.engine.block_manager import BlockManager
from llm_service.engine.messages import Add, ItemRows
from llm_service.engine.scheduler import Limits, Scheduler
from llm_service.plan import StepResult
from llm_service.request import SamplingParams

_SYSTEM, _PICTURE = 300, 256
_END, _PAD, _WORDS = 0, 1, 150_000
_BLOCK, _MULTIPLE, _LARGE = 16, 64, 528
_RUNNING = 8


@dataclass(slots=True)
class Asked:
    """One turn: all tokens before its answer, and the answer."""

    prompt: list[int]
    answer: list[int]


def conversations(count: int, turns: int, rng: random.Random) -> Iterator[Asked]:
    """Turns of `count` conversations, in any order; one of five is asked anew, in other words, in place of the last."""
    system = [*_words(_SYSTEM - 1, rng), _END]
    opening = [*system, *[_PAD] * _PICTURE]
    histories = [list(opening) for _ in range(count)]
    left = [each for each in range(count) for _ in range(turns)]
    rng.shuffle(left)
    for each in left:
        for _ in range(2 if rng.random() < 0.2 else 1):
            question = [*_words(rng.randrange(10, 120), rng), _END, *_words(3, rng)]
            asked = Asked(histories[each] + question, [*_words(rng.randrange(20, 300), rng), _END])
            yield asked
        histories[each] = asked.prompt + asked.answer


def _words(count: int, rng: random.Random) -> list[int]:
    return [rng.randrange(2, _WORDS) for _ in range(count)]


class Ours:
    """The scheduler, with so many slots for snapshots, and blocks for all."""

    def __init__(self, snapshots: int) -> None:
        slots = _RUNNING + snapshots
        blocks = BlockManager(1 << 16, _BLOCK, state_slots=slots, state_chunk=_MULTIPLE)
        self._scheduler = Scheduler(blocks, Limits(_RUNNING, 2048, 1 << 17), frozenset({_END}), 64)
        self._ids = 0

    def hits(self, asked: Asked) -> int:
        """Tokens of the prompt that were in the cache; the answer is given."""
        self._ids += 1
        count, before = len(asked.prompt), self._scheduler.counters.prefix_hit_tokens
        self._scheduler.add(
            Add(
                id=self._ids,
                token_ids=array("i", asked.prompt).tobytes(),
                positions=np.tile(np.arange(count, dtype=np.int32), (3, 1)).tobytes(),
                mrope_delta=0,
                items=[ItemRows(b"picture", 0, [(_SYSTEM, 0, _PICTURE)], _PICTURE)],
                sampling=SamplingParams(max_tokens=len(asked.answer), temperature=0.0),
                salt="",
                priority=0,
                deadline=None,
            )
        )
        answer = iter(asked.answer)
        while (step := self._scheduler.schedule()[0]) is not None:
            tokens = [next(answer) for _ in step.drawing]
            self._scheduler.finish(step, StepResult(tokens, [None] * len(tokens)))
        return self._scheduler.counters.prefix_hit_tokens - before

    @property
    def kept(self) -> int:
        """Snapshots that are kept."""
        return self._scheduler.state().state_snapshots


@dataclass(slots=True)
class Aligned:
    """A cache that finds multiples of `_LARGE` tokens: those where a prompt or an answer was last at one, or `every`
    one that it passed."""

    every: bool
    _kept: set[bytes] = field(default_factory=set)

    def hits(self, asked: Asked) -> int:
        """Tokens of the prompt that were in the cache; the answer is given."""
        found = next((end for end in self._ends(len(asked.prompt) - 1) if _key(asked.prompt, end) in self._kept), 0)
        whole = asked.prompt + asked.answer
        for ends in (self._ends(len(asked.prompt)), self._ends(len(whole) - 1)):
            self._kept.update(_key(whole, end) for end in (ends if self.every else ends[:1]))
        return found

    @property
    def kept(self) -> int:
        """States that are kept."""
        return len(self._kept)

    @staticmethod
    def _ends(count: int) -> list[int]:
        return [*range(count // _LARGE * _LARGE, 0, -_LARGE)]


def _key(tokens: list[int], end: int) -> bytes:
    return array("i", tokens[:end]).tobytes()


def main() -> None:
    """Serves the trace by each cache, and prints a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.state_hits", description=__doc__)
    parser.add_argument("--conversations", type=int, default=40)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    trace = [*conversations(given.conversations, given.turns, random.Random(given.seed))]
    total = sum(len(asked.prompt) for asked in trace)
    caches: dict[str, Ours | Aligned] = {
        f"ours, {slots} slots for snapshots": Ours(slots) for slots in (8, 32, 128, 512)
    }
    caches[f"blocks of {_LARGE}, the last one of each prompt and answer"] = Aligned(every=False)
    caches[f"blocks of {_LARGE}, every one"] = Aligned(every=True)
    print(f"{len(trace)} prompts of {given.conversations} conversations, {total} tokens\n")
    print("| cache | prompts that hit | tokens that hit | of all | states kept at the end |")
    print("|---|---:|---:|---:|---:|")
    for name, cache in caches.items():
        hits = [cache.hits(asked) for asked in trace]
        print(f"| {name} | {sum(map(bool, hits))} | {sum(hits)} | {sum(hits) / total:.0%} | {cache.kept} |", flush=True)


if __name__ == "__main__":
    main()
