"""Plans of items for a model that the library computes: a process of its own asks the library, once for each size."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass

from common.errors import InvalidInput, Unavailable
from common.media.convert import MAX_PARTS, MAX_REPLACEMENT
from common.media.item import Grid, Modality, Pixels
from common.process.children import Child, ChildDied
from common.telemetry import log
from encoder_service.families.resizing import resize_picture
from encoder_service.item import Footage, Inspection, Item, Plan
from encoder_service.media.checks import no_video_sound
from encoder_service.media.messages import (
    ChooseFrames,
    Chosen,
    FromPlanner,
    PlanItem,
    Planned,
    PlannerSettings,
    PlannerStartFailed,
    Ready,
    WrongLength,
)

MODULE = "encoder_service.worker.planner"
_REMEMBERED = 64 << 20
"""Bytes of questions and answers. Of one item they are some hundred, or a megabyte."""
_PART_BYTES, _NUMBER_BYTES = 256, 40
"""Bytes of a part of an item besides its text and positions, and of a number in a tuple."""

_MOST_STEPS, _STEPS_PER_SECOND = 1_000_000, 10.0
"""Bounds what a processor may list of a video's time before it chooses frames: some entries per tenth of a second, or
each frame at a requested rate, which would be gigabytes for a file that claims to last for years."""

_log = log.get("planner")


@dataclass(frozen=True, slots=True)
class PlannerTimes:
    """Seconds that the process may take to start, and to answer."""

    start: float
    answer: float


class HfPlanner:
    """One process, asked one thing at a time, and restarted if it ends. `start` and `stop` are called by the owner. It
    answers each question even if the caller has left: a new process takes seconds to start, which all others would wait
    for.

    Answers are cached, up to `remembered` bytes, the least recently used dropped first. `video_sound` says whether the
    model takes videos with their sound.
    """

    def __init__(
        self, folder: str, times: PlannerTimes, *, video_sound: bool = False, remembered: int = _REMEMBERED
    ) -> None:
        self._settings = PlannerSettings(folder)
        self._times = times
        self._video_sound = video_sound
        self._child: Child[FromPlanner] | None = None
        self._turn = asyncio.Lock()
        self._asking: asyncio.Task[Chosen | Planned] | None = None
        self._known: OrderedDict[PlanItem, Planned] = OrderedDict()
        self._room = remembered

    async def start(self) -> None:
        """Starts the process; raises ChildDied, with its message, if it cannot work."""
        child: Child[FromPlanner] = await Child.start(MODULE, receives=FromPlanner)
        try:
            child.send(self._settings)
            async with asyncio.timeout(self._times.start):
                first = await child.receive()
        except BaseException as error:
            child.kill()
            await child.stop()
            if isinstance(error, TimeoutError):
                raise ChildDied("the process that plans items did not start in time") from None
            raise
        if not isinstance(first, Ready):
            await child.stop()
            raise ChildDied(first.why if isinstance(first, PlannerStartFailed) else "it did not start")
        self._child = child

    async def stop(self) -> None:
        """Stops the process and fails its questions; returns when it is gone."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
        await self._end()

    async def footage(self, item: Item, seen: Inspection) -> Footage:
        """The frames that transformers' processor takes of a video. Raises as `plan`."""
        self._check_options(item)
        if seen.frames / seen.fps * max(item.options.fps or 0.0, _STEPS_PER_SECOND) > _MOST_STEPS:
            raise InvalidInput("the video is too long", reason="VIDEO_TOO_LONG", field=item.field)
        try:
            answer = await self._asked(ChooseFrames(seen.frames, seen.fps, item.options.fps or 0.0), item.field)
        except InvalidInput:
            if item.options.fps is None:
                raise
            raise _no_option(item, "fps") from None
        assert isinstance(answer, Chosen), "it answers what it is asked"
        return Footage(tuple(answer.frames), seen.frames, seen.fps)

    async def plan(self, item: Item, seen: Inspection, footage: Footage | None) -> Plan:
        """The plan of a picture of that size, of these frames, or of a sound of that length. Raises InvalidInput if
        transformers does not take it, or it has options, and Unavailable if the process does not answer."""
        self._check_options(item)
        whole = size = (seen.height, seen.width)
        if item.options.max_pixels:
            size = resize_picture(*whole, 1, 0, item.options.max_pixels)
        about = PlanItem(*size)
        if item.modality is Modality.AUDIO:
            about = PlanItem(samples=seen.frames)
        elif footage is not None:
            samples = seen.track.frames if seen.track is not None else 0
            about = PlanItem(*size, footage.numbers, footage.total, footage.fps, samples, item.options.fps or 0.0)
        planned = await self._planned(about, item.field)
        if len(planned.parts) > MAX_PARTS or sum(len(part.text) for part in planned.parts) > MAX_REPLACEMENT:
            why = "more stands for an item of this size or length in a prompt than is served"
            raise InvalidInput(why, reason="MEDIA_UNREADABLE", field=item.field)
        tokens = sum(part.rows for part in planned.parts)
        if item.modality is Modality.AUDIO:
            shape = (1, about.samples)
            return Plan(
                Grid(1, 1, tokens),
                tokens,
                (0,),
                *shape,
                shape,
                seconds_per_grid=about.samples / seen.rate,
                replacement=planned.parts,
                depth=4,
            )
        return Plan(
            Grid(1, 1, tokens),
            tokens,
            (0,) if footage is None else footage.decoded,
            *size,
            size,
            replacement=planned.parts,
            samples=about.samples,
            turns=planned.turns,
            whole=None if size == whole else whole,
        )

    async def _planned(self, about: PlanItem, field: str) -> Planned:
        if (planned := self._known.get(about)) is None:
            answer = await self._asked(about, field)
            assert isinstance(answer, Planned), "it answers what it is asked"
            self._remember(about, planned := answer)
        self._known.move_to_end(about)
        return planned

    def _remember(self, about: PlanItem, planned: Planned) -> None:
        if about not in self._known:  # or another caller has asked the same meanwhile
            self._known[about] = planned
            self._room -= _bytes(about, planned)
        while self._room < 0 and len(self._known) > 1:
            self._room += _bytes(*self._known.popitem(last=False))

    async def _asked(self, question: ChooseFrames | PlanItem, field: str) -> Chosen | Planned:
        await self._turn.acquire()
        self._asking = asyncio.create_task(self._ask(question, field))
        self._asking.add_done_callback(lambda _: self._turn.release())
        return await asyncio.shield(self._asking)

    async def _ask(self, question: ChooseFrames | PlanItem, field: str) -> Chosen | Planned:
        try:
            if self._child is not None and self._child.has_ended:
                await self._lose()
            if self._child is None:
                await self.start()
            assert self._child is not None
            self._child.send(question)
            async with asyncio.timeout(self._times.answer):
                answer = await self._child.receive()
        except (ChildDied, TimeoutError, OSError) as error:
            _log.error("the planner is lost", cause=str(error) or "it takes too long")
            await self._lose()
            why = "the process that plans items has ended; another one is started"
            raise Unavailable(why, reason="NO_DECODER") from None
        if isinstance(answer, Chosen | Planned):
            return answer
        if isinstance(answer, WrongLength):
            raise _wrong_length(field, too_long=answer.too_long)
        _log.info("an item cannot be planned", cause=getattr(answer, "why", "?"))
        why = "the model takes no item of this size or length, or of so many frames, or of so many a second"
        raise InvalidInput(why, reason="MEDIA_UNREADABLE", field=field)

    def _check_options(self, item: Item) -> None:
        stated = item.options.stated()
        if stated.pop("with_sound", False) and not self._video_sound:
            raise no_video_sound(item.field)
        if not isinstance(item.source, Pixels):
            stated.pop("fps", None)
            if item.modality is Modality.IMAGE:  # it is resized before the processor sees it
                stated.pop("max_pixels", None)
                stated.pop("clamp_max_pixels", None)
        if stated:
            raise _no_option(item, next(iter(stated)))

    async def _lose(self) -> None:
        if self._child is not None:
            self._child.kill()
            await self._end()

    async def _end(self) -> None:
        if self._child is not None:
            child, self._child = self._child, None
            await child.stop()


def _bytes(about: PlanItem, planned: Planned) -> int:
    """The approximate size of a cached answer."""
    texts = sum(_PART_BYTES + len(part.text) + len(part.positions) for part in planned.parts)
    return _PART_BYTES + _NUMBER_BYTES * (len(about.frames) + len(planned.turns)) + texts


def _no_option(item: Item, name: str) -> InvalidInput:
    why = f"this model's processor has no {name}, or not for this item"
    return InvalidInput(why, reason="BAD_OPTION", field=f"{item.field}.options.{name}")


def _wrong_length(field: str, *, too_long: bool) -> InvalidInput:
    if too_long:
        return InvalidInput("the sound is longer than the model hears at a time", reason="AUDIO_TOO_LONG", field=field)
    return InvalidInput("the sound is shorter than a row", reason="AUDIO_TOO_SHORT", field=field)
