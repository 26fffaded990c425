"""How much may be under way and how much may wait; whoever comes when that is reached is refused at once."""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import Exhausted


@dataclass(slots=True, eq=False)
class AdmissionTicket:
    """One request's place, taken with `Admission.enter` and given back with `leave`. `tokens` count while it waits:
    from its arrival until the engine computes its first token."""

    _admission: Admission
    tokens: int = 0
    waiting: bool = True

    def measure(self, tokens: int) -> None:
        """The prompt, now that it is laid out, has so many tokens; raises Exhausted where too many wait already."""
        limits = self._admission
        if limits.waiting_tokens and limits.waiting_tokens + tokens > limits.max_waiting_tokens:
            limits.refused += 1
            raise Exhausted("too many prompt tokens are waiting", reason="TOO_MANY_WAITING_TOKENS")
        self.tokens = tokens
        limits.waiting_tokens += tokens

    def start(self) -> None:
        """It is being computed and waits no longer."""
        if self.waiting:
            self.waiting = False
            self._admission.waiting -= 1
            self._admission.waiting_tokens -= self.tokens

    def leave(self) -> None:
        """It is over."""
        self.start()
        self._admission.open -= 1


class Admission:
    """Bounds of one service: requests under way, requests that wait, and their tokens. A prompt larger than the last
    bound is taken when nothing else waits."""

    def __init__(self, *, max_requests: int, max_waiting: int, max_waiting_tokens: int) -> None:
        self.max_requests = max_requests
        self.max_waiting = max_waiting
        self.max_waiting_tokens = max_waiting_tokens
        self.open = 0
        self.waiting = 0
        self.waiting_tokens = 0
        self.refused = 0

    @property
    def running(self) -> int:
        """Requests that wait no longer."""
        return self.open - self.waiting

    def enter(self) -> AdmissionTicket:
        """A place for a new request; raises Exhausted where there is none."""
        if self.open >= self.max_requests:
            self.refused += 1
            raise Exhausted("too many requests are under way", reason="TOO_MANY_REQUESTS")
        if self.waiting >= self.max_waiting:
            self.refused += 1
            raise Exhausted("too many requests are waiting", reason="TOO_MANY_WAITING")
        self.open += 1
        self.waiting += 1
        return AdmissionTicket(self)
