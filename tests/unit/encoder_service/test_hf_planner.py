"""Plans of items for a model that transformers computes: what its process is asked, and what is remembered."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import cast

import msgspec
import pytest

from common.errors import InvalidInput, Unsupported
from common.media.convert import MAX_PARTS, MAX_REPLACEMENT
from common.media.item import Modality, Options, Pixels, PromptPart
from common.process.children import Child
from encoder_service.item import Footage, Inspection, Item
from encoder_service.media.hf_planner import HfPlanner, PlannerTimes
from encoder_service.media.messages import ChooseFrames, Chosen, FromPlanner, PlanItem, Planned, Refused, WrongLength
from tests.waiting import eventually

SEEN = Inspection(64, 48, frames=90, fps=30.0)


class Asked(HfPlanner):
    """One whose process is not there: it says so many rows as there are frames."""

    def __init__(self, *, video_sound: bool = True, **more: int) -> None:
        super().__init__("", PlannerTimes(1.0, 1.0), video_sound=video_sound, **more)
        self.questions: list[ChooseFrames | PlanItem] = []

    async def _ask(self, question: ChooseFrames | PlanItem, field: str) -> Chosen | Planned:
        self.questions.append(question)
        if isinstance(question, ChooseFrames):
            return Chosen([0, 30, 60])
        parts = (PromptPart("<video>", max(1, len(question.frames)), 7),)
        return Planned((*parts, PromptPart("", 5, 9)), (3, 5)) if question.samples else Planned(parts)


class Process:
    """Answers a question with so many rows as the picture is wide, once it is `told` to."""

    has_ended = False

    def __init__(self) -> None:
        self.asked: asyncio.Queue[PlanItem] = asyncio.Queue()
        self.told = asyncio.Semaphore(0)
        self.killed = False

    def send(self, question: PlanItem) -> None:
        self.asked.put_nowait(question)

    async def receive(self) -> Planned:
        await self.told.acquire()
        return Planned((PromptPart("", (await self.asked.get()).width, 7),))

    def kill(self) -> None:
        self.killed = True

    async def stop(self) -> None:
        pass


class Waiting(HfPlanner):
    """One whose processes are stand-ins."""

    def __init__(self) -> None:
        super().__init__("", PlannerTimes(60.0, 60.0))
        self.processes: list[Process] = []

    async def start(self) -> None:
        self.processes.append(Process())
        self._child = cast("Child[FromPlanner]", self.processes[-1])


def item(modality: Modality, options: Options | None = None) -> Item:
    return Item(modality, b"", options or Options(), field="media[0]")


async def test_a_video_s_frames_are_chosen_and_then_planned_with_their_numbers() -> None:
    planner, film = Asked(), item(Modality.VIDEO)
    footage = await planner.footage(film, SEEN)
    plan = await planner.plan(film, SEEN, footage)
    assert (plan.frames, plan.tokens, plan.replacement[0].rows) == ((0, 30, 60), 3, 3)
    assert planner.questions == [ChooseFrames(90, 30.0), PlanItem(48, 64, (0, 30, 60), 90, 30.0)]


async def test_a_size_is_asked_for_once_and_other_frames_are_another_question() -> None:
    planner, still, film = Asked(), item(Modality.IMAGE), item(Modality.VIDEO)
    for _ in range(2):
        assert (await planner.plan(still, SEEN, None)).frames == (0,)
    for numbers in ((0, 1), (0, 2)):
        await planner.plan(film, SEEN, Footage(numbers, 90, 30.0))
    assert len(planner.questions) == 3


@pytest.mark.parametrize("parts", [MAX_PARTS * [PromptPart(".", 1, 7)], [PromptPart("." * MAX_REPLACEMENT, 1, 7)]])
async def test_an_item_for_which_more_would_stand_in_a_prompt_than_a_header_holds_is_refused(
    parts: list[PromptPart],
) -> None:
    class Telling(Asked):
        told = tuple(parts)

        async def _ask(self, question: ChooseFrames | PlanItem, field: str) -> Planned:
            return Planned(self.told)

    planner = Telling()
    assert (await planner.plan(item(Modality.IMAGE), SEEN, None)).replacement == planner.told
    planner.told = (*planner.told, PromptPart("."))
    with pytest.raises(InvalidInput, match="more stands for an item of this size") as error:
        await planner.plan(item(Modality.IMAGE), replace(SEEN, width=65), None)
    assert error.value.field == "media[0]"


async def test_the_longest_unused_are_forgotten_where_answers_take_more_memory_than_is_given() -> None:
    class Telling(Asked):
        async def _ask(self, question: ChooseFrames | PlanItem, field: str) -> Planned:
            self.questions.append(question)
            return Planned((PromptPart("", 1, 7, positions=bytes(1 << 16)),))

    planner = Telling(remembered=1 << 18)
    for width in (10, 11, 12, 10, 13, 10, 11):
        await planner.plan(item(Modality.IMAGE), replace(SEEN, width=width), None)
    assert [question.width for question in planner.questions if isinstance(question, PlanItem)] == [10, 11, 12, 13, 11]


async def test_options_are_refused_by_name() -> None:
    planner = Asked()
    with pytest.raises(InvalidInput, match="has no max_frames"):
        await planner.footage(item(Modality.VIDEO, Options(max_frames=4)), SEEN)
    given = replace(item(Modality.VIDEO, Options(fps=1.0)), source=Pixels(b"", 3, 4, 4))
    with pytest.raises(InvalidInput, match="has no fps"):
        await planner.plan(given, SEEN, Footage.of(Pixels(b"", 3, 4, 4)))
    with pytest.raises(InvalidInput, match="has no min_pixels"):
        await planner.plan(item(Modality.IMAGE, Options(min_pixels=10)), SEEN, None)
    given = replace(item(Modality.IMAGE, Options(max_pixels=10)), source=Pixels(b"", 1, 4, 4))
    with pytest.raises(InvalidInput, match="has no max_pixels"):
        await planner.plan(given, SEEN, None)


@pytest.mark.parametrize(("most", "size"), [(64 * 48, (48, 64)), (768, (24, 32)), (1, (1, 1))])
async def test_a_picture_is_made_as_small_as_asked_before_the_processor_sees_it(
    most: int, size: tuple[int, int]
) -> None:
    planner = Asked()
    plan = await planner.plan(item(Modality.IMAGE, Options(max_pixels=most)), SEEN, None)
    only_lowers = Options(max_pixels=most, clamp_max_pixels=True)
    assert await planner.plan(item(Modality.IMAGE, only_lowers), SEEN, None) == plan
    assert planner.questions == [PlanItem(*size)]
    assert (plan.height, plan.width, plan.resized) == (*size, size)
    assert plan.whole == (None if size == (48, 64) else (48, 64))


async def test_so_many_frames_a_second_are_a_question_of_their_own() -> None:
    planner, film = Asked(), item(Modality.VIDEO, Options(fps=2.0))
    footage = await planner.footage(film, SEEN)
    await planner.plan(film, SEEN, footage)
    asked = PlanItem(48, 64, (0, 30, 60), 90, 30.0)
    assert planner.questions == [ChooseFrames(90, 30.0, 2.0), msgspec.structs.replace(asked, wanted=2.0)]


@pytest.mark.parametrize(
    ("frames", "fps", "asked", "taken"),
    [
        (100_000, 1.0, None, True),
        (100_000, 0.999, None, False),
        (30_000, 30.0, 1000.0, True),
        (31, 0.03, 1000.0, False),
    ],
)
async def test_a_video_that_goes_on_for_too_long_is_refused_before_its_frames_are_chosen(
    frames: int, fps: float, asked: float | None, taken: bool
) -> None:
    planner, film = Asked(), item(Modality.VIDEO, Options(fps=asked))
    if taken:
        await planner.footage(film, replace(SEEN, frames=frames, fps=fps))
    else:
        with pytest.raises(InvalidInput) as error:
            await planner.footage(film, replace(SEEN, frames=frames, fps=fps))
        assert (error.value.reason, error.value.field) == ("VIDEO_TOO_LONG", "media[0]")
    assert len(planner.questions) == taken


async def test_a_rate_that_the_processor_does_not_take_is_named() -> None:
    class Refusing(Asked):
        async def _ask(self, question: ChooseFrames | PlanItem, field: str) -> Chosen | Planned:
            raise InvalidInput("no", reason="MEDIA_UNREADABLE", field=field)

    for options, reason in ((Options(fps=2.0), "BAD_OPTION"), (Options(), "MEDIA_UNREADABLE")):
        with pytest.raises(InvalidInput) as error:
            await Refusing().footage(item(Modality.VIDEO, options), SEEN)
        assert error.value.reason == reason


async def test_a_video_with_its_sound_is_another_question_and_without_one_it_is_the_same() -> None:
    planner, options = Asked(), Options(with_sound=True)
    film, footage = item(Modality.VIDEO, options), Footage((0, 30, 60), 90, 30.0)
    heard = replace(SEEN, track=Inspection(1, 1, 4000, 44_100.0, 2))
    plan = await planner.plan(film, heard, footage)
    assert (plan.tokens, plan.samples, plan.turns, plan.sound_bytes) == (8, 4000, (3, 5), 16_000)
    assert plan.pixel_bytes == 16_000 + 3 * 64 * 48 * 3
    silent = [await planner.plan(each, SEEN, footage) for each in (film, item(Modality.VIDEO))]
    assert silent[0] == silent[1]
    assert (silent[0].samples, silent[0].turns) == (0, ())
    asked = PlanItem(48, 64, (0, 30, 60), 90, 30.0)
    assert planner.questions == [msgspec.structs.replace(asked, samples=4000), asked]


async def test_a_sound_s_plan_says_how_long_it_is_at_the_rate_it_was_decoded_to() -> None:
    for rate, seconds in ((16_000, 3.0), (24_000, 2.0)):
        plan = await Asked().plan(item(Modality.AUDIO), Inspection(1, 1, 48_000, 44_100.0, 2, rate), None)
        assert (plan.seconds_per_grid, plan.height, plan.width) == (seconds, 1, 48_000)


class Says:
    """A process that has one answer."""

    has_ended = False

    def __init__(self, answer: object) -> None:
        self.answer = answer

    def send(self, question: object) -> None:
        pass

    async def receive(self) -> object:
        return self.answer


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (WrongLength(too_long=True), "AUDIO_TOO_LONG"),
        (WrongLength(too_long=False), "AUDIO_TOO_SHORT"),
        (Refused("something else"), "MEDIA_UNREADABLE"),
    ],
)
async def test_a_sound_that_cannot_be_planned_is_refused_by_what_it_lacks(answer: object, reason: str) -> None:
    planner = HfPlanner("", PlannerTimes(1.0, 10.0))
    planner._child = Says(answer)  # type: ignore[assignment]
    with pytest.raises(InvalidInput) as error:
        await planner.plan(item(Modality.AUDIO), Inspection(1, 1, 48_000), None)
    assert (error.value.reason, error.value.field) == (reason, "media[0]")


async def test_sound_between_frames_is_refused_by_name_where_a_model_has_no_place_for_it() -> None:
    with pytest.raises(Unsupported) as error:
        await Asked(video_sound=False).footage(item(Modality.VIDEO, Options(with_sound=True)), SEEN)
    assert (error.value.reason, error.value.field) == ("NO_VIDEO_SOUND", "media[0].options.with_sound")


def test_frames_that_a_caller_has_decoded_keep_their_times() -> None:
    footage = Footage.of(Pixels(b"", 3, 4, 4, (0.0, 0.25, 1.5)))
    assert [number / footage.fps for number in footage.numbers] == [0.0, 0.25, 1.5]
    assert (footage.decoded, footage.total) == ((0, 1, 2), 1501)
    assert Footage.of(Pixels(b"", 2, 4, 4)).numbers == (0, 500), "half a second apart where there are no times"


async def test_a_caller_who_leaves_does_not_end_the_process_that_others_wait_for() -> None:
    planner = Waiting()
    async with asyncio.TaskGroup() as callers:
        first = callers.create_task(planner.plan(item(Modality.IMAGE), replace(SEEN, width=10), None))
        await eventually(lambda: bool(planner.processes) and planner.processes[0].asked.qsize() == 1, "it is asked")
        second = callers.create_task(planner.plan(item(Modality.IMAGE), replace(SEEN, width=20), None))
        first.cancel()
        await asyncio.wait({first})
        planner.processes[0].told.release()
        planner.processes[0].told.release()
    assert first.cancelled()
    assert second.result().tokens == 20, "not what the first one asked for"
    assert [process.killed for process in planner.processes] == [False]


async def test_a_planner_that_is_stopped_leaves_no_question_behind() -> None:
    planner = Waiting()
    asking = asyncio.ensure_future(planner.plan(item(Modality.IMAGE), SEEN, None))
    await eventually(lambda: bool(planner.processes) and planner.processes[0].asked.qsize() == 1, "it is asked")
    asking.cancel()
    await asyncio.wait({asking})
    await planner.stop()
    assert asyncio.all_tasks() == {asyncio.current_task()}
