"""`twinlens transcribe`: what is asked, and how words and turns are shown."""

from __future__ import annotations

import json
from collections.abc import Iterator

import grpc
import pytest

from tests.unit.twinlens.fakes import FakeLlm
from twinlens import v1
from twinlens.cli import main


@pytest.fixture
def sound(tmp_path):
    path = tmp_path / "speech.wav"
    path.write_bytes(b"wav")
    return str(path)


def test_the_words_are_all_of_standard_output(llm: FakeLlm, llm_address: str, sound, capsys) -> None:
    flags = ["--language", "de", "--prompt", "Ulm", "--max-tokens", "9", "--timings"]
    assert main(["transcribe", sound, "--llm", llm_address, *flags]) == 0
    out, err = capsys.readouterr()
    assert (out, err.splitlines()[0]) == (
        "A red circle.\n",
        "9 prompt tokens (4 cached), 3 generated, FINISH_REASON_STOP",
    )
    (request,) = llm.requests
    sound = v1.Media(modality=v1.MODALITY_AUDIO, data=b"wav")
    assert request.transcription == v1.TranscriptionInput(audio=sound, language="de", prompt="Ulm")
    assert request.sampling == v1.SamplingParams(temperature=0, max_tokens=9)


def test_turns_have_a_line_each(llm: FakeLlm, llm_address: str, capsys) -> None:
    def turns(_: v1.GenerateRequest) -> Iterator[v1.GenerateResponse]:
        for begin, words in ((0.0, "Hello."), (1.25, "Hi.")):
            turn = v1.TranscriptTurn(start_seconds=begin, end_seconds=begin + 1, speaker="S01", text=words)
            yield v1.GenerateResponse(delta=v1.GenerateDelta(text=words, turns=[turn]))

    llm.play = turns
    assert main(["transcribe", "https://host/a.mp3", "--llm", llm_address, "--turns"]) == 0
    assert capsys.readouterr().out == "0.00-1.00 S01: Hello.\n1.25-2.25 S01: Hi.\n"
    assert llm.requests[0].transcription.turns


def test_json_gives_one_event_a_line_and_refusals_too(llm: FakeLlm, llm_address: str, capsys) -> None:
    code = grpc.StatusCode.INVALID_ARGUMENT
    llm.refusal = code, v1.Status(code=code.value[0], message="no", reason="NO_LANGUAGE")
    assert main(["transcribe", "https://host/a.mp3", "--llm", llm_address, "--json"]) == 1
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [*events[0], *events[-1]] == ["started", "error"]
    assert events[-1]["error"]["reason"] == "NO_LANGUAGE"


def test_words_without_turns_are_shown_as_they_are(llm_address: str, capsys) -> None:
    assert main(["transcribe", "https://host/a.mp3", "--llm", llm_address, "--turns"]) == 0
    assert capsys.readouterr().out == "A red circle.\n"
