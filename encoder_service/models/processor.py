"""transformers' processor of a checkpoint, for one item at a time: how it is laid out in a prompt, and its tower's
inputs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from common.hf.classes import config_of
from common.hf.models import checked
from common.hf.positions import rope_positions
from common.hf.processors import (
    Clip,
    Sound,
    frames_of,
    longest_sound,
    marks_around,
    placeholder_of,
    processor_of,
    rate_of,
    replaced,
    wrapped,
)
from common.hf.rows import row_tokens
from common.media.item import PromptPart

_OF_THE_TEXT = frozenset({"attention_mask", "token_type_ids", "mm_token_type_ids"})


Shown = np.ndarray | Clip | Sound
"""A picture [height, width, 3] uint8, a video's frames, alone or with their sound, or a sound."""
Parts = tuple[PromptPart, ...]


class SoundLengthError(ValueError):
    """A sound is longer than the model hears at a time, or, unless `too_long`, shorter than a row."""

    def __init__(self, why: str, *, too_long: bool) -> None:
        super().__init__(why)
        self.too_long = too_long


class ItemProcessor:
    """Errors of transformers for an item become ValueError."""

    def __init__(self, folder: Path) -> None:
        self._processor = processor_of(folder)
        self._config = config_of(folder)
        base = checked(self._config).base_model
        self._base = base if hasattr(base, "get_rope_index") else None

    def frames(self, total: int, fps: float, asked: float = 0.0) -> list[int]:
        """The numbers of the frames taken of a video, at so many per second if stated."""
        with self._as_value_errors():
            return frames_of(self._processor, total, fps, asked)

    def replacement(self, shown: Shown) -> Parts:
        """The item's layout in a prompt, which depends only on sizes and times. Raises SoundLengthError for a sound
        that is too long or too short."""
        samples = None if isinstance(shown, np.ndarray) else shown.samples
        if samples is not None and 0 < self._longest < len(samples):
            raise SoundLengthError("the processor does not take all of so long a sound", too_long=True)
        try:
            return self._replacement(shown)
        except ValueError as error:
            if isinstance(shown, Clip) and samples is not None:
                self.replacement(Sound(samples))  # raises the other error if the sound itself is the cause
            elif samples is not None and len(samples) < rate_of(self._processor):
                # A second was taken when the model was looked at (`common.hf.rows.takes_sounds`).
                raise SoundLengthError("the processor has no row for so short a sound", too_long=False) from error
            raise

    def _replacement(self, shown: Shown) -> Parts:
        with self._as_value_errors():
            text = replaced(self._processor, _kind(shown), _given(shown))
        tokens = row_tokens(self._config, self._processor, _kind(shown), text)
        if isinstance(shown, Clip) and shown.samples is not None:
            tokens |= row_tokens(self._config, self._processor, "audio", text)
        parts = prompt_parts(text, tokens)
        return parts if self._base is None else self._placed(parts, self._base, shown, list(tokens.values()))

    def turns(self, parts: Sequence[PromptPart]) -> tuple[int, ...]:
        """Of a video with sound: how many rows of frames and of sound follow each other, in turns, frames first."""
        found = [0]
        for part in parts:
            if part.rows:
                is_sound = part.token == self._config.audio_token_id
                if is_sound == len(found) % 2:
                    found.append(0)
                found[-1] += part.rows
        return tuple(found)

    @cached_property
    def _longest(self) -> int:
        with self._as_value_errors():
            return longest_sound(self._processor)

    def _placed(self, parts: Parts, base: Any, shown: Shown, tokens: Sequence[int]) -> Parts:
        """Adds the positions of rows, as the model computes them in a prompt with text before and behind the item."""
        ids, places = self._found_places(base, shown, tokens, "a")
        pinned = from_origin(parts, ids, places, tokens)
        # A picture with one column may look like this at one position, but not behind another text.
        if pinned and pinned == from_origin(parts, *self._found_places(base, shown, tokens, "ab"), tokens):
            return pinned
        return placed_parts(parts, ids, places, tokens, self._ids)

    def _found_places(
        self, base: Any, shown: Shown, tokens: Sequence[int], before: str
    ) -> tuple[list[int], np.ndarray]:
        """The tokens of a prompt with text before and behind the item, and their positions, int [3, n]."""
        text = placeholder_of(self._processor, _kind(shown)).join(marks_around(self._processor, _kind(shown)))
        text = f"{before}{text}b"
        made = self._call(shown, text, return_tensors="pt", return_mm_token_type_ids=True)
        with_sound = isinstance(shown, Clip) and shown.samples is not None
        if isinstance(shown, Clip):  # some tell a video's rows from a picture's by marks that a chat has around it
            made = {**made, "mm_token_type_ids": 2 * (made["input_ids"] == tokens[0]).long()}
        with self._as_value_errors():
            places = rope_positions(base, made, sound_in_video=with_sound).numpy()
        return made["input_ids"][0].tolist(), places

    def _ids(self, text: str) -> list[int]:
        """The tokens of a text by itself."""
        found: list[int] = self._processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    def inputs(self, shown: Shown) -> dict[str, Any]:
        """Named tensors, and lists of counts, of which the tower takes those that it knows; `input_ids` are the item's
        tokens in a prompt."""
        made: Mapping[str, Any] = self._call(shown, return_tensors="pt")
        return {name: value for name, value in made.items() if name not in _OF_THE_TEXT}

    def _call(self, shown: Shown, text: str = "", **options: Any) -> Mapping[str, Any]:
        text = text or wrapped(self._processor, _kind(shown))
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


