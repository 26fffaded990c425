"""Asks a model for the words of a sound, in the form of conversation that it was trained for."""

from __future__ import annotations

from typing import Final

from common.checkpoints.checkpoint import Checkpoint
from common.errors import InvalidInput
from common.media.item import Modality
from llm_service.families.languages import code_of
from llm_service.families.transcription import PromptPlace, Transcription
from llm_service.prompt.builder import PromptBuilder
from llm_service.request import ChatPrompt, MediaItem, Message


class Transcriber:
    """Asks one model. `thinking` is passed to its template; `lacking` names a token that its answers begin with and
    that the checkpoint lacks."""

    def __init__(self, asked: Transcription | None = None, *, thinking: bool | None = None, lacking: str = "") -> None:
        self.asked: Final = asked or Transcription()
        self._thinking = thinking
        self._lacking = lacking

    @classmethod
    def of(cls, checkpoint: Checkpoint, prompts: PromptBuilder) -> Transcriber:
        """That of a checkpoint."""
        asked = Transcription.of(checkpoint)
        lacking = next((mark for mark in asked.marks if not prompts.has_token(mark)), "")
        return cls(asked, thinking=False if prompts.template.knows_thinking else None, lacking=lacking)

    def prompt(self, sound: MediaItem, *, language: str = "", prompt: str = "", turns: bool = False) -> ChatPrompt:
        """The conversation, for a sound in a given language, with the caller's own prompt, and with turns of speakers
        if wanted. Raises InvalidInput for an item that is not a sound, and for options that the model does not have."""
        asked = self.asked
        if sound.modality is not Modality.AUDIO:
            raise InvalidInput("a transcription needs a sound", reason="NO_SOUND", field=sound.field)
        if self._lacking:
            why = f"this checkpoint has no token {self._lacking}, which asks the model for a transcript"
            raise InvalidInput(why, reason="NO_TRANSCRIPTION", field="transcription")
        if turns and not asked.wrapping.tells_turns:
            raise InvalidInput("this model cannot tell who speaks when", reason="NO_TURNS", field="transcription.turns")
        if prompt and asked.place is PromptPlace.NOWHERE:
            why = "this model takes only the sound, without a prompt"
            raise InvalidInput(why, reason="NO_PROMPT", field="transcription.prompt")
        sentence, opening = asked.spoken(self._language(language))
        own = prompt if prompt and asked.place is not PromptPlace.SYSTEM else asked.instruction
        text = f"{own.rstrip()} {sentence}" if own and sentence else own or sentence
        parts = [part for part in ((text, sound) if asked.instruction_first else (sound, text)) if part]
        messages = [Message("user", tuple(parts))]
        if prompt and asked.place is PromptPlace.SYSTEM:
            messages.insert(0, Message("system", (prompt,)))
        return ChatPrompt(tuple(messages), thinking=self._thinking, opening=opening)

    def _language(self, given: str) -> str:
        """The language's code; empty if none is given."""
        if not given:
            return ""
        field, code = "transcription.language", code_of(given)
        if not self.asked.languages:
            raise InvalidInput(
                "this model detects the language, and cannot be told it", reason="NO_LANGUAGE", field=field
            )
        if code is None or code not in self.asked.languages:
            why = "the model does not support this language; languages are ISO 639 codes such as fr"
            raise InvalidInput(why, reason="NO_LANGUAGE", field=field)
        return code
