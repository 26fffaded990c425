"""InternVL through both services, with the real model: ids and greedy tokens are transformers' own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from testkit.internvl_checkpoint import PROMPTS, make_internvl
from tests import pictures
from tests.rpc.pairs import Pair, answer, asked, greedy, pair, refusal
from tools.demo_media import film
from tools.models.prompts import Film, Part, picture
from tools.models.reference import TOKENS, Reference
from twinlens import image, user, video


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with pair(make_internvl(tmp_path_factory.mktemp("internvl")), light=False, max_step_tokens=64) as running:
        yield running


def sent(part: Part) -> Any:
    if isinstance(part, str):
        return part
    if isinstance(part, Film):
        return video(part.file)
    file = BytesIO()
    part.save(file, "PNG")
    return image(file.getvalue())


def test_ids_and_greedy_tokens_are_those_of_transformers_alone_beside_others_and_cached(both: Pair) -> None:
    library = Reference(both.checkpoint)
    inputs = {name: library.inputs(parts) for name, parts in PROMPTS.items()}
    expected = {name: library.tokens(given) for name, given in inputs.items()}
    requests = {name: asked(user(*map(sent, parts)), greedy(TOKENS)) for name, parts in PROMPTS.items()}
    for name, request in requests.items():
        found = answer(both.text, request)
        assert found.started.prompt_tokens == inputs[name]["input_ids"].shape[1], name
        assert found.choices[0].token_ids == expected[name], name
    with ThreadPoolExecutor(len(requests)) as pool:
        answers = list(pool.map(lambda request: answer(both.text, request), requests.values()))
    for name, found in zip(requests, answers, strict=True):
        assert found.choices[0].token_ids == expected[name], f"{name}, beside others"
        assert found.started.cached_tokens >= (found.started.prompt_tokens - 1) // 16 * 16, name


def test_a_bound_in_pixels_is_one_on_tiles(both: Pair) -> None:
    still = pictures.encoded(picture(7, 300, 200))
    counts = [
        answer(both.text, asked(user(image(still, **bound), "?"))).started.prompt_tokens
        for bound in ({}, {"max_pixels": 2 * 56**2}, {"max_pixels": 56**2})
    ]
    assert [counts[0] - each for each in counts] == [0, 4 * 2, 4 * 4]


def test_bounds_that_the_model_has_none_of_are_refused_by_name(both: Pair) -> None:
    error = refusal(both.text, asked(user(video(film(), max_pixels=56**2), "What moves?")))
    assert (error.reason, "max_pixels: a frame is one tile" in error.message) == ("BAD_OPTION", True)
    still = image(pictures.encoded(picture(8, 64, 64)), min_pixels=600 * 56**2)
    error = refusal(both.text, asked(user(still, "What is it?")))
    assert (error.reason, "min_pixels asks for more than 512 tiles" in error.message) == ("BAD_OPTION", True)


def test_a_pruned_video_has_fewer_rows(both: Pair) -> None:
    whole, pruned = (
        answer(both.text, asked(user(video(film(), **options), "What moves?"))).started.prompt_tokens
        for options in ({}, {"pruning_rate": 0.5})
    )
    assert whole - pruned == 4 * 8, "of 16 frames of 4 rows"


def test_videos_of_another_size_than_the_tower_s_tiles_are_refused_by_name_and_pictures_served(tmp_path: Path) -> None:
    folder = make_internvl(tmp_path)
    settings = json.loads((folder / "processor_config.json").read_text())
    settings["video_processor"]["size"] = {"height": 84, "width": 84}
    (folder / "processor_config.json").write_text(json.dumps(settings))
    with pair(folder, light=False, max_step_tokens=64) as running:
        refused = refusal(running.text, asked(user(video(film()), "What moves?")))
        assert refused.reason == "NO_VISION"
        still = pictures.encoded(picture(7, 300, 200))
        assert answer(running.text, asked(user(image(still), "?"))).choices[0].token_ids
