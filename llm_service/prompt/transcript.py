"""Extracts the words of a transcript, and its turns, from a model's output as it arrives; the result does not depend on
how it is cut."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from llm_service.families.transcription import Transcription, Wrapping

_SENTENCES = (
    "The spoken content of the audio is",
    "The transcription of the audio is",
    "The content of the input audio is",
)
"""How sentences begin that quote the words."""
_LONGEST_HEAD = 64
"""Most characters before the end of a mark that precedes the words, or of a sentence that quotes them."""
_LONGEST_TAIL = 64
"""Most characters of the end of such a sentence."""
_TAIL_SIGNS = " \t\r\n.'\""
_LONGEST_TURN = 1 << 16
"""Most characters of a turn."""
_TIME = r"\[(\d{1,6}(?::\d{1,2}){0,2}(?:\.\d{1,6})?)\]"
_BEGIN, _END = re.compile(rf"{_TIME}\[(S\d{{1,6}})\]"), re.compile(_TIME)
_LONGEST_MARK = 40
"""Most characters of what begins or ends a turn."""
_JSON = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class Turn:
    """An uninterrupted utterance of one speaker, in seconds from the start of the sound; an empty `speaker` and an
    `end` of 0 are unknown."""

    start: float
    end: float
    speaker: str
    text: str


class TranscriptReader:
    """Takes a model's output and returns the words in it. This one returns everything."""

    def push(self, text: str) -> str:
        """Takes more; the words that are certain now."""
        return text

    def finish(self) -> str:
        """The model has ended; the words that are left."""
        return ""

    def take_turns(self) -> list[Turn]:
        """The turns that have become complete since this was asked last."""
        return []


