"""The library's processor of a checkpoint, for one item at a time: what stands for it in a prompt, and what its tower
takes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from common.library_models import (
    Clip,
    Sound,
    base_of,
    check,
    config_of,
    frames_of,
    longest_sound,
    marks_around,
    placeholder_of,
    processor_of,
    replaced,
    rope_positions,
    row_tokens,
)
from common.media.item import PromptPart

_OF_THE_TEXT = frozenset({"attention_mask", "token_type_ids", "mm_token_type_ids"})


Shown = np.ndarray | Clip | Sound
"""A picture [height, width, 3] uint8, a video's frames, or a sound."""


class ItemProcessor:
    """What the library raises for an item is a ValueError."""

    def __init__(self, folder: Path) -> None:
        self._processor = processor_of(folder)
        self._config = config_of(folder)
        check(self._config)
        base = base_of(self._config)
        self._base = base if hasattr(base, "get_rope_index") else None

    def frames(self, total: int, fps: float) -> list[int]:
        """The numbers of the frames that are taken of a video."""
        with self._as_value_errors():
            return frames_of(self._processor, total, fps)

    def replacement(self, shown: Shown) -> tuple[PromptPart, ...]:
        """What stands in a prompt for an item; it follows from its sizes and times alone."""
        with self._as_value_errors():
            if isinstance(shown, Sound) and 0 < self._longest < len(shown.samples):
                raise ValueError("the processor does not take all of so long a sound")
            text = replaced(self._processor, _kind(shown), _given(shown))
        tokens = row_tokens(self._config, self._processor, _kind(shown), text)
        parts = prompt_parts(text, tokens)
        return parts if self._base is None else self._placed(parts, self._base, shown, next(iter(tokens.values())))

    @cached_property
    def _longest(self) -> int:
        return longest_sound(self._processor)

    def _placed(self, parts: tuple[PromptPart, ...], base: Any, shown: Shown, token: int) -> tuple[PromptPart, ...]:
        """With the positions of rows, as the model has them in a prompt with a text before the item and one behind."""
        text = placeholder_of(self._processor, _kind(shown)).join(marks_around(self._processor, _kind(shown)))
        text = f"a{text}b"
        made = self._call(shown, text, return_tensors="pt", return_mm_token_type_ids=True)
        if isinstance(shown, Clip):  # some tell a video's rows from a picture's by marks that a chat has around it
            made = {**made, "mm_token_type_ids": 2 * (made["input_ids"] == token).long()}
        ids, places = made["input_ids"][0].tolist(), rope_positions(base, made).numpy()
        placed, at = list[PromptPart](), 0
        for part in parts:
            if not part.rows:
                placed.append(part)
                continue
            at = ids.index(token, at)
            run, begin = places[:, at : at + part.rows], int(places[:, at - 1].max()) + 1
            at += part.rows
            positions = (run - begin).astype("<i4").tobytes()
            placed.append(replace(part, positions=positions, advance=int(places[0, at]) - begin))
        _check(placed, np.array(ids), places, token)
        return tuple(placed)

    def inputs(self, shown: Shown) -> dict[str, Any]:
        """Named tensors, and lists of counts, of which the tower takes those that it knows; `input_ids` are those of
        what stands in a prompt."""
        made: Mapping[str, Any] = self._call(shown, return_tensors="pt")
        return {name: value for name, value in made.items() if name not in _OF_THE_TEXT}

    def _call(self, shown: Shown, text: str = "", **options: Any) -> Mapping[str, Any]:
        text = text or placeholder_of(self._processor, _kind(shown))
        with self._as_value_errors():
            made: Mapping[str, Any] = self._processor(text=[text], **_given(shown), **options)
        return made

    @contextmanager
    def _as_value_errors(self) -> Iterator[None]:
        try:
            yield
        except (TypeError, AttributeError, KeyError, IndexError, RuntimeError, ZeroDivisionError) as error:
            raise ValueError(f"{type(self._processor).__name__}: {type(error).__name__}: {error}") from error


def _kind(shown: Shown) -> str:
    return "image" if isinstance(shown, np.ndarray) else "video" if isinstance(shown, Clip) else "audio"


def _given(shown: Shown) -> dict[str, Any]:
    return {"images": [Image.fromarray(shown)]} if isinstance(shown, np.ndarray) else shown.given()


def _check(parts: list[PromptPart], ids: np.ndarray, places: np.ndarray, token: int) -> None:
    """Raises ValueError unless tokens that take no rows count on, which is all that a prompt's layout can do."""
    runs, position = iter([part for part in parts if part.rows]), 0
    at = 0
    while at < len(ids):
        if ids[at] == token:
            part = next(runs)
            at, position = at + part.rows, position + part.advance
            continue
        if set(places[:, at].tolist()) != {position}:
            raise ValueError("marks between rows have positions of their own")
        at, position = at + 1, position + 1


def prompt_parts(text: str, tokens: Mapping[str, int]) -> tuple[PromptPart, ...]:
    """A text cut at the runs of tokens, each by its name.

    >>> parts = prompt_parts("<a><i><i>, <i><b>", {"<i>": 7})
    >>> [(part.text, part.rows, part.token) for part in parts]
    [('<a>', 2, 7), (', ', 1, 7), ('<b>', 0, 0)]
    """
    parts, before = list[PromptPart](), ""
    names = re.compile(f"({'|'.join(map(re.escape, tokens))})")
    pieces = [piece for piece in names.split(text) if piece]
    for name, run in groupby(pieces, key=lambda piece: piece if piece in tokens else ""):
        if name:
            parts.append(PromptPart(before, len(list(run)), tokens[name]))
            before = ""
        else:
            before = "".join(run)
    return (*parts, PromptPart(before)) if before else tuple(parts)
