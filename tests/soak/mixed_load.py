"""Everything that callers do, at once and for minutes: what came of each request, and what memory the services took.

A caller draws an `Act` after the other. Those whose answer is known beforehand are compared with it, to the token; a
request that is broken off must have said the beginning of it; a new picture is asked about twice. Bad input must be
refused with its own reason, and whatever a request met, its events must be in order and end once.
"""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests import pictures
from tests.launch import Service
from tests.rpc.pairs import Pair, answer, asked
from twinlens import TwinlensError, image, user, v1, video

CALLERS = 24
POOL = 48
_STILLS = [pictures.encoded(pictures.noise(64 + 48 * (n % 5), 64 + 32 * (n % 4), 77_000 + n)) for n in range(16)]
_CLIPS = [pictures.video(pictures.frames(8 + 4 * n, 96, 64, seed=n), fps=4) for n in range(4)]
_WORDS = ("red", "blue", "what", "is", "circle", "left", "of", "it", "how", "many")
_SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "blue"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["colour", "count"],
        "additionalProperties": False,
    }
)
_CUT = _STILLS[0][: len(_STILLS[0]) // 2]
_BAD: dict[str, Callable[[], v1.GenerateRequest]] = {
    "MEDIA_UNREADABLE": lambda: asked(user(image(_CUT), "cut off")),
    "KEY_NOT_FOUND": lambda: asked(user(v1.Media(modality=v1.MODALITY_IMAGE, key=b"k" * 32), "never seen")),
    "BAD_STRUCTURE": lambda: asked("say", v1.SamplingParams(regex="(((", max_tokens=4)),
    "OUT_OF_RANGE": lambda: asked("say", v1.SamplingParams(top_p=float("nan"), max_tokens=4)),
    "PROMPT_TOO_LONG": lambda: asked("word " * 9000),
}

_NEAR = 1e-4
"""How far numbers of a prompt's vectors may lie apart that was cut otherwise, or found in the cache."""

Tokens = list[list[int]]


@dataclass(slots=True)
class Report:
    """What came of a load: outcomes by kind, and resident bytes of each service, without shared memory, over time."""

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    memory: list[tuple[float, list[int]]] = field(default_factory=list)

    def note(self, kind: str, *, right: bool, about: str = "") -> None:
        """One request has come to its end."""
        self.outcomes[kind] += 1
        if not right:
            self.wrong.append(f"{kind}: {about}")

    def curve(self, points: int) -> list[tuple[int, ...]]:
        """MiB of each service at so many moments, evenly spread, the last one among them."""
        at = [round(n * (len(self.memory) - 1) / (points - 1)) for n in range(points)]
        return [tuple(size >> 20 for size in self.memory[index][1]) for index in at]

    def growth(self, since: float) -> list[tuple[int, int]]:
        """For each service (bytes at the first sample after `since` seconds, bytes at the end)."""
        first = next(sizes for at, sizes in self.memory if at >= since)
        return list(zip(first, self.memory[-1][1], strict=True))


class Load:
    """`CALLERS` threads that ask a pair of services for `seconds`."""

    def __init__(self, both: Pair, seconds: float) -> None:
        self._both = both
        self._seconds = seconds
        self._fresh = itertools.count(1)
        self._known: list[Tokens] = []
        self._vectors: list[list[float]] = []
        self._lock = threading.Lock()
        self.report = Report()

    def run(self) -> Report:
        """Asks everything alone first, then all at once until the time is over."""
        self._known = [_said(self._both, request(number)) for number in range(POOL)]
        self._vectors = [_embedded(self._both, number) for number in range(POOL)]
        begun = time.monotonic()
        over = threading.Event()
        watching = threading.Thread(target=self._watch, args=(begun, over))
        watching.start()
        try:
            with ThreadPoolExecutor(CALLERS) as threads:
                list(threads.map(lambda caller: self._call(caller, begun + self._seconds), range(CALLERS)))
        finally:
            over.set()
            watching.join()
        self.report.memory.append((time.monotonic() - begun, self._sizes()))
        return self.report

    def _watch(self, begun: float, over: threading.Event) -> None:
        while not over.wait(1.0):
            self.report.memory.append((time.monotonic() - begun, self._sizes()))

    def _sizes(self) -> list[int]:
        return [own_memory(service) for service in (self._both.encoder, self._both.llm)]

    def _call(self, caller: int, end: float) -> None:
        rng = random.Random(caller)
        others = (self._leave, self._abort, self._hurry, self._refused, self._new, self._embed)
        acts = (self._ask, self._ask, self._ask, *others)
        for number in itertools.count():
            if time.monotonic() >= end:
                return
            kind, right, about = rng.choice(acts)(rng, f"soak {caller}/{number}")
            with self._lock:
                self.report.note(kind, right=right, about=about)

    def _ask(self, rng: random.Random, name: str) -> tuple[str, bool, str]:
        which = rng.randrange(POOL)
        try:
            return "answered", _said(self._both, _named(request(which), name)) == self._known[which], f"{which}"
        except TwinlensError as error:
            return error.reason, error.code.name == "RESOURCE_EXHAUSTED" and error.retryable, str(error)

    def _embed(self, rng: random.Random, name: str) -> tuple[str, bool, str]:
        which = rng.randrange(POOL)
        try:
            found = _embedded(self._both, which, name)
        except TwinlensError as error:
            return error.reason, error.code.name == "RESOURCE_EXHAUSTED" and error.retryable, str(error)
        off = max(abs(one - other) for one, other in zip(found, self._vectors[which], strict=True))
        return "embedded", off < _NEAR, f"{which} is off by {off}"

    def _new(self, rng: random.Random, name: str) -> tuple[str, bool, str]:
        with self._lock:
            seed = 1_000_000 + next(self._fresh)
        shown = image(pictures.encoded(pictures.noise(64 + 32 * rng.randrange(6), 96, seed)))
        asking = _named(asked(user(shown, "What is new?"), _greedy(8)), name)
        try:
            return "new", _said(self._both, asking) == _said(self._both, asking), f"{seed}"
        except TwinlensError as error:
            return error.reason, error.code.name == "RESOURCE_EXHAUSTED" and error.retryable, str(error)

    def _leave(self, rng: random.Random, name: str) -> tuple[str, bool, str]:
        return self._break_off(rng, name, "left", 180.0)

    def _abort(self, rng: random.Random, name: str) -> tuple[str, bool, str]:
        return self._break_off(rng, name, "aborted", 180.0)

    def _hurry(self, rng: random.Random, name: str) -> tuple[str, bool, str]:
        return self._break_off(rng, name, "hurried", rng.random() * 2)

    def _break_off(self, rng: random.Random, name: str, how: str, seconds: float) -> tuple[str, bool, str]:
        """Reads some events, then leaves, has the request aborted, or sees its time end."""
        which, last = rng.randrange(POOL), rng.randrange(12)
        known = self._known[which]
        said: Tokens = [[] for _ in known]
        outcome = how
        try:
            with self._both.text.generate(_named(request(which), name), timeout=seconds) as events:
                for place, event in enumerate(events):
                    said[event.delta.index].extend(event.delta.token_ids)
                    if how == "left" and place == last:
                        break
                    if how == "aborted" and place == last:
                        self._both.text.abort(name)
        except TwinlensError as error:
            outcome = error.code.name
        fine = outcome in (how, "CANCELLED", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED")
        begins = all(whole[: len(part)] == part for part, whole in zip(said, known, strict=True))
        return f"{how}: {outcome}", fine and begins, f"{which} {outcome} {said}"

    def _refused(self, rng: random.Random, name: str) -> tuple[str, bool, str]:
        reason = rng.choice(list(_BAD))
        try:
            answer(self._both.text, _named(_BAD[reason](), name))
        except TwinlensError as error:
            fine = error.reason == reason or error.code.name == "RESOURCE_EXHAUSTED"
            return f"refused: {error.reason}", fine, f"{reason} {error}"
        return "refused: not at all", False, reason


def request(number: int) -> v1.GenerateRequest:
    """One of a number of requests that are always the same: text, pictures, a video; choices, penalties, structures."""
    rng = random.Random(number)
    question = " ".join(rng.choice(_WORDS) for _ in range(rng.randrange(1, 40)))
    kind = number % 4
    parts: list[str | v1.Media] = [question]
    if kind in (1, 2):
        parts = [*(image(rng.choice(_STILLS)) for _ in range(rng.randrange(1, 4))), question]
    elif kind == 3:
        parts = [video(rng.choice(_CLIPS)), question]
    sampling = _greedy(rng.randrange(1, 40))
    if rng.random() < 0.4:
        sampling.MergeFrom(v1.SamplingParams(temperature=1.0, seed=number, top_p=0.9, n=rng.choice([1, 2, 3])))
    if rng.random() < 0.2:
        sampling.MergeFrom(v1.SamplingParams(repetition_penalty=1.3, presence_penalty=0.5))
    if rng.random() < 0.2:
        sampling.MergeFrom(v1.SamplingParams(json_schema=_SCHEMA, ignore_eos=False, max_tokens=60))
    return asked(user(*parts), sampling, priority=rng.randrange(-1, 2), cache_salt=rng.choice(["", "", "tenant"]))


def own_memory(service: Service) -> int:
    """Bytes that a service's processes hold for themselves: resident, and not shared memory."""
    total = 0
    for pid in (service.pid, *service.descendants()):
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except FileNotFoundError:
            continue
        total += next((int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon")), 0) * 1024
    return total


def _greedy(max_tokens: int) -> v1.SamplingParams:
    return v1.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def _named(asking: v1.GenerateRequest, name: str) -> v1.GenerateRequest:
    asking.request_id = name
    return asking


def _embedded(both: Pair, number: int, name: str = "") -> list[float]:
    """The vector of a request's prompt."""
    asking = request(number)
    wanted = v1.EmbedRequest(chat=asking.chat, cache_salt=asking.cache_salt, priority=asking.priority, request_id=name)
    return list(both.text.embed(wanted, timeout=180).values)


def _said(both: Pair, asking: v1.GenerateRequest) -> Tokens:
    return [choice.token_ids for choice in answer(both.text, asking).choices]
