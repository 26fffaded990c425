"""The pictures and questions of the benchmarks: new each time they are made, unless the same one is requested again.

A cache with a benchmark's content would falsify its figures. So all content is made from a mark, and no mark is used
twice: it joins a random number of this process with a counter that no repetition, warm-up or row restarts. A picture's
pixels and a text's words contain their mark, so no cache of files, pixels, rows or tokens knows them. The same mark
makes the same content in every process, so that a peer gets the same content.
"""

from __future__ import annotations

import functools
import io
import itertools
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

QUESTION = "What is in the picture, and what stands beside it?"
CONCURRENT = (1, 4, 8, 16)
"""Answers at once, where rates are measured."""
OTHER_QUESTION = "Which colours are there?"

_RUN_DIGITS, _NUMBER_DIGITS = 9, 6
_RUN = secrets.randbelow(10**_RUN_DIGITS)
_numbers = itertools.count()
_CUT, _MARGIN, _SIGN = 450, 60, 8


@dataclass(frozen=True, slots=True)
class Mark:
    """The name of one piece of content: the process that made it up, and a number there."""

    run: int
    number: int

    @classmethod
    def new(cls) -> Mark:
        """One that was never given out."""
        return cls(_RUN, next(_numbers))

    @classmethod
    def read(cls, word: str) -> Mark:
        """From what `str` makes of one."""
        run, number = word[:_RUN_DIGITS], word[_RUN_DIGITS:]
        return cls(int(run), int(number))

    def __str__(self) -> str:
        """As digits, always as many, so that all texts have as many tokens."""
        return f"{self.run:0{_RUN_DIGITS}}{self.number:0{_NUMBER_DIGITS}}"


@dataclass(frozen=True, slots=True)
class Question:
    """What a request asks: a text about a picture, which is made from its mark where it is needed."""

    picture: Mark
    text: str
    side: int = 448

    @classmethod
    def new(cls, side: int = 448) -> Question:
        """A new question about a new picture."""
        return cls(Mark.new(), new_text(), side)

    def about_the_same(self) -> Question:
        """A new question about this picture."""
        return Question(self.picture, new_text(OTHER_QUESTION), self.side)

    def file(self) -> bytes:
        """The picture as a JPEG file."""
        return picture(self.picture, self.side)


@dataclass(frozen=True, slots=True)
class Plan:
    """What every engine is asked, in this order. All is new, but for what bears the word *repeated*."""

    warm_up: list[Question]
    first: list[Question]
    """Asked for one token each."""
    repeated_pictures: list[Question]
    """New questions about the pictures of `first`."""
    long: list[Question]
    """Asked for a long answer each, one after the other."""
    together: dict[int, list[list[Question]]]
    """Rounds of questions that come at once, by how many these are."""

    @classmethod
    def new(cls, runs: int, side: int = 448) -> Plan:
        """`runs` questions of each kind, and a third as many rounds."""
        first = [Question.new(side) for _ in range(runs)]
        rounds = max(1, runs // 3)
        return cls(
            [Question.new(side) for _ in range(2)],
            first,
            [question.about_the_same() for question in first],
            [Question.new(side) for _ in range(runs)],
            {many: [[Question.new(side) for _ in range(many)] for _ in range(rounds)] for many in CONCURRENT},
        )

    @property
    def repeated_prompts(self) -> Sequence[Question]:
        """The very requests of `first`."""
        return self.first


def new_text(words: str = QUESTION) -> str:
    """The words behind a new mark, so that what caches prompts from their beginning knows nothing of it."""
    return f"{Mark.new()} {words}"


def new_picture(side: int = 448) -> bytes:
    """A picture that was never made, as a JPEG file."""
    return picture(Mark.new(), side)


def picture(mark: Mark, side: int = 448) -> bytes:
    """The picture of a mark as a JPEG file."""
    out = io.BytesIO()
    photograph(mark, side).save(out, "JPEG", quality=92)
    return out.getvalue()


def photograph(mark: Mark, side: int = 448) -> Image.Image:
    """A real photograph, cut differently from one mark to the next, with a few squares of noise that say the mark."""
    left, top = (mark.number * 7) % _MARGIN, (mark.number * 13) % _MARGIN
    cut = _astronaut().crop((left, top, left + _CUT, top + _CUT)).resize((side, side), Image.Resampling.LANCZOS)
    pixels = np.asarray(cut).copy()
    noise = np.random.default_rng((mark.run, mark.number)).integers(0, 256, (4, 4, 3), np.uint8)
    pixels[: 4 * _SIGN, : 4 * _SIGN] = noise.repeat(_SIGN, 0).repeat(_SIGN, 1)
    return Image.fromarray(pixels)


def renamed(file: bytes) -> bytes:
    """A JPEG file with a new mark in a comment: the same pixels, under a key that no cache has seen.

    The comment stands behind the two bytes with which every such file begins; its length counts itself (ITU-T T.81).
    """
    comment = str(Mark.new()).encode()
    return file[:2] + b"\xff\xfe" + (2 + len(comment)).to_bytes(2, "big") + comment + file[2:]


@functools.cache
def _astronaut() -> Image.Image:
    import skimage.data

    return Image.fromarray(skimage.data.astronaut())


def long_text(words: int) -> str:
    """A new text, whose first words nobody has seen, about so many words long."""
    return f"{new_text()} " + " ".join(f"word {number}" for number in range(words // 2))
