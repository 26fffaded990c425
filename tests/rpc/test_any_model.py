"""A model that no family of ours is for, through both services: what the library computes is what a caller gets."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests import pictures, reference
from tests.launch import send
from tests.parity.test_library_models import PROMPTS, picture, reference_inputs
from tests.rpc.pairs import Pair, about, answer, asked, greedy, pair, refusal
from tests.waiting import until
from tools.models.tiny import make
from twinlens import image, user

TOKENS = 32
pytestmark = pytest.mark.soak  # six processes load the library
PLANNER = "encoder_service.worker.planner"


@pytest.fixture(scope="module", params=["idefics3", "gemma3"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Runs of rows with marks between them; rows that see each other."""
    with pair(make(request.param, tmp_path_factory.mktemp(request.param)), light=False) as running:
        yield running


@pytest.mark.parametrize("name", PROMPTS)
def test_ids_and_greedy_tokens_are_the_library_s(both: Pair, name: str) -> None:
    parts = [part if isinstance(part, str) else image(pictures.encoded(part)) for part in PROMPTS[name]]
    said = answer(both.text, asked(user(*parts), greedy(TOKENS)))
    inputs = reference_inputs(both.checkpoint, PROMPTS[name])
    assert said.started.prompt_tokens == inputs["input_ids"].shape[1]
    assert said.choices[0].token_ids == reference.reference_generate(both.checkpoint, inputs, TOKENS)


def test_a_picture_s_bounds_are_refused_by_name(both: Pair) -> None:
    still = image(pictures.encoded(picture(9, 64, 64)), max_pixels=1000)
    error = refusal(both.text, asked(user(still, "What is it?")))
    assert (error.reason, "max_pixels" in error.message) == ("BAD_OPTION", True)


def test_a_planner_that_is_killed_is_started_anew(both: Pair) -> None:
    (planner,) = both.encoder.children(PLANNER)
    send(planner, signal.SIGKILL)
    until(lambda: planner not in both.encoder.children(PLANNER), "the planner is gone")
    assert answer(both.text, asked(about(pictures.encoded(picture(10, 70, 66))))).choices[0].token_ids
    assert planner not in both.encoder.children(PLANNER)