class _Marked(TranscriptReader):
    """Words behind a mark. Without a mark near the beginning, everything is words."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._held: str | None = ""

    def push(self, text: str) -> str:
        if self._held is None:
            return text
        held = self._held = self._held + text
        at = held.find(self._mark, 0, _LONGEST_HEAD + len(self._mark))
        if at < 0 and len(held) < _LONGEST_HEAD + len(self._mark):
            return ""
        self._held = None
        return held if at < 0 else held[at + len(self._mark) :]

    def finish(self) -> str:
        left, self._held = self._held or "", None
        return left


class _Quoted(TranscriptReader):
    """Words that a sentence quotes. Another text is words as a whole."""

    def __init__(self) -> None:
        self._held = ""
        self._quote: str | None = None  # "": the sentence has none
        self._plain = False

    def push(self, text: str) -> str:
        if self._plain:
            return text
        self._held += text
        if self._quote is None and not self._begin():
            return ""
        end = len(self._held) if self._quote is None else _end(self._held)
        said, self._held = self._held[:end], self._held[end:]
        return said

    def _begin(self) -> bool:
        """Whether it is known by now what comes: a sentence or words."""
        text = self._held.lstrip()
        before = len(self._held) - len(text)
        sentence = next((each for each in _SENTENCES if text.startswith(each)), "")
        words = text.removeprefix(sentence).lstrip()
        between = len(text) - len(sentence) - len(words) if sentence else 0
        if max(before, between) > _LONGEST_HEAD:
            self._plain = True
        elif sentence and words:
            self._quote = words[0] if words[0] in "'\"" else ""
            self._held = words.removeprefix(self._quote)
        else:
            self._plain = not sentence and not any(each.startswith(text) for each in _SENTENCES)
        return self._plain or self._quote is not None

    def finish(self) -> str:
        left, self._held = self._held, ""
        if self._quote is None:
            return left
        left = left.rstrip().removesuffix(".").rstrip()
        return left.removesuffix(self._quote) if self._quote else left


def _end(text: str) -> int:
    """Where a possible end of the sentence begins."""
    return max(len(text.rstrip(_TAIL_SIGNS)), len(text) - _LONGEST_TAIL)


class _Turns(TranscriptReader):
    """Words in turns, joined by spaces. If there are no turns, everything is words; text behind the last complete turn
    is dropped."""

    def __init__(self) -> None:
        self._held = ""
        self._turns: list[Turn] = []
        self._told = 0
        self._plain = False

    def push(self, text: str) -> str:
        if self._plain:
            return text
        self._held += text
        said: list[str] = []
        while (found := self._next(self._held, text)) is not None:
            turn, end = found
            self._held = text = self._held[end:]
            if turn is None:
                continue
            self._turns.append(turn)
            said.append(f" {turn.text}" if self._told else turn.text)
            self._told += 1
        if len(self._held) > _LONGEST_TURN:  # no turn: it is not read again and again
            self._plain = not self._told
            said.append(self.finish())
        return "".join(said)

    def _next(self, text: str, new: str) -> tuple[Turn | None, int] | None:
        """The next turn in a text, or None for other text, and where it ends; None if nothing is complete. `new` is the
        end of the text that was not there at the last call."""
        raise NotImplementedError

    def finish(self) -> str:
        left, self._held = self._held, ""
        return "" if self._told else left.strip()

    def take_turns(self) -> list[Turn]:
        turns, self._turns = self._turns, []
        return turns


class _JsonTurns(_Turns):
    """`[{"Start": 0.0, "End": 7.56, "Speaker": 0, "Content": "…"}, …]`, as VibeVoice ASR tells them."""

    def _next(self, text: str, new: str) -> tuple[Turn | None, int] | None:
        begin = text.find("{") if "}" in new else -1
        if begin < 0:
            return None
        try:
            value, end = _JSON.raw_decode(text, begin)
        except (ValueError, RecursionError):
            return None
        content, speaker = value.get("Content"), value.get("Speaker")
        if not isinstance(content, str):
            return None, end
        name = "" if speaker is None else _whole(str(speaker))
        return Turn(_seconds(value.get("Start")), _seconds(value.get("End")), name, _whole(content).strip()), end


class _BracketedTurns(_Turns):
    """`[0.00][S01]…[7.56]`, as MOSS Transcribe Diarize tells them; times are also written 1:02:03."""

    def __init__(self) -> None:
        super().__init__()
        self._begun: re.Match[str] | None = None

    def _next(self, text: str, new: str) -> tuple[Turn | None, int] | None:
        unread = max(0, len(text) - len(new) - _LONGEST_MARK)  # a mark may have begun before
        if self._begun is None:
            self._begun = _BEGIN.search(text, unread)
        if self._begun is None:
            return None
        begun = self._begun
        if (ended := _END.search(text, max(begun.end(), unread))) is None:
            return None
        self._begun = None
        words = text[begun.end() : ended.start()].strip()
        return Turn(_clock(begun[1]), _clock(ended[1]), begun[2], words), ended.end()

    def finish(self) -> str:
        self._begun = None
        return super().finish()


def _whole(text: str) -> str:
    """A text without lone surrogates, which JSON may contain."""
    return text.encode("utf-8", "replace").decode()


def _seconds(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and 0 <= value < 1e9 else 0.0


def _clock(written: str) -> float:
    """Seconds of a time.

    >>> _clock("1:02:03.5")
    3723.5
    """
    seconds = 0.0
    for part in written.split(":"):
        seconds = 60 * seconds + float(part)
    return seconds


def transcript_reader(asked: Transcription, *, opened: bool) -> TranscriptReader:
    """The reader for an answer; `opened`: the prompt has already begun it, with what would precede the mark."""
    match asked.wrapping:
        case Wrapping.MARK:
            return TranscriptReader() if opened else _Marked(asked.mark)
        case Wrapping.SENTENCE:
            return _Quoted()
        case Wrapping.JSON_TURNS:
            return _JsonTurns()
        case Wrapping.BRACKETED_TURNS:
            return _BracketedTurns()
        case Wrapping.NONE:
            return TranscriptReader()
