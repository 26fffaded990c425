"""`python -m benchmarks.state_hits`: prefix hits of conversations with a model whose layers keep states.

*Repeated*: a system prompt of 300 tokens, a picture after it, each conversation so far; all else is new. The scheduler
is the real one; nothing is computed. Peers are simulated by their rules with as many states; each keeps the last used
ones, and all keys and values. The running sequence's state does not count anywhere."""

from __future__ import annotations

import argparse
import math
import random
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from llm_service.engine.block_manager import BlockManager
from llm_service.engine.limits import SchedulerLimits
from llm_service.engine.messages import Add, ItemRows
from llm_service.engine.scheduler import Scheduler
from llm_service.plan import StepResult
from llm_service.request import MediaRun, SamplingParams

_SYSTEM, _PICTURE = 300, 256
_END, _PAD, _WORDS = 0, 1, 150_000
_BLOCK, _MULTIPLE, _LARGE = 16, 64, 528
_TRACKED = 256
_STATES = (8, 16, 32, 64, 128, 512)


@dataclass(slots=True)
class Asked:
    """One turn: all tokens before its answer, and the answer."""

    prompt: list[int]
    answer: list[int]


def conversations(count: int, turns: int, rng: random.Random, system_tokens: int = _SYSTEM) -> Iterator[Asked]:
    """Turns of `count` conversations, in any order; one of five is asked anew, in other words, in place of the last."""
    system = [*_words(system_tokens - 1, rng), _END]
    opening = [*system, *[_PAD] * _PICTURE]
    histories = [list(opening) for _ in range(count)]
    left = [each for each in range(count) for _ in range(turns)]
    rng.shuffle(left)
    for each in left:
        again = rng.random() < 0.2
        asked = _next_turn(histories[each], rng)
        yield asked
        if again:
            asked = _next_turn(histories[each], rng)
            yield asked
        histories[each] = asked.prompt + asked.answer


def _next_turn(history: list[int], rng: random.Random) -> Asked:
    question = [*_words(rng.randrange(10, 120), rng), _END, *_words(3, rng)]
    return Asked(history + question, [*_words(rng.randrange(20, 300), rng), _END])


def _words(count: int, rng: random.Random) -> list[int]:
    return [rng.randrange(2, _WORDS) for _ in range(count)]


class Cache(Protocol):
    """Something that keeps states."""

    def hits(self, asked: Asked) -> int:
        """Tokens of the prompt that were in the cache; the answer is given."""
        ...

    @property
    def kept(self) -> int:
        """States that are kept."""
        ...


class Ours:
    """The scheduler, with so many slots for snapshots, and blocks for all."""

    def __init__(self, snapshots: int) -> None:
        blocks = BlockManager(1 << 16, _BLOCK, state_slots=1 + snapshots, state_chunk=_MULTIPLE)
        self._scheduler = Scheduler(blocks, SchedulerLimits(1, 2048, 1 << 17), frozenset({_END}), 64)
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
                items=_picture(asked.prompt),
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


def _picture(prompt: list[int]) -> list[ItemRows]:
    begin = prompt.index(_PAD) if _PAD in prompt else None
    return [] if begin is None else [ItemRows(b"picture", 0, (MediaRun(begin, 0, _PICTURE),), _PICTURE)]


class LastUsed:
    """Keeps the states of as many prefixes as were used last."""

    def __init__(self, states: int) -> None:
        self._most = states
        self._kept: OrderedDict[bytes, None] = OrderedDict()

    @property
    def kept(self) -> int:
        """States that are kept."""
        return len(self._kept)

    def find(self, tokens: list[int], ends: Iterable[int]) -> int:
        """The first of these ends that has a state; 0 where none has."""
        found = next((end for end in ends if _key(tokens, end) in self._kept), 0)
        if found:
            self._kept.move_to_end(_key(tokens, found))
        return found

    def keep(self, tokens: list[int], end: int) -> None:
        """Of so many tokens, more than 0."""
        self._kept[_key(tokens, end)] = None
        self._kept.move_to_end(_key(tokens, end))
        if len(self._kept) > self._most:
            self._kept.popitem(last=False)

    def shared(self, tokens: list[int]) -> int:
        """How many of these tokens one of the kept prefixes begins with, at most."""
        key, most = _key(tokens, len(tokens)), 0
        for kept in self._kept:
            while kept[: most + 4] == key[: most + 4] and len(kept) > most:
                most += 4
        return most // 4


