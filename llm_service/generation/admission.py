"""Bounds how many requests are in progress and how many wait; further ones are refused at once.

Requests that wait for rows of their media are counted apart, so that slow encoders do not keep out requests without
media.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import Exhausted


@dataclass(slots=True, eq=False)
class Waiting:
    """How many requests wait for one thing, and the tokens of their prompts."""

    requests: int = 0
    tokens: int = 0


@dataclass(slots=True, eq=False)
class AdmissionTicket:
    """One request's place, taken with `Admission.enter` and given back with `leave`. `tokens` count while it waits:
    from its arrival until the engine computes its first token."""

    _admission: Admission
    _among: Waiting | None = None
    tokens: int = 0

    @property
    def waiting(self) -> bool:
        """It is not being computed yet."""
        return self._among is not None

    def measure(self, tokens: int) -> None:
        """The prompt is laid out and has so many tokens. Raises Exhausted if too many tokens wait already."""
        limits = self._admission
        limits.check_tokens(limits.for_engine, tokens)  # prompts with media will wait here later
        if self._among is limits.for_media:
            limits.check_tokens(limits.for_media, tokens)
        self.tokens = tokens
        if self._among is not None:
            self._among.tokens += tokens

    def wait_for_media(self) -> None:
        """The request must wait for rows of its media, or for room for them. Raises Exhausted if too many wait for
        theirs."""
        limits = self._admission
        if self._among is limits.for_engine:
            limits.check_media(self.tokens)
            self._move(limits.for_media)

    def media_came(self) -> None:
        """All rows are here; it is not refused any more, however many wait for the engine."""
        if self._among is self._admission.for_media:
            self._move(self._admission.for_engine)

    def start(self) -> None:
        """It is being computed and waits no longer."""
        self._move(None)

    def leave(self) -> None:
        """It is over."""
        self.start()
        self._admission.open -= 1

    def _move(self, among: Waiting | None) -> None:
        before, self._among = self._among, among
        if before is not None:
            before.requests -= 1
            before.tokens -= self.tokens
        if among is not None:
            among.requests += 1
            among.tokens += self.tokens


class Admission:
    """The bounds of one service: requests in progress; requests that have all they need and wait for their first token,
    and requests that wait for rows of their media; and the tokens of both. A prompt larger than the last bound is
    accepted when nothing else waits."""

    def __init__(self, *, max_requests: int, max_waiting: int, max_waiting_media: int, max_waiting_tokens: int) -> None:
        self.max_requests = max_requests
        self.max_waiting = max_waiting
        self.max_waiting_media = max_waiting_media
        self.max_waiting_tokens = max_waiting_tokens
        self.open = 0
        self.for_engine = Waiting()
        self.for_media = Waiting()
        self.refused = 0

    @property
    def waiting(self) -> int:
        """Number of requests that wait for anything."""
        return self.for_engine.requests + self.for_media.requests

    @property
    def waiting_tokens(self) -> int:
        """The tokens of their prompts."""
        return self.for_engine.tokens + self.for_media.tokens

    @property
    def running(self) -> int:
        """Requests that wait no longer."""
        return self.open - self.waiting

    def enter(self) -> AdmissionTicket:
        """Admits a new request; raises Exhausted if there are too many."""
        if self.open >= self.max_requests:
            raise self._counted(Exhausted("too many requests are being served", reason="TOO_MANY_REQUESTS"))
        if self.for_engine.requests >= self.max_waiting:
            raise self._counted(Exhausted("too many requests are waiting", reason="TOO_MANY_WAITING"))
        self.open += 1
        self.for_engine.requests += 1
        return AdmissionTicket(self, self.for_engine)

    def check_media(self, tokens: int) -> None:
        """Raises Exhausted if one more request, of so many tokens, may not wait for rows of its media."""
        if self.for_media.requests >= self.max_waiting_media:
            why = "too many requests are waiting for their media"
            raise self._counted(Exhausted(why, reason="TOO_MANY_WAITING_MEDIA"))
        self.check_tokens(self.for_media, tokens)

    def check_tokens(self, among: Waiting, tokens: int) -> None:
        """Raises Exhausted if so many more tokens may not wait in `among`."""
        if among.tokens and tokens and among.tokens + tokens > self.max_waiting_tokens:
            why = "too many prompt tokens are waiting"
            raise self._counted(Exhausted(why, reason="TOO_MANY_WAITING_TOKENS"))

    def _counted(self, refusal: Exhausted) -> Exhausted:
        self.refused += 1
        return refusal
