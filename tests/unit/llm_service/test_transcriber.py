"""How models are asked for words, and how answers are read that go on elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.checkpoints.checkpoint import Checkpoint
from common.errors import InvalidInput
from common.media.item import Key, Modality
from llm_service.engine.messages import Token
from llm_service.families.languages import LANGUAGES, code_of
from llm_service.families.transcription import TRANSCRIPTIONS, Transcription
from llm_service.generation.choices import Choice
from llm_service.prompt.builder import PromptBuilder
from llm_service.prompt.detokenizer import Detokenizer
from llm_service.prompt.transcript import transcript_reader
from llm_service.request import MediaItem
from llm_service.transcriber import Transcriber

SOUND = MediaItem(Modality.AUDIO, Key(b""), field="transcription.audio")


def transcriber(folder: Path, kind: str, *, thinks: bool = False, tokens: bool = True, own: str = "") -> Transcriber:
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    if own:
        (folder / "processor_config.json").write_text(json.dumps({"default_transcription_prompt": own}))
    prompts = SimpleNamespace(template=SimpleNamespace(knows_thinking=thinks), has_token=lambda _: tokens)
    return Transcriber.of(Checkpoint(folder), cast(PromptBuilder, prompts))


def parts(asked: Transcriber, **given: Any) -> list[tuple[str, list[str]]]:
    prompt = asked.prompt(SOUND, **given)
    shown = [[part if isinstance(part, str) else "♪" for part in message.parts] for message in prompt.messages]
    return [(message.role, each) for message, each in zip(prompt.messages, shown, strict=True)]


def test_a_model_of_no_kind_that_is_known_gets_an_instruction(tmp_path: Path) -> None:
    asked = transcriber(tmp_path, "some_model")
    assert parts(asked) == [("user", ["♪", "Transcribe the audio into text."])]
    assert parts(asked, language="French") == [
        ("user", ["♪", "Transcribe the audio into text. The audio is in French."])
    ]
    assert parts(asked, prompt="Words? ", language="sv") == [("user", ["♪", "Words? The audio is in Swedish."])]
    assert asked.prompt(SOUND).thinking is None


def test_one_that_could_think_is_told_not_to(tmp_path: Path) -> None:
    assert transcriber(tmp_path, "some_model", thinks=True).prompt(SOUND).thinking is False


def test_a_processor_s_own_instruction_comes_first(tmp_path: Path) -> None:
    assert parts(transcriber(tmp_path, "nemotron3_5_transcribe", own="Write.")) == [("user", ["Write.", "♪"])]
    assert parts(transcriber(tmp_path, "vibevoice_asr", own="Write.")) == [("user", ["♪"])]


@pytest.mark.parametrize(
    ("kind", "given", "tokens", "reason"),
    [
        ("vibevoice_asr", {"language": "en"}, True, "NO_LANGUAGE"),
        ("qwen3_asr", {"language": "la"}, True, "NO_LANGUAGE"),
        ("some_model", {"language": "Klingon"}, True, "NO_LANGUAGE"),
        ("voxtral", {"prompt": "Ulm"}, True, "NO_PROMPT"),
        ("voxtral", {}, False, "NO_TRANSCRIPTION"),
        ("glmasr", {"turns": True}, True, "NO_TURNS"),
    ],
)
def test_what_a_model_cannot_be_told_is_refused(
    kind: str, given: dict[str, Any], tokens: bool, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInput) as caught:
        transcriber(tmp_path, kind, tokens=tokens).prompt(SOUND, **given)
    assert caught.value.reason == reason


def test_turns_are_told_where_the_model_tells_them(tmp_path: Path) -> None:
    assert transcriber(tmp_path, "vibevoice_asr").prompt(SOUND, turns=True).messages


def test_a_picture_is_refused() -> None:
    with pytest.raises(InvalidInput, match="needs a sound"):
        Transcriber().prompt(MediaItem(Modality.IMAGE, Key(b"")))


def test_languages_are_known_by_code_and_by_name() -> None:
    assert all(code_of(code) == code_of(name.upper()) == code for code, name in LANGUAGES.items())
    assert all(set(each.languages) <= set(LANGUAGES) for each in TRANSCRIPTIONS.values())


def test_what_is_behind_an_opening_is_words() -> None:
    reader = transcript_reader(TRANSCRIPTIONS["qwen3_asr"], opened=True)
    assert reader.push("Hello") + reader.push(" there.") + reader.finish() == "Hello there."


def test_a_mark_that_does_not_come_is_not_waited_for() -> None:
    reader = transcript_reader(TRANSCRIPTIONS["qwen3_asr"], opened=False)
    said = [reader.push(f"word{number} ") for number in range(20)]
    assert said[:5] == [""] * 5
    assert "".join(said) == "".join(f"word{number} " for number in range(20))


@pytest.mark.parametrize("piece", ['{"Content": "' + "a" * 1000, "[S01]" + "a" * 1000])
@pytest.mark.parametrize("kind", ["vibevoice_asr", "moss_transcribe_diarize"])
def test_a_turn_that_does_not_end_is_not_waited_for(kind: str, piece: str) -> None:
    reader = transcript_reader(TRANSCRIPTIONS[kind], opened=False)
    said = [reader.push(piece) for _ in range(70)]
    assert said[:60] == [""] * 60
    assert "".join(said).count("a") == 70_000


def test_what_is_behind_a_turn_and_does_not_end_is_let_go() -> None:
    reader = transcript_reader(TRANSCRIPTIONS["moss_transcribe_diarize"], opened=False)
    assert reader.push("[0.0][S01]Hello.[1.0]") == "Hello."
    assert "".join(reader.push("[S02]" + "a" * 1000) for _ in range(70)) == ""
    assert reader.push("[2.0][S02]Hi.[3.0]") == " Hi."


def test_plain_answers_pass_as_they_are() -> None:
    reader = transcript_reader(Transcription(), opened=False)
    assert [reader.push(" a"), reader.push("b "), reader.finish(), reader.take_turns()] == [" a", "b ", "", []]


class Letters:
    """A tokenizer whose tokens are letters."""

    def token_to_id(self, _: str) -> None:
        """None of them has a name."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(map(chr, ids))


