"""Subtitles: times to the thousandth, and no text that ends its cue or is taken for a mark."""

from __future__ import annotations

import pytest

from gateway.subtitles import Cue, as_srt, as_vtt


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(0.0, "00:00:00.000"), (0.9996, "00:00:01.000"), (59.9999, "00:01:00.000"), (360_000.25, "100:00:00.250")],
)
def test_times_are_rounded_to_thousandths(seconds: float, told: str) -> None:
    assert f"{told} --> {told}\n" in as_vtt([Cue(seconds, seconds, "", "a")])
    assert f"{told.replace('.', ',')} --> " in as_srt([Cue(seconds, seconds, "", "a")])


def test_no_text_ends_its_cue() -> None:
    cues = [Cue(0, 1, "A\n>", "one\r\n\r\ntwo --> <b>&\n"), Cue(1, 2, " ", "")]
    assert as_srt(cues).split("\n\n")[0].splitlines()[2:] == ["one two -> <b>&"]
    vtt = as_vtt(cues).split("\n\n")
    assert vtt[1].splitlines()[1:] == ["<v A &gt;>one two -> &lt;b>&amp;"]
    assert vtt[2].splitlines()[1:] == []
