"""Requests for the words of a sound, beside transformers' own: the same prompt, and the same words of an answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.checkpoints.checkpoint import Checkpoint
from common.media.item import Key, Modality
from llm_service.families.transcription import TRANSCRIPTIONS
from llm_service.prompt.transcript import transcript_reader
from llm_service.request import MediaItem
from llm_service.transcriber import Transcriber
from testkit.hf_side import Served
from tools.models.prompts import tones
from tools.models.recipes import RECIPES
from tools.models.tiny import make

from transformers import AutoProcessor  # isort: skip

_TEMPLATE = (
    "{% for message in messages %}{{ '<s>' + message.role + ': ' }}{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'audio' %}{{ '<audio>' }}"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{{ '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant: ' }}{% endif %}"
)
"""In which the beginning of an answer is that of an assistant's message, as in those that are published."""


@pytest.mark.parametrize(
    ("kind", "asked"),
    [
        ("glmasr", {}),
        ("glmasr", {"prompt": "In capitals."}),
        ("audioflamingo3", {}),
        ("qwen3_asr", {}),
        ("qwen3_asr", {"language": "de", "prompt": "Ulm, Linz"}),
        ("qwen3_asr", {"language": "Cantonese"}),
        ("vibevoice_asr", {}),
        ("vibevoice_asr", {"prompt": "Ulm, Linz"}),
        ("moss_transcribe_diarize", {"prompt": "Who speaks?"}),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of transformers' processors
def test_a_sound_is_asked_about_as_transformers_asks(kind: str, asked: dict[str, str], tmp_path: Path) -> None:
    folder = make(kind, tmp_path)
    template = _TEMPLATE.replace("<audio>", RECIPES[kind].audio)
    (folder / "chat_template.jinja").write_text(template)
    served, sound = Served.of(folder), tones(7, 0.9)
    processor = AutoProcessor.from_pretrained(folder)
    processor.chat_template = template
    expected = processor.apply_transcription_request(sound.heard(), return_tensors="pt", **asked)["input_ids"][0]
    header, _ = served._encoded(sound)
    sound_item = MediaItem(Modality.AUDIO, Key(b""))
    prompt = Transcriber.of(Checkpoint(folder), served.builder).prompt(sound_item, **asked)
    layout = served.builder.layout(served.builder.pieces(prompt, [Modality.AUDIO]), [header])
    assert layout.ids == expected.tolist()


def test_voxtral_is_asked_by_a_mark_and_a_language(tmp_path: Path) -> None:
    folder = make("voxtral", tmp_path)
    served, sound = Served.of(folder), MediaItem(Modality.AUDIO, Key(b""))
    header, _ = served._encoded(tones(7, 0.9))
    transcriber = Transcriber.of(Checkpoint(folder), served.builder)
    rows = "[AUDIO]" * header.tokens
    for language, behind in (("", ""), ("fr", "lang:fr")):
        prompt = transcriber.prompt(sound, language=language)
        ids = served.builder.layout(served.builder.pieces(prompt, [Modality.AUDIO]), [header]).ids
        assert served.builder.decode(ids) == f"<s>[INST][BEGIN_AUDIO]{rows}[/INST]{behind}[TRANSCRIBE]"


SENTENCES = ["Hello there.", "", "It's 5.", 'He said "no".', "..."]
ANSWERS: dict[str, list[str]] = {
    "audioflamingo3": [f'The spoken content of the audio is "{each}".' for each in SENTENCES]
    + ["The transcription of the audio is 'Well, no'", "The content of the input audio is plain words."],
    "qwen3_asr": ["language English<asr_text>Hello there.", "language None<asr_text>", "language French<asr_text>Oui"],
    "vibevoice_asr": [
        '[{"Start":0.0,"End":7.56,"Speaker":0,"Content":"Hi {you}, \\"how\\"?"},{"Start":8,"End":9.5,"Content":"No"}]',
        '[{"Start":0.0,"End":1.0,"Speaker":0,"Content":"Whole"}, {"Start":1.0,"End":2.0,"Spea',
        "No list at all.",
    ],
    "moss_transcribe_diarize": [
        "[0.00][S01]Hello there.[7.56][8.1][S02] Fine, thanks. [1:02.5]",
        "[0.00][S01]Whole[1.00][1.50][S02]cut",
        "No turns.",
    ],
}


def words_of(kind: str, answer: str, cut: int) -> tuple[str, list[Any]]:
    reader = transcript_reader(TRANSCRIPTIONS[kind], opened=False)
    pieces = [answer[at : at + cut] for at in range(0, len(answer), cut)]
    words = "".join([*map(reader.push, pieces), reader.finish()])
    return words, reader.take_turns()


@pytest.mark.parametrize(("kind", "answer"), [(kind, each) for kind, answers in ANSWERS.items() for each in answers])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_words_are_those_that_transformers_finds(kind: str, answer: str, tmp_path: Path) -> None:
    processor = AutoProcessor.from_pretrained(make(kind, tmp_path))
    if kind == "audioflamingo3":
        expected = processor._strip_assistant_prefix_and_quotes(answer)
    else:
        expected = processor.extract_transcription(answer)
    for cut in (1, 2, 3, 7, len(answer)):
        assert words_of(kind, answer, cut)[0].strip() == expected
    if kind in ("vibevoice_asr", "moss_transcribe_diarize") and words_of(kind, answer, 1)[1]:
        said = [(turn.start, turn.end, turn.text) for turn in words_of(kind, answer, 3)[1]]
        found = processor.extract_speaker_dict(answer)
        assert said == [(each["Start"], each["End"], each["Content"]) for each in found]