@pytest.mark.parametrize("cut", [0, 20, 45, 60])
def test_an_answer_that_goes_on_elsewhere_is_read_from_its_beginning(cut: int) -> None:
    """What is told before, and what is told behind, are the whole."""
    answer = "[0.00][S01]Hello there.[7.56][8.10][S02]Fine, thanks.[9.00]"
    told, turns = "", []
    for begin, end in ((0, cut), (cut, len(answer))):
        words = transcript_reader(TRANSCRIPTIONS["moss_transcribe_diarize"], opened=False)
        choice = Choice(0, Detokenizer(cast(Any, Letters())), words=words)
        choice.resume(tuple(map(ord, answer[:begin])))
        if begin >= end:
            continue
        delta, _ = choice.add([Token(0, 0, ord(each), "") for each in answer[begin:end]])
        told, turns = told + delta.text, turns + delta.turns
    assert told == "Hello there. Fine, thanks."
    assert [(turn.start, turn.end, turn.speaker) for turn in turns] == [(0.0, 7.56, "S01"), (8.1, 9.0, "S02")]


PIECES = [
    *("[", "]", "{", "}", ".", " ", '"', "'", "a", ":", "[0.5]", "[S01]", "[1:02]", "[2]", "<asr_text>", "language A"),
    *('{"Content": "', '{"Start": 1, "Content": "x"}', "The spoken content of the audio is", "The content ", " " * 40),
]


@pytest.mark.parametrize("kind", ["qwen3_asr", "audioflamingo3", "vibevoice_asr", "moss_transcribe_diarize"])
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=30), cut=st.integers(1, 40))
def test_words_and_turns_are_the_same_wherever_an_answer_is_cut(kind: str, pieces: list[str], cut: int) -> None:
    answer = "".join(pieces)
    found = []
    for size in (1, cut, max(1, len(answer))):
        reader = transcript_reader(TRANSCRIPTIONS[kind], opened=False)
        words = [reader.push(answer[at : at + size]) for at in range(0, len(answer), size)]
        found.append(("".join([*words, reader.finish()]), reader.take_turns()))
    assert found[0] == found[1] == found[2]


def test_what_may_be_the_end_of_a_sentence_is_held_within_a_bound() -> None:
    reader = transcript_reader(TRANSCRIPTIONS["audioflamingo3"], opened=False)
    said = reader.push("The spoken content of the audio is '") + "".join(reader.push(".") for _ in range(1000))
    assert len(said) == 1000 - 64
    assert said + reader.push("a'.") + reader.finish() == "." * 1000 + "a"


def test_halves_of_signs_and_times_that_are_none_are_left_out() -> None:
    reader = transcript_reader(TRANSCRIPTIONS["vibevoice_asr"], opened=False)
    assert reader.push('[{"Content": "a\\ud83d", "Speaker": "\\ude00", "Start": 1e999, "End": true}]') == "a?"
    (turn,) = reader.take_turns()
    assert (turn.speaker, turn.start, turn.end) == ("?", 0.0, 1.0)
    reader = transcript_reader(TRANSCRIPTIONS["moss_transcribe_diarize"], opened=False)
    text = f"[{'9' * 400}][S01]a[1.0]"
    assert reader.push(text) + reader.finish() == text, "no turn"
