"""How kinds of models are asked to transcribe a sound, and how their answers wrap the words."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final

from common.checkpoints.checkpoint import Checkpoint
from llm_service.families.languages import LANGUAGES


class PromptPlace(Enum):
    """Where the caller's prompt for a transcription is placed."""

    SYSTEM = "a message of the system, before the sound"
    BEHIND = "behind the sound"
    INSTEAD = "in place of the instruction"
    NOWHERE = "nowhere"


class Wrapping(Enum):
    """What an answer contains besides the words."""

    NONE = "none: it is the words"
    MARK = "before them is something else, up to a mark"
    SENTENCE = "a sentence that quotes them"
    JSON_TURNS = "a JSON list of turns"
    BRACKETED_TURNS = "turns between bracketed times"

    @property
    def tells_turns(self) -> bool:
        """Whether it tells who speaks when."""
        return self in (Wrapping.JSON_TURNS, Wrapping.BRACKETED_TURNS)


@dataclass(frozen=True, slots=True)
class Transcription:
    """How a model is asked for the words of a sound.

    `instruction` follows the sound, or precedes it if `instruction_first`; empty: none. `place` is where the caller's
    prompt goes. `languages` can be named by code: in a sentence of the instruction, or in an `opening` of the answer,
    with {code} or {name} filled in. `plain_opening` is the opening without a language; `marks` are special tokens of
    both, which a checkpoint must have. The words are wrapped in `wrapping`, behind `mark` if that is a mark.
    """

    instruction: str = "Transcribe the audio into text."
    instruction_first: bool = False
    place: PromptPlace = PromptPlace.INSTEAD
    languages: Collection[str] = tuple(LANGUAGES)
    opening: str = ""
    plain_opening: str = ""
    marks: Collection[str] = ()
    wrapping: Wrapping = Wrapping.NONE
    mark: str = ""

    def spoken(self, code: str) -> tuple[str, str]:
        """How a language is named: a sentence after the instruction, and the opening of the answer. An empty code means
        no language."""
        if not code:
            return "", self.plain_opening
        if self.opening:
            return "", self.opening.format(code=code, name=LANGUAGES[code])
        return f"The audio is in {LANGUAGES[code]}.", ""

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Transcription:
        """That of a checkpoint: its processor's settings may have an instruction of their own."""
        known = TRANSCRIPTIONS.get(str(checkpoint.config.get("model_type")), cls())
        own = checkpoint.json("processor_config.json").get("default_transcription_prompt")
        return replace(known, instruction=own) if known.instruction and isinstance(own, str) and own else known


_QWEN3_ASR: Final = (
    *("ar", "cs", "da", "de", "el", "en", "es", "fa", "fi", "fil", "fr", "hi", "hu", "id", "it"),
    *("ja", "ko", "mk", "ms", "nl", "pl", "pt", "ro", "ru", "sv", "th", "tr", "vi", "yue", "zh"),
)
ASR_TEXT: Final = "<asr_text>"
"""Qwen3-ASR's mark before the words."""
_TURNS: Final[Mapping[str, Any]] = {"instruction": "", "place": PromptPlace.BEHIND, "languages": ()}

TRANSCRIPTIONS: Final[Mapping[str, Transcription]] = {
    "qwen3_asr": Transcription(
        instruction="",
        place=PromptPlace.SYSTEM,
        languages=_QWEN3_ASR,
        opening=f"language {{name}}{ASR_TEXT}",
        marks=(ASR_TEXT,),
        wrapping=Wrapping.MARK,
        mark=ASR_TEXT,
    ),
    "voxtral": Transcription(
        instruction="",
        place=PromptPlace.NOWHERE,
        opening="lang:{code}[TRANSCRIBE]",
        plain_opening="[TRANSCRIBE]",
        marks=("[TRANSCRIBE]",),
    ),
    "vibevoice_asr": Transcription(**_TURNS, wrapping=Wrapping.JSON_TURNS),
    "moss_transcribe_diarize": Transcription(**_TURNS, wrapping=Wrapping.BRACKETED_TURNS),
    "glmasr": Transcription("Please transcribe this audio into text"),
    "audioflamingo3": Transcription("Transcribe the input speech.", instruction_first=True, wrapping=Wrapping.SENTENCE),
    "granite_speech": Transcription("can you transcribe the speech into a written format?"),
    "granite_speech_plus": Transcription("can you transcribe the speech into a written format?"),
    "nemo_speechlm": Transcription("Transcribe the following: ", instruction_first=True),
    "phi4_multimodal": Transcription("Transcribe the audio clip into text."),
    "nemotron3_5_transcribe": Transcription(
        "Audio transcription. Language: as spoken. Wording: verbatim, including fillers and repetitions. "
        "Formatting: punctuation and capitalization. Output: transcript only.",
        instruction_first=True,
    ),
}
"""By `model_type` of config.json, as their authors ask them; others are asked as `Transcription` has it."""