def from_origin(parts: Parts, ids: Sequence[int], places: np.ndarray, tokens: Sequence[int]) -> Parts:
    """The same parts of an item whose rows are placed wherever it stands in a prompt, but for marks at both ends of a
    run, which count on as text does; empty where it is not so. Arguments as those of `placed_parts`, which that is for.

    >>> ids, where = [1, 7, 7, 7, 7, 1], np.array([[0, 1, 0, 1, 4, 5], [0, 1, 0, 0, 4, 5], [0, 1, 0, 0, 4, 5]])
    >>> [(part.rows, part.from_origin) for part in from_origin((PromptPart("", 4, 7),), ids, where, [7])]
    [(1, False), (2, True), (1, False)]
    """
    apart = (places != np.arange(len(ids))).any(axis=0)
    pinned = apart & np.isin(ids, tokens)
    if not pinned.any() or (apart & ~pinned).any() or (places[0, pinned] >= np.flatnonzero(pinned)).any():
        return ()
    found, at = list[PromptPart](), 0
    for part in parts:
        if not part.rows:
            found.append(part)
            continue
        at = next(place for place in range(at, len(ids)) if ids[place] in tokens)
        text, end = part.text, at + part.rows
        for own, run in groupby(range(at, end), key=lambda place: bool(pinned[place])):
            here = list(run)
            where = places[:, here].astype("<i4").tobytes() if own else b""
            found.append(PromptPart(text, len(here), part.token, where, own * len(here), from_origin=own))
            text = ""
        at = end
    return tuple(found)


def placed_parts(
    parts: Parts, ids: Sequence[int], places: np.ndarray, tokens: Sequence[int], encode: Callable[[str], Sequence[int]]
) -> Parts:
    """The same parts with the positions of their rows, and of tokens of texts before these that do not count on, in a
    prompt with a text before the item and one behind: `ids` [n], at `places` int [3, n]; `tokens` are those that take
    rows, and `encode` gives a text's own.

    Other texts count on, which is all that a prompt's layout can do by itself. Raises ValueError where tokens that are
    no part of the item do not.

    >>> where, own = np.array([[0, 0, 1, 2, 2]] * 3), {"(": [2], ")": [3]}
    >>> parts = placed_parts((PromptPart("(", 1, 7), PromptPart(")")), [1, 2, 7, 3, 1], where, [7], own.__getitem__)
    >>> [(part.text, part.rows, len(part.positions), part.advance) for part in parts]
    [('(', 1, 24, 1), (')', 0, 0, -1)]
    """
    found, at, position = list[PromptPart](), 0, 0
    runs = [part for part in parts if part.rows]
    for part in runs:
        first = next(place for place in range(at, len(ids)) if ids[place] in tokens)
        begin = first - _own_places(ids[at:first], places[:, at:first] - position, encode(part.text))
        position += begin - at
        at = first + part.rows
        run = (places[:, begin:at] - position).astype("<i4").tobytes()
        advance = 0 if ids[at] in tokens else int(places[0, at]) - position
        found.append(replace(part, positions=run, advance=advance))
        position += advance
    tail = parts[len(runs) :]
    own = [token for part in tail for token in encode(part.text)]
    end = at + len(own) if list(ids[at : at + len(own)]) == own else at
    begin = end - _own_places(ids[at:end], places[:, at:end] - position, own)
    position += begin - at
    behind = int(places[0, end]) - position
    if (places[:, end:] != np.arange(len(ids) - end) + places[0, end]).any() or (end == at and behind):
        raise ValueError(_ASTRAY)
    if begin == end and not behind:
        return (*found, *tail)
    run = (places[:, begin:end] - position).astype("<i4").tobytes()
    return (*found, *(replace(part, positions=run, advance=behind) for part in tail))


_ASTRAY = "a text beside an item has positions of its own"


def _own_places(ids: Sequence[int], places: np.ndarray, own: Sequence[int]) -> int:
    """How many of a text's last tokens, from the first such on, are not where they would be if they counted on from 0,
    by positions int [3, n]. Raises ValueError if one of these is not the item's `own`."""
    off = (places != np.arange(len(ids))).any(axis=0)
    count = len(ids) - int(off.argmax()) if off.any() else 0
    if count and list(ids[-count:]) != list(own[-count:]):
        raise ValueError(_ASTRAY)
    return count


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
