"""Turns of a transcript as subtitles: SubRip (`srt`) and WebVTT (`vtt`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Cue(NamedTuple):
    """What is said between two times in seconds, and by whom, if known."""

    start: float
    end: float
    speaker: str
    text: str


def as_srt(cues: Iterable[Cue]) -> str:
    """Without speakers, for whom there is no place.

    >>> as_srt([Cue(0.0, 3661.5, "1", "So it\\n\\nis.")])
    '1\\n00:00:00,000 --> 01:01:01,500\\nSo it is.\\n\\n'
    """
    return "".join(
        f"{number}\n{_clock(cue.start, ',')} --> {_clock(cue.end, ',')}\n{_line(cue.text)}\n\n"
        for number, cue in enumerate(cues, 1)
    )


def as_vtt(cues: Iterable[Cue]) -> str:
    """With speakers as voices.

    >>> as_vtt([Cue(0.25, 1.0, "1", "a < b")])
    'WEBVTT\\n\\n00:00:00.250 --> 00:00:01.000\\n<v 1>a &lt; b\\n\\n'
    """
    return "WEBVTT\n\n" + "".join(
        f"{_clock(cue.start, '.')} --> {_clock(cue.end, '.')}\n{_voice(cue.speaker)}{_escaped(_line(cue.text))}\n\n"
        for cue in cues
    )


def _clock(seconds: float, point: str) -> str:
    thousandths = round(seconds * 1000)
    minutes, rest = divmod(thousandths, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}{point}{rest % 1000:03}"


def _line(text: str) -> str:
    """An empty line would end a cue, and an arrow be one's times."""
    return " ".join(text.split()).replace("-->", "->")


def _voice(speaker: str) -> str:
    return f"<v {_escaped(_line(speaker)).replace('>', '&gt;')}>" if speaker.strip() else ""


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
