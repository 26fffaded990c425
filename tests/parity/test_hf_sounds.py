"""Models for sounds alone that transformers computes: rows and tokens are its own, and bad files are refused as a
family of ours refuses them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from common.errors import InvalidInput
from common.hf.processors import Sound
from common.media.item import Modality, Options
from encoder_service.item import Item, Plan
from encoder_service.media.audio import read
from encoder_service.media.checks import check_item
from encoder_service.media.hf_planner import HfPlanner, PlannerTimes
from encoder_service.media.limits import MediaLimits, check_sound
from encoder_service.media.messages import PlanItem
from encoder_service.worker import planner as planner_process
from encoder_service.worker.hf.batches import ByShape, Made
from testkit.hf_side import GREEDY, Served
from tests.bad_sounds import BAD
from tools.models.prompts import tones
from tools.models.reference import Reference
from tools.models.tiny import make

MORE = [pytest.param(kind, marks=pytest.mark.soak) for kind in ("audioflamingo3", "musicflamingo", "nemo_speechlm")]


@pytest.fixture(scope="module", params=["glmasr", "qwen3_asr", *MORE])
def hearing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served.of(make(request.param, tmp_path_factory.mktemp(request.param)))


@pytest.fixture(scope="module")
def library(hearing: Served) -> Reference:
    return Reference(hearing.folder)


def test_rows_are_those_of_transformers(hearing: Served, library: Reference) -> None:
    assert list(hearing.found.placeholders) == ["audio"]
    for seconds in (0.4, 1.7):
        parts = ["Hear ", tones(7, seconds), "!"]
        given = library.inputs(parts)
        rows = library.rows("audio", given)
        ours = hearing.prompt(parts)
        assert ours.layout.ids == given["input_ids"][0].tolist()
        torch.testing.assert_close(ours.rows[0][:, 0], rows, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(rows[0], rows[-1]), "every row would do"


def test_tokens_follow_from_what_is_heard(hearing: Served, library: Reference) -> None:
    asked = [["Hear ", tones(seed, 1.1), " What is said?"] for seed in (8, 9)]
    expected = [library.tokens(library.inputs(parts)) for parts in asked]
    outcomes = hearing.engine(step_tokens=16, max_running=2).run([hearing.prompt(parts) for parts in asked], GREEDY)
    assert [outcome.tokens for outcome in outcomes] == expected
    assert expected[0] != expected[1]


class InProcess:
    """What stands for a planner's process, without one."""

    has_ended = False

    def __init__(self, served: Served) -> None:
        self._served = served

    def send(self, question: PlanItem) -> None:
        self._answer = planner_process._answer(self._served.processor, question)

    async def receive(self) -> object:
        return self._answer


FILLS_UP = "Qwen3ASRForConditionalGeneration"
"""To half a second, so that no clip is too short for it."""


async def test_bad_files_are_answered_as_they_should_be(hearing: Served) -> None:
    limits = MediaLimits(max_audio_seconds=30)
    planner = HfPlanner("", PlannerTimes(1.0, 10.0))
    planner._child = InProcess(hearing)  # type: ignore[assignment]
    expected = {name: reason for name, (_, reason) in BAD.items()}
    if hearing.found.architecture == FILLS_UP:
        expected["a sample"] = ""
    said = dict.fromkeys(BAD, "")
    for name, (data, _) in BAD.items():
        try:
            samples, plan = await planned(planner, data, limits)
        except InvalidInput as error:
            said[name] = error.reason
        except ValueError:
            said[name] = "MEDIA_UNREADABLE"  # by the decode process
        else:
            made = Made("audio", hearing.processor.inputs(Sound(samples)))
            rows = ByShape(hearing.tower).run([made], [plan.tokens])
            assert torch.isfinite(rows).all()
    assert said == expected


async def planned(planner: HfPlanner, data: bytes, limits: MediaLimits) -> tuple[np.ndarray, Plan]:
    """A file's samples and its plan, in the steps of the encoder. Raises ValueError where it cannot be decoded, else
    InvalidInput."""
    item = Item(Modality.AUDIO, data, Options(), field="items[0]")
    check_item(item, limits)
    seen, samples = read(data, limits.bounds)
    check_sound(seen, item.field, limits)
    return samples, await planner.plan(item, seen, None)
