"""Encoders that die, freeze, leave and come back at one address, and callers who notice nothing of it."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests import pictures
from tests.launch import Service, command_line, encoder_server, send, stop
from tests.ports import held_address
from tests.rpc.pairs import ENCODER_FLAGS, about, answer, asked, greedy
from tests.waiting import until
from twinlens import LlmClient, TwinlensError, v1

FILES = [pictures.encoded(pictures.noise(128 + 64 * (n % 3), 128 + 64 * (n % 4), 9_500 + n)) for n in range(24)]


class Replica:
    """One encoder, or what `_launch` starts, each time at the same address. `module` among its flags is another one to
    run."""

    def __init__(self, checkpoint: Path, **flags: Any) -> None:
        self._checkpoint = checkpoint
        self._flags = {**ENCODER_FLAGS, **flags}
        self._stack = ExitStack()
        self._service: Service | None = None
        self.address = held_address()

    def start(self) -> None:
        self._service = self._stack.enter_context(self._launch(listen=self.address))

    def _launch(self, **flags: Any) -> AbstractContextManager[Service]:
        return encoder_server(self._checkpoint, exit_code=None, **{**self._flags, **flags})

    @property
    def alive(self) -> bool:
        assert self._service is not None
        return self._service.process.poll() is None

    @property
    def metrics(self) -> str:
        assert self._service is not None
        return self._service.metrics

    @property
    def pid(self) -> int:
        assert self._service is not None
        return self._service.pid

    def kill(self) -> None:
        """As the kernel does it, without a word."""
        assert self._service is not None
        below = self._service.descendants()
        self._signal(signal.SIGKILL)
        until(lambda: not any(map(command_line, below)), "its workers die with it")
        self.stop()

    def freeze(self) -> None:
        stop(self.pid)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        """Drains and ends; checks that nothing is left."""
        self._service = None
        self._stack.close()

    def _signal(self, number: signal.Signals) -> None:
        send(self.pid, number)


@contextmanager
def replicas(checkpoint: Path, count: int, **flags: Any) -> Iterator[list[Replica]]:
    """Encoders that run, for the length of the block."""
    with ExitStack() as stack:
        all_of_them = [Replica(checkpoint, **flags) for _ in range(count)]
        for replica in all_of_them:
            stack.callback(replica.stop)
            replica.start()
        yield all_of_them


def question(number: int) -> v1.GenerateRequest:
    """One of a number of requests that are always the same: one or two pictures, and a question."""
    first, second = FILES[number % len(FILES)], FILES[(number * 7 + 3) % len(FILES)]
    prompt = about(first, f"Question {number % 5}?")
    if number % 3 == 0:
        prompt.parts.insert(0, about(second).parts[0])
    return asked(prompt, greedy(6))


@dataclass
class Crowd:
    """Callers that ask again and again, `pause` seconds after each answer, and what came of it."""

    client: LlmClient
    right: list[list[int]]
    pause: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    over: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def taught(cls, client: LlmClient, questions: int = 24) -> Crowd:
        """A crowd that knows the answers, from when nothing is disturbed."""
        return cls(client, [answer(client, question(number)).choices[0].token_ids for number in range(questions)])

    @contextmanager
    def asking(self, callers: int) -> Iterator[None]:
        """`callers` streams at once, for the length of the block; each ends its last one."""
        threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(callers)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self.over.set()
            for thread in threads:
                thread.join()

    def answered(self) -> int:
        return self.outcomes["right"]

    def _ask(self, number: int) -> None:
        while not self.over.is_set():
            number = number * 5 + 1
            which = number % len(self.right)
            try:
                said = answer(self.client, question(which)).choices[0].token_ids
                self.outcomes["right" if said == self.right[which] else f"wrong: {which}"] += 1
            except TwinlensError as error:
                self.outcomes[f"{error.code.name} {error.reason}"] += 1
            self.over.wait(self.pause)


def more(count: Callable[[], int], than: int) -> Callable[[], bool]:
    """Whether a count has grown by so much since now."""
    begun = count()
    return lambda: count() >= begun + than
