"""Plans of items for a model that the library computes: what its process is asked, and what is remembered."""

from __future__ import annotations

import pytest

from common.errors import InvalidInput
from common.media.item import Modality, Options, Pixels, PromptPart
from encoder_service.item import Footage, Inspection, Item
from encoder_service.media.messages import ChooseFrames, Chosen, PlanItem, Planned
from encoder_service.media.planner import LibraryPlanner, PlannerTimes

SEEN = Inspection(64, 48, frames=90, fps=30.0)


class Asked(LibraryPlanner):
    """One whose process is not there: it says so many rows as there are frames."""

    def __init__(self) -> None:
        super().__init__("", PlannerTimes(1.0, 1.0))
        self.questions: list[ChooseFrames | PlanItem] = []

    async def _ask(self, question: ChooseFrames | PlanItem, field: str) -> Chosen | Planned:
        self.questions.append(question)
        if isinstance(question, ChooseFrames):
            return Chosen([0, 30, 60])
        return Planned([PromptPart("<video>", max(1, len(question.frames)), 7)])


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


async def test_options_are_refused_by_name() -> None:
    planner = Asked()
    with pytest.raises(InvalidInput, match="has no fps"):
        await planner.footage(item(Modality.VIDEO, Options(fps=1.0)), SEEN)
    with pytest.raises(InvalidInput, match="has no max_pixels"):
        await planner.plan(item(Modality.IMAGE, Options(max_pixels=10)), SEEN, None)


def test_frames_that_a_caller_has_decoded_keep_their_times() -> None:
    footage = Footage.of(Pixels(b"", 3, 4, 4, (0.0, 0.25, 1.5)))
    assert [number / footage.fps for number in footage.numbers] == [0.0, 0.25, 1.5]
    assert (footage.decoded, footage.total) == ((0, 1, 2), 1501)
    assert Footage.of(Pixels(b"", 2, 4, 4)).numbers == (0, 500), "half a second apart where there are no times"
