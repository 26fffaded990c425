"""A video with its own sound through both services, the gateway and the command line."""

from __future__ import annotations

import base64
import io
import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests import pictures, sounds
from tests.bad_sounds import BAD_TRACKS
from tests.launch import gateway
from tests.rpc.encoder_client import Client
from tests.rpc.encoder_client import film as decoded
from tests.rpc.pairs import Pair, answer, asked, greedy, pair, refusal, tokens
from tests.rpc.test_sound import asked_over_http
from tests.waiting import until
from tools.models.prompts import Film, Part, sounding_film
from tools.models.reference import Reference
from tools.models.tiny import make
from twinlens import user, v1, video
from twinlens.cli import main

pytestmark = [
    pytest.mark.soak,  # three processes load transformers
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of transformers' processors
]
FEW = 32
QUESTION = "What is said?"


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = make("qwen2_5_omni_thinker", tmp_path_factory.mktemp("omni"))
    with pair(folder, light=False, encoder_flags={"max_audio_seconds": 5}) as running:
        yield running


@pytest.fixture(scope="module")
def library(both: Pair) -> Reference:
    return Reference(both.checkpoint)


def about(film: Film) -> v1.ChatMessage:
    return user(video(film.file, with_sound=film.with_sound), QUESTION)


@pytest.mark.parametrize("kind", ["mp4", "avi"])
def test_stereo_at_44_100_has_transformers_tokens(both: Pair, library: Reference, kind: str) -> None:
    tune = np.stack([sounds.tune(0.9, seed, 44_100) for seed in (1, 2)])
    film = Film(sounds.film(tune, kind, 44_100, count=4), with_sound=True)
    parts: list[Part] = [film, QUESTION]
    assert tokens(both.text, asked(about(film), greedy(FEW))) == library.tokens(library.inputs(parts))


def test_a_list_of_frames_is_what_they_are_decoded(both: Pair) -> None:
    listed = [pictures.encoded(Image.fromarray(each), "JPEG") for each in pictures.frames(4)]
    shown = np.stack([np.asarray(Image.open(io.BytesIO(each)).convert("RGB")) for each in listed])
    given = video(b"".join(listed)), decoded(shown)
    one, other = (tokens(both.text, asked(user(each, QUESTION), greedy(FEW))) for each in given)
    assert one == other
    refused = refusal(both.text, asked(user(video(b"".join(listed), with_sound=True), QUESTION)))
    assert (refused.reason, "with_sound" in refused.message) == ("BAD_OPTION", True)


def test_two_callers_share_one_encoding_and_the_next_finds_it_cached(both: Pair) -> None:
    film, before = sounding_film(11, 0.5, 0.9), both.media.get_load()
    with ThreadPoolExecutor(2) as callers:
        said = list(callers.map(lambda _: tokens(both.text, asked(about(film), greedy(FEW))), range(2)))
    assert said[0] == said[1]
    after = both.media.get_load()
    assert (after.encoded_items - before.encoded_items, after.vit_calls - before.vit_calls) == (1, 1)
    again = answer(both.text, asked(about(film), greedy(FEW)))
    assert again.choices[0].token_ids == said[0]
    assert again.started.cached_tokens > 0.9 * again.started.prompt_tokens - 16


def test_the_option_acts_and_is_part_of_the_key(both: Pair) -> None:
    file = sounding_film(12, 0.5, 0.9).file
    unsaid = video(file)
    unsaid.options.with_sound = False
    with Client(both.encoder) as client:
        plain, heard, same = (client.one(each) for each in (video(file), video(file, with_sound=True), unsaid))
    assert plain.header.key == same.header.key != heard.header.key
    assert plain.header.tokens < heard.header.tokens == len(heard.rows)
    counts: Counter[int] = Counter()
    for part in heard.header.replacement:
        counts[part.token] += part.rows
    assert sorted(counts.values())[-2:] == sorted([plain.header.tokens, heard.header.tokens - plain.header.tokens])


def test_a_video_without_sound_is_as_any_other(both: Pair) -> None:
    film = pictures.video(pictures.frames(4, 64, 64))
    with Client(both.encoder) as client:
        plain, silent = client.encode(video(film), video(film, with_sound=True))
    assert silent.header.replacement == plain.header.replacement
    np.testing.assert_array_equal(silent.rows, plain.rows)


def test_bad_tracks_are_answered_as_they_should_be(both: Pair) -> None:
    with Client(both.encoder) as client:
        said = {}
        for name, (data, _) in BAD_TRACKS.items():
            found = client.one(video(data, with_sound=True))
            said[name] = found.error.reason if found.error is not None else ""
        assert said == {name: reason for name, (_, reason) in BAD_TRACKS.items()}
        assert client.one(video(sounds.film(sounds.tune(0.5, 79)), with_sound=True)).error is None


def test_what_does_not_go_with_sound_is_refused_by_name(both: Pair) -> None:
    item = video(sounding_film(13, 0.5, 0.5).file, with_sound=True, pruning_rate=0.5)
    found = refusal(both.text, asked(user(item, QUESTION)))
    assert (found.reason, found.field.endswith("options.with_sound")) == ("BAD_OPTION", True)


def test_over_http_and_by_the_command_line_the_answer_is_the_same(
    both: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    film = sounding_film(14, 0.5, 1.3)
    right = answer(both.text, asked(about(film), greedy(FEW))).choices[0].text
    other = answer(both.text, asked(about(Film(film.file)), greedy(FEW))).choices[0].text
    assert right != other, "nothing is heard"
    address = "data:video/x-matroska;base64," + base64.b64encode(film.file).decode()
    content = [{"type": "video_url", "video_url": {"url": address}}, {"type": "text", "text": QUESTION}]
    body = {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": FEW,
        "temperature": 0,
        "ignore_eos": True,
        "mm_processor_kwargs": {"use_audio_in_video": True},
    }
    with gateway(both.llm.address, fork=False) as door:
        until(lambda: asked_over_http(door.address, "GET", "/health/ready")[0] == 200, "the gateway is ready")
        status, reply = asked_over_http(door.address, "POST", "/v1/chat/completions", json.dumps(body))
    assert (status, json.loads(reply)["choices"][0]["message"]["content"]) == (200, right)
    path = tmp_path / "film.mkv"
    path.write_bytes(film.file)
    flags = ["--video", str(path), "--with-sound", "--llm", both.llm.address]
    assert main(["ask", QUESTION, *flags, "--max-tokens", str(FEW), "--temperature", "0"]) == 0
    said = capsys.readouterr().out.removesuffix("\n")
    assert said, "it may end sooner, where the request above went on"
    assert right.startswith(said)
