"""Sound through both services, with the real model: Qwen2-Audio's rows and tokens, and files that are none."""

from __future__ import annotations

import base64
import http.client
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import pytest

from testkit import audio_checkpoint
from tests import pictures, sounds
from tests.bad_sounds import BAD
from tests.launch import gateway
from tests.rpc.encoder_client import Client
from tests.rpc.pairs import Pair, answer, asked, greedy, pair, refusal, tokens
from tests.waiting import until
from twinlens import TwinlensError, audio, image, user, v1
from twinlens.cli import main

FEW = 32
USUAL = "Transcribe the audio into text."
MOST = 100_000
"""Bytes of a file: three seconds as WAV."""
TUNES = [sounds.tune(1.7, seed) for seed in range(4)]


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> Iterator[Pair]:
    checkpoint = audio_checkpoint.make_audio_checkpoint(tmp_path_factory.mktemp("audio"))
    with pair(checkpoint, light=False, encoder_flags={"max_audio_bytes": MOST}) as running:
        yield running


def reference(both: Pair, clips: list[np.ndarray], question: str) -> list[int]:
    content = [*({"type": "audio"} for _ in clips), {"type": "text", "text": question}]
    heard = [clip.astype(np.float32) / 32768 for clip in clips]
    inputs = audio_checkpoint.inputs_of(both.checkpoint, [{"role": "user", "content": content}], heard)
    return audio_checkpoint.tokens_of(both.checkpoint, inputs, FEW)


def about(*files: bytes, question: str = "What is heard?") -> v1.ChatMessage:
    return user(*map(audio, files), question)


def test_clips_have_the_references_rows(both):
    lengths = (2000, 16_000, 27_000)
    with Client(both.encoder) as client:
        found = client.encode(*(audio(sounds.encoded(TUNES[0][:count])) for count in lengths))
    for count, each in zip(lengths, found, strict=True):
        expected = audio_checkpoint.rows_of(both.checkpoint, TUNES[0][:count].astype(np.float32) / 32768)
        assert (each.header.modality, each.header.tokens) == (v1.MODALITY_AUDIO, len(expected))
        np.testing.assert_allclose(each.rows[:, 0], expected, atol=2e-5)


@pytest.mark.parametrize("count", [1, 2])
def test_a_question_about_clips_has_the_references_tokens(both, count):
    clips = [TUNES[0], TUNES[1][:9000]][:count]
    expected = reference(both, clips, "What is heard?")
    found = answer(both.text, asked(about(*map(sounds.encoded, clips)), greedy(FEW)))
    assert found.choices[0].token_ids == expected
    assert [span.rows for span in found.started.spans] == [42, 14][:count]
    again = answer(both.text, asked(about(*map(sounds.encoded, clips)), greedy(FEW)))
    assert again.choices[0].token_ids == expected
    assert again.started.cached_tokens > 0
    assert tokens(both.text, asked(about(*(sounds.encoded(clip, "flac") for clip in clips)), greedy(FEW))) == expected


def test_two_clips_give_two_answers(both):
    first, second = (tokens(both.text, asked(about(sounds.encoded(clip)), greedy(FEW))) for clip in TUNES[2:])
    assert first != second


def test_a_clip_is_encoded_once_for_many_callers(both):
    file, before = sounds.encoded(sounds.tune(1.2, 77)), both.media.get_load()
    with ThreadPoolExecutor(20) as callers:
        said = list(callers.map(lambda _: tokens(both.text, asked(about(file), greedy(2))), range(100)))
    assert len({tuple(each) for each in said}) == 1
    after = both.media.get_load()
    assert (after.encoded_items - before.encoded_items, after.vit_calls - before.vit_calls) == (1, 1)


def test_rows_by_key_and_ready_made_rows_answer_alike(both):
    file = sounds.encoded(sounds.tune(1.0, 78))
    right = tokens(both.text, asked(about(file), greedy(FEW)))
    with Client(both.encoder) as client:
        made = client.one(audio(file))
    by_key = v1.Media(modality=v1.MODALITY_AUDIO, key=made.header.key)
    block = v1.EmbeddingBlock(
        data=made.rows.tobytes(),
        dtype=made.header.dtype,
        count=made.header.tokens,
        levels=1,
        width=made.header.width,
        grid=made.header.grid,
    )
    ready = v1.Media(modality=v1.MODALITY_AUDIO, embedding=block)
    for item in (by_key, ready):
        assert tokens(both.text, asked(user(item, "What is heard?"), greedy(FEW))) == right
    block.grid.w += 2
    wrong = v1.Media(modality=v1.MODALITY_AUDIO, embedding=block)
    assert refusal(both.text, asked(user(wrong, "What?"))).reason == "BAD_EMBEDDING"


def test_a_data_address_and_a_stated_type_are_checked(both):
    file = sounds.encoded(TUNES[0], "mp3")
    address = "data:audio/mp3;base64," + base64.b64encode(file).decode()
    assert len(tokens(both.text, asked(user(audio(address), "What?"), greedy(2)))) == 2
    assert refusal(both.text, asked(user(audio(file, mime_type="audio/wav"), "What?"))).reason == "MIME_MISMATCH"


