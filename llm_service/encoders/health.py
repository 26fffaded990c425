"""Whether an encoder is alive: checked regularly, and at once when a stream to it breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from enum import Enum, auto
from time import monotonic

from common.telemetry import log
from llm_service.encoders.breaker import Quarantine

CHECK_SECONDS = 0.5
"""From one question to the next."""
_LATE = 2
"""Consecutive checks not answered in time after which an encoder is gone."""

_log = log.get("encoders")


class Verdict(Enum):
    """The result of a check. Under load, an encoder that is late looks like one that is gone.

    An encoder that was late once, or is only suspected, is not taken for dead: it is used if there is no other, and no
    item is blamed for its end, until the next check decides.
    """

    ANSWERS = auto()
    LATE = auto()
    """Nothing came back in time: it is frozen, or it, or this process, has too much to do."""
    GONE = auto()
    """Nobody is there, or it computes something else."""


class EncoderHealth:
    """What is known of one encoder. `answers` is the last verdict, unless a stream has broken since; `fits`: it has
    answered with our digest, and has not been gone since; `last_heard` is when it last sent anything, in a stream or as
    an answer.

    It is checked every `check_seconds`.
    """

    def __init__(self, address: str, quarantine: Quarantine, check_seconds: float = CHECK_SECONDS) -> None:
        self.answers = False
        self.fits = False
        self.last_heard = 0.0
        self._address = address
        self._quarantine = quarantine
        self._check_seconds = check_seconds
        self._late = 0
        self._at_its_end: set[bytes] = set()
        self._recheck = asyncio.Event()
        self._judged = asyncio.Event()
        self._judged.set()

    @property
    def unsure(self) -> bool:
        """It has answered, and nothing shows that it is gone."""
        return self.fits and self._late < _LATE

    async def watch(self, check: Callable[[], Awaitable[Verdict]], changed: asyncio.Event) -> None:
        """Asks for ever; sets `changed` after each verdict."""
        try:
            while True:
                self._recheck.clear()
                verdict = await check()
                if not self._recheck.is_set():  # else it was suspected meanwhile, and this says nothing of that
                    self.judge(verdict)
                    changed.set()
                try:
                    async with asyncio.timeout(self._check_seconds):
                        await self._recheck.wait()
                except TimeoutError:
                    continue
                # It has just been suspected: soon, but no storm of questions.
                await asyncio.sleep(self._check_seconds / 5)
        finally:
            self._judged.set()  # waiters must not wait for a verdict that will not come

    def judge(self, verdict: Verdict) -> None:
        """Records a verdict. If an encoder is gone, the items whose streams broke with it may be the cause."""
        self._late = self._late + 1 if verdict is Verdict.LATE else 0
        answers = verdict is Verdict.ANSWERS
        if answers != self.answers:
            _log.debug("encoder", address=self._address, usable=answers, verdict=verdict.name)
        self.answers = answers
        if verdict is Verdict.LATE and self._late < _LATE:
            return
        self.fits = answers
        if not answers:
            for affinity in self._at_its_end:
                self._quarantine.blame(affinity)
        self._at_its_end.clear()
        self._judged.set()

    async def judged(self) -> None:
        """Waits until it is known what became of a suspected encoder."""
        await self._judged.wait()

    async def is_gone(self) -> bool:
        """Whether a suspected encoder is gone."""
        await self.judged()
        return not self.fits

    def is_suspected_with(self, affinity: bytes) -> bool:
        """Whether it is not known yet if the encoder died when the stream of this item broke."""
        return affinity in self._at_its_end

    def suspect(self, affinity: bytes | None = None) -> None:
        """Takes the encoder out of use until it has answered a check, which is made at once. `affinity` is that of an
        item that it had begun when the connection broke."""
        self.answers = False
        if affinity is not None:
            self._at_its_end.add(affinity)
        self._judged.clear()
        self._recheck.set()

    def hear(self) -> None:
        """It has said something."""
        self.last_heard = monotonic()
