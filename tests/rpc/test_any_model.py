"""A model that no family of ours is for, through both services: what transformers computes is what a caller gets."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from testkit import forkserver
from testkit.hf_side import with_text
from tests import pictures
from tests.launch import llm_server, send
from tests.quantized import FORMATS, quantize_checkpoint
from tests.rpc.pairs import LLM_FLAGS, Pair, about, answer, asked, greedy, pair, refusal
from tests.waiting import until
from tools.demo_media import film
from tools.launcher import Service
from tools.models.compare import OURS, RANKS, through_services
from tools.models.prompts import SOUND, TWO, VIDEO, picture, sounding_prompts
from tools.models.recipes import RECIPES
from tools.models.recipes.recipe import CLIP, TEXT, part, whole
from tools.models.recipes.sounds import HEARING_BY_ADAPTER
from tools.models.recipes.spans import PALIGEMMA_2
from tools.models.reference import Reference
from tools.models.tiny import make, make_by
from twinlens import image, user, video

PLANNER = "encoder_service.worker.planner"


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The services that `tools` starts are forked, as those of tests are."""
    monkeypatch.setattr(Service, "popen", staticmethod(forkserver.popen))


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llava", tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def both(llava: Path) -> Iterator[Pair]:
    with pair(llava, light=False) as running:
        yield running


def test_a_picture_is_answered_as_by_transformers(llava: Path, both: Pair) -> None:
    shown, library = picture(9, 64, 64), Reference(llava)
    expected = library.tokens(library.inputs([shown, "What is it?"]))
    said = answer(both.text, asked(about(pictures.encoded(shown)), greedy(len(expected))))
    assert said.choices[0].token_ids == expected


OMNI = {VIDEO, SOUND, OURS, *sounding_prompts()}


@pytest.mark.soak  # six processes load transformers
@pytest.mark.parametrize(
    ("kind", "more"),
    [("qwen3_omni_moe_thinker", OMNI), ("gemma3", {OURS})],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of transformers' processors
def test_ids_and_greedy_tokens_are_those_of_transformers(kind: str, more: set[str], tmp_path: Path) -> None:
    """Pictures, videos, sounds, and videos with theirs; experts; rows that see each other; a text that our decoder
    computes; one rank and two."""
    found = through_services(make(kind, tmp_path), RECIPES[kind].step_tokens)
    assert {"one picture", TWO, RANKS} | more < found
    assert (OURS in found) == (OURS in more)


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of transformers' processors
def test_so_they_are_where_scores_have_a_cap_and_whole_prompts_see_beyond_windows(tmp_path: Path) -> None:
    found = through_services(make_by(PALIGEMMA_2, tmp_path), PALIGEMMA_2.step_tokens)
    assert {"one picture", TWO, RANKS, OURS} < found


def of_transformers(folder: Path) -> Path:
    """A checkpoint whose text transformers computes: our decoder has no such activation for it."""
    return with_text(make("llava", folder), hidden_act="gelu")


@pytest.mark.soak
def test_ids_and_greedy_tokens_are_those_of_transformers_where_it_computes_the_text(tmp_path: Path) -> None:
    found = through_services(of_transformers(tmp_path))
    assert {"one picture", TWO, RANKS} < found
    assert OURS not in found


def test_a_text_whose_trial_fails_ends_the_service_with_one_sentence(tmp_path: Path) -> None:
    """DiffLlama's, whose attention goes other ways than ours knows. It would load, and answer something else."""
    text = part("diffllama", TEXT)
    config = whole("llava", vision_config=CLIP, text_config=text, image_token_index="<image>")
    folder = make_by(replace(RECIPES["llava"], config=config), tmp_path)
    says = "llm_service: llava gives other logits in chunks than of a whole prompt: they differ by"
    with pytest.raises(RuntimeError, match=says), llm_server(folder, light=False, **LLM_FLAGS):
        pass


@pytest.mark.soak
def test_tokens_of_quantised_weights_are_those_of_transformers_where_it_computes_the_text(tmp_path: Path) -> None:
    """Pictures and text, on the weights that they are."""
    plain = of_transformers(tmp_path / "plain")
    quantized, wide = quantize_checkpoint(plain, FORMATS["fp8 in blocks"], tmp_path, "language_model.")
    shown, library = picture(9, 64, 64), Reference(wide)
    expected = library.tokens(library.inputs([shown, "What is it?"]))
    with pair(quantized, light=False) as running:
        said = answer(running.text, asked(about(pictures.encoded(shown)), greedy(len(expected))))
        assert running.text.get_info().weights.bits == 8
        assert "transformers computes the text" in running.llm.log.read_text("utf-8")
    assert said.choices[0].token_ids == expected


@pytest.mark.soak
def test_prompts_with_sounds_alone_are_computed_with_the_checkpoint_s_own_adapter(tmp_path: Path) -> None:
    assert {SOUND, OURS, RANKS} < through_services(make_by(HEARING_BY_ADAPTER, tmp_path))


def test_a_video_is_refused_by_name_where_the_model_takes_none(both: Pair) -> None:
    error = refusal(both.text, asked(user(video(film()), "What moves?")))
    assert (error.reason, error.message) == ("NO_VISION", "video is not served by this model")


def test_the_least_that_a_picture_is_to_have_is_refused_by_name(both: Pair) -> None:
    still = image(pictures.encoded(picture(9, 64, 64)), min_pixels=1000)
    error = refusal(both.text, asked(user(still, "What is it?")))
    assert (error.reason, "min_pixels" in error.message) == ("BAD_OPTION", True)


def test_a_picture_is_bounded_as_one_that_comes_as_small(both: Pair) -> None:
    large = picture(9, 128, 128)
    small = large.resize((64, 64), Image.Resampling.BICUBIC)
    stills = image(pictures.encoded(large), max_pixels=64 * 64), image(pictures.encoded(small))
    given, alike = (answer(both.text, asked(user(still, "What is it?"), greedy(4))) for still in stills)
    assert given.choices[0].token_ids == alike.choices[0].token_ids
    assert given.usage.prompt_tokens == alike.usage.prompt_tokens


def test_a_planner_that_is_killed_is_started_anew(both: Pair) -> None:
    (planner,) = both.encoder.children(PLANNER)
    send(planner, signal.SIGKILL)
    until(lambda: planner not in both.encoder.children(PLANNER), "the planner is gone")
    assert answer(both.text, asked(about(pictures.encoded(picture(10, 70, 66))))).choices[0].token_ids
    assert planner not in both.encoder.children(PLANNER)
