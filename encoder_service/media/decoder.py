"""Requests to the decode processes: bounded in time and memory, and repeated if a process dies or hangs. A file is
blamed for the processor time that it takes and for its process's death, not for what others did to the process. A job's
ranges in the staging arena go back to its caller only when no process can write there any more."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, suppress

from common.errors import InvalidInput, TwinlensError, Unavailable
from common.media.item import Modality
from common.process.children import Child, ChildDied
from common.process.cpu_time_limit import CpuTimeLimit, ProcessStalled
from common.process.status import was_ended
from common.shm.arena import Range, SharedBuffer
from common.telemetry import log
from encoder_service.item import Inspection, Plan
from encoder_service.media.fair_slots import Caller, FairSlots
from encoder_service.media.messages import (
    Bounds,
    Decode,
    DecoderSettings,
    Decoding,
    FromDecoder,
    Inspect,
    Inspected,
    Refused,
)
from encoder_service.media.modalities import SPECS
from encoder_service.media.processes import DecodeProcesses

_ATTEMPTS = 2
_PATIENCE = 0.5
"""Seconds that a job may go on after its caller has left, before its process is killed."""

_log = log.get("decoder")


class TimeBudget:
    """The time for which one item may occupy decode processes, over all of its jobs and attempts.

    `left` is in seconds. A process waiting for a core spends nothing: the lesser of its processor time and the elapsed
    time counts.
    """

    def __init__(self, seconds: float) -> None:
        self.left = seconds

    @asynccontextmanager
    async def spent_by(self, pid: int) -> AsyncIterator[None]:
        """A context in which the process with this id works for the item; it ends as a `CpuTimeLimit` does."""
        async with CpuTimeLimit(pid, self.left) as limit:
            try:
                yield
            finally:
                self.left -= limit.spent


class DecoderPool:
    """`processes` decode processes over one staging arena (`DecodeProcesses`), which may spend `seconds` on an item."""

    def __init__(
        self,
        staging: SharedBuffer,
        *,
        processes: int,
        threads: int,
        seconds: float,
        start_seconds: float,
        memory_bytes: int,
        bounds: Bounds,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._seconds = seconds
        self._slow = FairSlots(max(1, processes - 1), kept_free=False)
        settings = DecoderSettings(
            staging_bytes=staging.size,
            memory_bytes=memory_bytes,
            threads=threads,
            bounds=bounds,
            decoders=[decoder for spec in SPECS.values() for decoder in sorted(spec.decoders)],
        )
        self.processes = DecodeProcesses(
            staging.fd, settings, processes, start_seconds=start_seconds, on_change=on_change
        )

    async def turn(self, modality: Modality, size: int, caller: Caller) -> ExitStack:
        """Waits until a job for an item of so many bytes may begin; closing the result ends its turn.

        Videos and long sounds take long, even to inspect: if there are several processes, one is reserved for
        everything else, and callers take turns on the others. A turn is taken before the job's memory, so that waiting
        videos do not hold memory that others need.
        """
        return await self._slow.take(caller) if size >= SPECS[modality].slow_bytes else ExitStack()

    def time_budget(self) -> TimeBudget:
        """The time that one item has, for all of its jobs."""
        return TimeBudget(self._seconds)

    async def inspect(
        self,
        data: Range,
        *,
        key: bytes,
        modality: Modality,
        field: str,
        time_budget: TimeBudget | None = None,
        with_sound: bool = False,
    ) -> Inspection:
        """Parses the header of encoded bytes, in a `turn`. Slow files stay open under `key`, until their process
        inspects another one. Without a `time_budget`, this is the item's only job. `with_sound`: a video's sound is
        decoded as well.

        Raises InvalidInput if the bytes cannot be read, or that takes too long, and Unavailable if there is no process,
        or those that tried were killed or stopped from outside.
        """
        decoder = _decoder(modality, with_sound=with_sound)
        job = Inspect(key=_kept(key, modality), decoder=decoder, offset=data.offset, size=data.size)
        answer = await self._job(job, field, time_budget or self.time_budget())
        if not isinstance(answer, Inspected):
            raise ChildDied("an answer to another question")
        return answer.seen

    async def decode(
        self,
        data: Range,
        pixels: Range,
        plan: Plan,
        *,
        key: bytes,
        modality: Modality,
        field: str,
        on_frames: Callable[[int], None] = lambda _: None,
        time_budget: TimeBudget | None = None,
    ) -> None:
        """Decodes the plan's frames into `pixels`, in a `turn`; raises as `inspect`.

        `on_frames` gets the number of frames so far; if a process dies, the same frames may come again.
        """
        job = Decode(
            key=_kept(key, modality),
            decoder=_decoder(modality, with_sound=plan.samples > 0),
            offset=data.offset,
            size=data.size,
            pixels=pixels.offset,
            frames=list(plan.frames),
            height=plan.height,
            width=plan.width,
            depth=plan.depth,
            samples=plan.samples,
            whole=plan.whole,
        )
        await self._job(job, field, time_budget or self.time_budget(), on_frames)

    async def _job(
        self,
        job: Inspect | Decode,
        field: str,
        time_budget: TimeBudget,
        on_frames: Callable[[int], None] = lambda _: None,
    ) -> FromDecoder:
        struck, slow = False, False
        for attempt in range(1, _ATTEMPTS + 1):
            if time_budget.left <= 0:
                raise _too_slow(field)
            child = await self.processes.take(job.key)
            try:
                answer = await self._ask(child, job, time_budget, on_frames)
            except TimeoutError:
                raise _too_slow(field) from None
            except ProcessStalled as error:
                _log.warning("a decode process hung", stopped=error.stopped, attempt=attempt)
                struck, slow = struck or error.stopped, slow or not error.stopped
                continue
            except ChildDied as error:
                _log.warning("a decode process died", cause=str(error), attempt=attempt)
                struck = struck or isinstance(error, _Struck)
                continue
            if isinstance(answer, Refused):
                _log.info("media refused", cause=answer.why)
                raise _refusal(answer, field)
            return answer
        if struck:
            raise Unavailable(
                "decode processes were killed or stopped; new ones are being started", reason="NO_DECODER"
            )
        raise _too_slow(field) if slow else _unreadable(field)

    async def _ask(
        self,
        child: Child[FromDecoder],
        job: Inspect | Decode,
        time_budget: TimeBudget,
        on_frames: Callable[[int], None],
    ) -> FromDecoder:
        """One question to one process. The process is idle again, or gone, when this returns or raises."""
        self.processes.opened(child, job.key if isinstance(job, Inspect) else b"")
        child.send(job)
        asked = asyncio.ensure_future(child.receive())
        try:
            async with time_budget.spent_by(child.process.pid):
                while isinstance(answer := await asyncio.shield(asked), Decoding):
                    on_frames(answer.frames)
                    asked = asyncio.ensure_future(child.receive())
        except asyncio.CancelledError:
            with suppress(asyncio.CancelledError):
                await asyncio.wait({asked}, timeout=_PATIENCE)
            if _ended(asked):
                self.processes.put(child)
            else:
                await self.processes.replace(child, asked)
            raise
        except (TimeoutError, ProcessStalled):
            await self.processes.replace(child, asked)
            raise
        except ChildDied as error:
            ended = child.has_ended
            await self.processes.replace(child, asked)
            if ended and was_ended(child.process.returncode):
                raise _Struck(str(error)) from error
            raise
        self.processes.put(child)
        return answer


def _kept(key: bytes, modality: Modality) -> bytes:
    """The key under which a file stays open; empty if opening it again is as fast."""
    return key if SPECS[modality].slow_bytes < math.inf else b""


def _decoder(modality: Modality, *, with_sound: bool) -> str:
    return SPECS[modality].sound_decoder if with_sound else SPECS[modality].decoder


class _Struck(ChildDied):
    """The process was killed by somebody else."""


def _ended(asked: asyncio.Future[FromDecoder]) -> bool:
    """The last answer of a job has come."""
    if not asked.done() or asked.cancelled() or asked.exception() is not None:
        return False
    return not isinstance(asked.result(), Decoding)


_UNSUPPORTED = (
    "a TIFF must have integers of up to 16 bits, in grey, RGB, CMYK, YCbCr or a palette, plain or packed by LZW,"
    " Deflate, PackBits, JPEG or as a fax"
)


def _too_slow(field: str) -> TwinlensError:
    return InvalidInput("the media takes too long to decode", reason="MEDIA_TOO_SLOW", field=field)


def _refusal(answer: Refused, field: str) -> TwinlensError:
    if answer.too_complex:
        why = "the media's file has too many parts"
        return InvalidInput(why, reason="MEDIA_TOO_COMPLEX", field=field)
    if answer.unsupported:
        return InvalidInput(_UNSUPPORTED, reason="MEDIA_FORMAT", field=field)
    return _unreadable(field)


def _unreadable(field: str) -> TwinlensError:
    return InvalidInput("the media cannot be decoded", reason="MEDIA_UNREADABLE", field=field)