def test_a_file_that_is_larger_than_the_option_allows_is_refused(both):
    whole = sounds.encoded(TUNES[0])
    assert len(tokens(both.text, asked(about(whole.ljust(MOST, b"\0")), greedy(2)))) == 2
    found = refusal(both.text, asked(about(whole.ljust(MOST + 1, b"\0"))))
    assert (found.code.name, found.reason) == ("INVALID_ARGUMENT", "AUDIO_TOO_LARGE")
    assert found.message == f"the media is larger than {MOST} bytes"


def test_what_the_model_does_not_take_is_refused_by_name(both):
    picture = image(pictures.encoded(pictures.noise(64, 64)))
    found = refusal(both.text, asked(user(picture, "What?")))
    assert (found.code.name, found.reason) == ("UNIMPLEMENTED", "NO_VISION")
    pruned = audio(sounds.encoded(TUNES[0]))
    pruned.options.max_pixels = 10_000
    assert refusal(both.text, asked(user(pruned, "What?"))).reason == "BAD_OPTION"
    pixels = v1.PixelBlock(data=bytes(12), frames=1, height=2, width=2)
    block = v1.Media(modality=v1.MODALITY_AUDIO, pixels=pixels)
    assert refusal(both.text, asked(user(block, "What?"))).reason == "BAD_PIXELS"
    assert refusal(both.text, asked(about(sounds.encoded(sounds.tune(2.1))))).reason == "AUDIO_TOO_LONG"
    assert refusal(both.text, asked(about(*[sounds.encoded(TUNES[0][:999])] * 5))).reason == "TOO_MANY_ITEMS"
    assert list(both.text.get_info().modalities) == list(both.media.get_info().modalities) == [v1.MODALITY_AUDIO]


def test_a_clip_over_http_and_by_the_command_line_has_the_same_answer(both, tmp_path, capsys):
    file = sounds.encoded(TUNES[0])
    right = answer(both.text, asked(about(file), greedy(FEW))).choices[0].text
    clip = {"type": "input_audio", "input_audio": {"data": base64.b64encode(file).decode(), "format": "wav"}}
    body = {
        "messages": [{"role": "user", "content": [clip, {"type": "text", "text": "What is heard?"}]}],
        "max_tokens": FEW,
        "temperature": 0,
        "ignore_eos": True,
    }
    with gateway(both.llm.address, fork=False) as door:
        until(lambda: asked_over_http(door.address, "GET", "/health/ready")[0] == 200, "the gateway is ready")
        status, reply = asked_over_http(door.address, "POST", "/v1/chat/completions", json.dumps(body))
    assert status == 200
    assert json.loads(reply)["choices"][0]["message"]["content"] == right
    path = tmp_path / "clip.wav"
    path.write_bytes(file)
    flags = ["--audio", str(path), "--llm", both.llm.address, "--max-tokens", str(FEW), "--temperature", "0"]
    assert main(["ask", "What is heard?", *flags]) == 0
    said = capsys.readouterr().out.removesuffix("\n")
    assert said, "it may end sooner, where the request above went on"
    assert right.startswith(said)


def test_the_words_of_a_clip_are_the_answer_to_the_usual_question(both, tmp_path, capsys):
    clip = TUNES[1]
    file = sounds.encoded(clip)
    for language, question in (("", USUAL), ("it", f"{USUAL} The audio is in Italian.")):
        expected = reference(both, [clip], question)
        assert (
            both.text.transcribe(audio(file), language=language, sampling=greedy(FEW)).choices[0].token_ids == expected
        )
    own = both.text.transcribe(audio(file), prompt="What is heard?", sampling=greedy(FEW))
    assert own.choices[0].token_ids == reference(both, [clip], "What is heard?")
    right = both.text.transcribe(audio(file), sampling=v1.SamplingParams(temperature=0, max_tokens=FEW)).text
    assert right
    path = tmp_path / "clip.wav"
    path.write_bytes(file)
    assert main(["transcribe", str(path), "--llm", both.llm.address, "--max-tokens", str(FEW)]) == 0
    assert capsys.readouterr().out == f"{right}\n"


@pytest.mark.parametrize(
    ("more", "reason", "field"),
    [
        ({"language": "xx"}, "NO_LANGUAGE", "transcription.language"),
        ({"turns": True}, "NO_TURNS", "transcription.turns"),
    ],
)
def test_what_a_model_is_not_told_is_refused_by_name(both, more, reason, field):
    with pytest.raises(TwinlensError) as caught:
        both.text.transcribe(audio(sounds.encoded(TUNES[0])), **more)
    assert (caught.value.reason, caught.value.field) == (reason, field)


def test_a_picture_has_no_words_to_write_down(both):
    with pytest.raises(TwinlensError) as caught:
        both.text.transcribe(image(pictures.encoded(pictures.noise(64, 64))))
    assert caught.value.reason == "NO_VISION"


def asked_over_http(address: str, method: str, path: str, body: str | None = None) -> tuple[int, bytes]:
    with closing(http.client.HTTPConnection(address, timeout=120)) as line:
        line.request(method, path, body, {"content-type": "application/json"})
        reply = line.getresponse()
        return reply.status, reply.read()


def test_bad_files_are_answered_as_they_should_be(both):
    assert len(BAD) >= 60
    with Client(both.encoder) as client:
        said = {}
        for name, (data, _) in BAD.items():
            found = client.one(v1.Media(modality=v1.MODALITY_AUDIO, data=data))
            said[name] = found.error.reason if found.error is not None else ""
        assert said == {name: reason for name, (_, reason) in BAD.items()}
        assert client.one(audio(sounds.encoded(sounds.tune(0.5, 79)))).error is None