class Aligned(LastUsed):
    """vLLM's `align` mode: states at multiples of `_LARGE` tokens, the last one of a prompt and those of its answer;
    with `fine`, at the last block of a prompt as well."""

    def __init__(self, states: int, *, fine: bool = False) -> None:
        super().__init__(states)
        self._fine = fine

    def hits(self, asked: Asked) -> int:
        """See `Cache`."""
        prompt, whole = asked.prompt, asked.prompt + asked.answer
        step = _BLOCK if self._fine else _LARGE
        found = self.find(prompt, range((len(prompt) - 1) // step * step, 0, -step))
        for end in sorted({len(prompt) // _LARGE * _LARGE, len(prompt) // step * step} - {0}):
            self.keep(prompt, end)
        for end in range((len(prompt) // _LARGE + 1) * _LARGE, len(whole), _LARGE):
            self.keep(whole, end)
        return found


class Every(LastUsed):
    """vLLM's `all` mode: a state at each multiple of `_LARGE` tokens."""

    def hits(self, asked: Asked) -> int:
        """See `Cache`."""
        whole = asked.prompt + asked.answer
        found = self.find(asked.prompt, range((len(asked.prompt) - 1) // _LARGE * _LARGE, 0, -_LARGE))
        for end in range(found + _LARGE, len(whole), _LARGE):
            self.keep(whole, end)
        return found


class Radix(LastUsed):
    """SGLang's radix tree: a state at the last multiple of `_MULTIPLE` tokens of a prompt, or where it leaves another
    one if that is behind what is found; of an answer at the last of `_TRACKED`. A hit is a use of all on its way."""

    def hits(self, asked: Asked) -> int:
        """See `Cache`."""
        prompt, whole = asked.prompt, asked.prompt + asked.answer
        found = self._walk(prompt, len(prompt) - 1)
        shared = min(self.shared(prompt), len(prompt) - 1) // _MULTIPLE * _MULTIPLE
        tracked = shared if shared > found else len(prompt) // _MULTIPLE * _MULTIPLE
        said = (len(whole) - 1) // _TRACKED * _TRACKED
        for end in (tracked, said if said > len(prompt) else 0):
            if end:
                self._walk(whole, end)
                self.keep(whole, end)
        return found

    def _walk(self, tokens: list[int], end: int) -> int:
        step = math.gcd(_MULTIPLE, _TRACKED)
        return max((self.find(tokens, [each]) for each in range(step, end + 1, step)), default=0)


def _key(tokens: list[int], end: int) -> bytes:
    return array("i", tokens[:end]).tobytes()


CACHES: dict[str, Callable[[int], Cache]] = {
    "Twinlens": Ours,
    "vLLM, `align`": Aligned,
    "vLLM, `align`, prompts' ends too": partial(Aligned, fine=True),
    "vLLM, `all`": Every,
    "SGLang": Radix,
}


def main() -> None:
    """Serves the trace by each cache, and prints a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.state_hits", description=__doc__)
    parser.add_argument("--conversations", type=int, default=40)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--system-tokens", type=int, default=_SYSTEM)
    parser.add_argument("--states", type=int, nargs="+", default=_STATES)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    trace = [*conversations(given.conversations, given.turns, random.Random(given.seed), given.system_tokens)]
    total = sum(len(asked.prompt) for asked in trace)
    print(f"{len(trace)} prompts of {given.conversations} conversations, {total} tokens: which part of them hits\n")
    print("| states at most |", " | ".join(map(str, given.states)), "|")
    print("|---|" + "---:|" * len(given.states))
    for name, new in CACHES.items():
        caches = [new(states) for states in given.states]
        parts = [sum(map(cache.hits, trace)) / total for cache in caches]
        cells = [f"{part:.0%}" if cache.kept else "" for part, cache in zip(parts, caches, strict=True)]
        print(f"| {name} |", " | ".join(cells), "|", flush=True)
        print("| … kept at the end |", " | ".join(str(cache.kept) for cache in caches), "|", flush=True)


if __name__ == "__main__":
    main()
