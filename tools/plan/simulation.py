"""Discrete-event simulation of requests through encoders and LLM services.

All computation is tasks with seconds of work. Tasks of one host share its cores: with more tasks than cores all slow
down equally (processor sharing). If every service has its own host, cores do not limit.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from tools.plan.costs import Costs
from tools.plan.workload import Request, Workload


@dataclass(slots=True)
class Measured:
    """What one request has seen, in seconds."""

    arrived: float
    first_token: float = math.nan
    ended: float = math.nan


@dataclass(slots=True)
class Task:
    """Work under way, and what happens at its end."""

    left: float
    done: Callable[[], None]


class Clock:
    """The time, what is planned for a moment, and tasks that share cores."""

    def __init__(self, cores: float = math.inf) -> None:
        self.now = 0.0
        self._cores = cores
        self._planned: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._tasks: list[Task] = []

    def at(self, moment: float, then: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._planned, (moment, self._count, then))

    def compute(self, seconds: float, then: Callable[[], None]) -> None:
        """Seconds of work on one core."""
        self._tasks.append(Task(seconds, then))

    def run(self, until: Callable[[], bool]) -> None:
        """Goes on until `until()` holds, or nothing is left to happen."""
        while not until() and (self._planned or self._tasks):
            rate = min(1.0, self._cores / len(self._tasks)) if self._tasks else 1.0
            soonest = min(self._tasks, key=lambda task: task.left, default=None)
            ends = self.now + soonest.left / rate if soonest else math.inf
            moment = min(ends, self._planned[0][0] if self._planned else math.inf)
            for task in self._tasks:
                task.left -= (moment - self.now) * rate
            self.now = moment
            if soonest is not None and ends <= moment:
                self._tasks.remove(soonest)
                soonest.done()
            else:
                heapq.heappop(self._planned)[2]()


class Device:
    """Computes one thing at a time, first come, first served; encoder and engine of one device take turns."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._busy = False
        self._waiting: deque[Callable[[], float | None]] = deque()
        self._then: deque[Callable[[], None]] = deque()
        self._began = self._worked = 0.0

    @property
    def busy_seconds(self) -> float:
        """For how long it has computed, up to now."""
        return self._worked + (self._clock.now - self._began if self._busy else 0.0)

    def ask(self, begin: Callable[[], float | None], then: Callable[[], None]) -> None:
        """`begin()` says, when the device is free, how many seconds it takes; None: nothing is left to do."""
        self._waiting.append(begin)
        self._then.append(then)
        self._next()

    def _next(self) -> None:
        while not self._busy and self._waiting:
            seconds, then = self._waiting.popleft()(), self._then.popleft()
            if seconds is None:
                then()
                continue
            self._busy = True
            self._began = self._clock.now

            def freed(then: Callable[[], None] = then) -> None:
                self._worked, self._busy = self.busy_seconds, False
                then()
                self._next()

            self._clock.compute(seconds, freed)


class Encoder:
    """Queues pictures, packs what waits into a batch, and keeps what it has computed."""

    def __init__(self, number: int, clock: Clock, costs: Costs, workload: Workload, device: Device) -> None:
        self.number: Final = number
        self.device: Final = device
        self._clock, self._costs, self._workload = clock, costs, workload
        self._known: set[int] = set()
        self._waiting: deque[int] = deque()
        self._wanted: dict[int, list[Callable[[], None]]] = {}
        self._asked = False

    @property
    def backlog_seconds(self) -> float:
        return len(self._wanted) * self._workload.patches * self._costs.patch

    def encode(self, picture: int, then: Callable[[], None]) -> None:
        if picture in self._known:
            self._clock.compute(self._costs.picture / 2, then)
            return
        first = picture not in self._wanted
        self._wanted.setdefault(picture, []).append(then)
        if first:
            around = self._costs.picture + self._costs.picture_patch * self._workload.patches
            self._clock.compute(around, lambda: self._ready(picture))

    def _ready(self, picture: int) -> None:
        self._waiting.append(picture)
        if not self._asked:
            self._asked = True
            batch: list[int] = []
            self.device.ask(lambda: self._begin(batch), lambda: self._ended(batch))

    def _begin(self, batch: list[int]) -> float:
        self._asked = False
        most = max(1, self._costs.batch_patches // self._workload.patches)
        while self._waiting and len(batch) < most:
            batch.append(self._waiting.popleft())
        if self._waiting:
            self._asked = True
            another: list[int] = []
            self.device.ask(lambda: self._begin(another), lambda: self._ended(another))
        return self._costs.batch + self._costs.patch * self._workload.patches * len(batch)

    def _ended(self, batch: list[int]) -> None:
        for picture in batch:
            self._known.add(picture)
            for then in self._wanted.pop(picture):
                then()


@dataclass(slots=True)
class Sequence:
    """A request in an engine: prompt tokens to compute, answer tokens to make."""

    prompt: int
    answer: int
    measured: Measured
    then: Callable[[], None]


class Engine:
    """Continuous batching with chunked prefill: each step has a token of every running sequence, then prompts."""

    def __init__(self, clock: Clock, costs: Costs, device: Device) -> None:
        self.device: Final = device
        self.front: Final = Device(clock)
        """Its event loop: one request after the other."""
        self._clock, self._costs = clock, costs
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._stepping = False
        self.requests = 0

    @property
    def sequences(self) -> int:
        """What the engine has: those whose pictures are on their way are not there yet."""
        return len(self._running) + len(self._waiting)

    def generate(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)
        self._step()

    def _step(self) -> None:
        if self._stepping or not (self._waiting or self._running):
            return
        self._stepping = True
        decoding: list[Sequence] = []
        prefilled: list[Sequence] = []
        self.device.ask(lambda: self._begin(decoding, prefilled), lambda: self._ended(decoding, prefilled))

    def _begin(self, decoding: list[Sequence], prefilled: list[Sequence]) -> float:
        decoding += self._running
        room = self._costs.step_tokens - len(decoding)
        tokens = 0
        while self._waiting and tokens < room and len(self._running) < self._costs.running:
            first = self._waiting[0]
            part = min(first.prompt, room - tokens)
            tokens += part
            first.prompt -= part
            if first.prompt:
                break
            prefilled.append(self._waiting.popleft())
            self._running.append(first)
        return self._costs.step + self._costs.prefill * tokens + self._costs.decode * len(decoding)

    def _ended(self, decoding: Iterable[Sequence], prefilled: Iterable[Sequence]) -> None:
        self._stepping = False
        for sequence in prefilled:
            sequence.measured.first_token = self._clock.now
        for sequence in (*decoding, *prefilled):
            sequence.answer -= 1
            if not sequence.answer:
                self._running.remove(sequence)
                sequence.measured.ended = self._clock.now
                sequence.then()
        self._step()


@dataclass(slots=True)
class Cluster:
    """Encoders and LLM services, and what has been asked of them."""

    clock: Clock
    costs: Costs
    workload: Workload
    encoders: list[Encoder] = field(default_factory=list)
    engines: list[Engine] = field(default_factory=list)
    measured: list[Measured] = field(default_factory=list)
    ended: int = 0
    started: int = 0

    @classmethod
    def split(cls, costs: Costs, workload: Workload, encoders: int, llms: int, cores: float = math.inf) -> Cluster:
        """Every service with a device of its own."""
        self = cls(Clock(cores), costs, workload)
        for _ in range(encoders):
            self.add_encoder(Device(self.clock))
        for _ in range(llms):
            self.add_engine(Device(self.clock))
        return self

    @classmethod
    def joined(cls, costs: Costs, workload: Workload, devices: int) -> Cluster:
        """An encoder and an LLM service on each device, which they take turns at, as in one process."""
        self = cls(Clock(), costs, workload)
        for _ in range(devices):
            device = Device(self.clock)
            self.add_encoder(device)
            self.add_engine(device)
        return self

    def add_encoder(self, device: Device) -> None:
        """Another one, with an empty store."""
        self.started += 1
        self.encoders.append(Encoder(self.started, self.clock, self.costs, self.workload, device))

    def add_engine(self, device: Device) -> None:
        self.engines.append(Engine(self.clock, self.costs, device))

    def home(self, picture: int) -> Encoder:
        """The encoder that a picture goes to, by rendezvous hashing."""
        return max(self.encoders, key=lambda each: hash((picture, each.number)))

    def ask(self, request: Request, then: Callable[[], None] = lambda: None) -> None:
        """A request comes now; `then` is called when its last token is there."""
        measured = Measured(self.clock.now)
        self.measured.append(measured)
        engine = min(self.engines, key=lambda each: each.requests)
        engine.requests += 1
        left = len(request.pictures)

        def ended() -> None:
            engine.requests -= 1
            self.ended += 1
            then()

        def encoded() -> None:
            nonlocal left
            left -= 1
            if left <= 0:
                rows = len(request.pictures) * self.workload.patches // self.workload.merge
                tokens = self.workload.prompt_tokens + rows
                engine.generate(Sequence(tokens, self.workload.answer_tokens, measured, ended))

        def fronted() -> None:
            if not request.pictures:
                encoded()
            for picture in request.pictures:
                self.home(picture).encode(picture, encoded)

        engine.front.ask(lambda: self.costs.front, fronted)

    def play(self, requests: Iterable[Request]) -> None:
        """Requests come when they say; goes on until the last has ended."""
        planned = list(requests)
        for request in planned:
            self.clock.at(request.at, lambda request=request: self.ask(request))  # type: ignore[misc]
        self.clock.run(lambda: self.ended == len(planned))

    def closed(self, requests: Iterator[Request], clients: int, seconds: float) -> float:
        """As many clients ask, each again as soon as it is answered, for so long; the requests a second."""

        def again() -> None:
            if self.clock.now < seconds:
                self.ask(next(requests), again)

        for _ in range(clients):
            again()
        self.clock.run(lambda: self.ended == len(self.measured) and self.clock.now >= seconds)
        return self.ended / self.clock.now


def percentile(values: Iterable[float], share: float) -> float:
    """By the nearest rank."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan
