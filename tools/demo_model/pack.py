"""Samples for training: pictures as patches, and as many turns about them as fit into one sequence of fixed length.

A sequence is a *prefix* (role header and pictures) and several *branches*: each is a conversation of its own that sees
the prefix and itself, with positions that go on from the prefix, just as when it is asked alone. So one pass over a
picture teaches several answers. The samples of a batch share one picture size: no padding in the vision part.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tokenizers import Tokenizer

from tools.demo_model.turn import Turn

Array = NDArray[np.int64]
PAD_BRANCH = -1
IGNORED = -100


def patches(frames: list[Image.Image], height: int, width: int) -> NDArray[np.uint8]:
    """Frame pairs resized to (height, width), as patches [pairs, (height / 16) * (width / 16), 3 * 2 * 16 * 16].

    The order is the processor's: every 2 x 2 square of patches contiguous, a patch as (channel, time, row, column).
    """
    sized = [f if f.size == (width, height) else f.resize((width, height), Image.Resampling.BICUBIC) for f in frames]
    pixels = np.stack([np.asarray(f) for f in sized])
    x = pixels.reshape(len(frames) // 2, 2, height // 32, 2, 16, width // 32, 2, 16, 3)
    return x.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(len(frames) // 2, -1, 1536)


@dataclass(slots=True)
class Row:
    """One sequence under construction.

    `branch` is 0 in the prefix and k in the k-th conversation; `answers` are (kind, start, end).
    """

    length: int
    ids: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    branch: list[int] = field(default_factory=list)
    places: list[tuple[int, int, int]] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    answers: list[tuple[str, int, int]] = field(default_factory=list)
    next_place: int = 0
    prefix_place: int = 0
    branches: int = 0

    def text(self, ids: list[int], answer: bool = False) -> None:
        """Append tokens; those of an answer are learned."""
        self.ids += ids
        self.labels += ids if answer else [IGNORED] * len(ids)
        self.branch += [self.branches] * len(ids)
        self.places += [(p, p, p) for p in range(self.next_place, self.next_place + len(ids))]
        self.next_place += len(ids)

    def picture(self, token: int, rows: int, columns: int) -> None:
        """Append rows x columns placeholders: time stands still, height and width count from here."""
        here, number = self.next_place, rows * columns
        self.slots += range(len(self.ids), len(self.ids) + number)
        self.ids += [token] * number
        self.labels += [IGNORED] * number
        self.branch += [self.branches] * number
        self.places += [(here, here + r, here + c) for r in range(rows) for c in range(columns)]
        self.next_place += max(rows, columns)


class Packer:
    """Writes conversations with the ids of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.pad = self.special("<|endoftext|>")
        self.end = self.special("<|im_end|>")
        self.user = self.encode("<|im_start|>user\n")
        self.system = self.encode("<|im_start|>system\n")
        self.assistant = self.encode("<|im_end|>\n<|im_start|>assistant\n")
        self.close = self.encode("\n")
        self.cache: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text).ids)

    def special(self, token: str) -> int:
        found = self.tokenizer.token_to_id(token)
        if found is None:
            raise ValueError(f"the tokenizer has no {token}")
        return int(found)

    def words(self, text: str) -> list[int]:
        """Ids of a phrase; phrases repeat, so they are remembered."""
        if text not in self.cache:
            self.cache[text] = self.encode(text)
        return self.cache[text]

    def begin(
        self,
        length: int,
        grid: tuple[int, int] | None,
        pictures: int,
        stamps: list[str] | None,
        rule: str | None,
        early: str | None,
    ) -> Row:
        """The prefix: a system message, the user's header, a question that comes before its pictures, the pictures.

        grid is (rows, columns) of tokens of each picture; stamps are a film's time stamps, one for each picture.
        """
        row = Row(length)
        if rule is not None:
            row.text(self.system + self.words(rule) + [self.end] + self.close)
        row.text(self.user)
        if early is not None:
            row.text(self.words(early))
        for k in range(pictures):
            if grid is None:
                break
            if stamps is not None:
                row.text(self.encode(stamps[k]))
            row.text([self.special("<|vision_start|>")])
            row.picture(self.special("<|video_pad|>" if stamps is not None else "<|image_pad|>"), *grid)
            row.text([self.special("<|vision_end|>")])
        row.prefix_place = row.next_place
        return row

    def add(self, row: Row, turns: list[Turn], early: bool = False) -> bool:
        """Append one conversation as a branch, if it fits; `early` tells that its first question is in the prefix."""
        ids: list[tuple[list[int], str]] = []
        for k, turn in enumerate(turns):
            if k:
                ids.append((self.user, ""))
            if not (early and k == 0):
                ids.append((self.words(turn.question), ""))
            ids.append((self.assistant, ""))
            ids.append(([*self.words(turn.answer), self.end], turn.kind))
            if k + 1 < len(turns):
                ids.append((self.close, ""))
        if len(row.ids) + sum(len(part) for part, _ in ids) > row.length:
            return False
        row.branches += 1
        row.next_place = row.prefix_place
        for part, kind in ids:
            if kind:
                row.answers.append((kind, len(row.ids), len(row.ids) + len(part)))
            row.text(part, bool(kind))
        return True

    def finish(self, row: Row) -> dict[str, Array]:
        """Pad to the fixed length: ids, labels (shifted by one), branch [length] and places [3, length]."""
        lack = row.length - len(row.ids)
        labels = [*row.labels[1:], IGNORED, *[IGNORED] * lack]
        # A branch's first token follows the previous branch in the row, not in its own conversation.
        return {
            "ids": np.array(row.ids + [self.pad] * lack),
            "labels": np.array(labels),
            "branch": np.array(row.branch + [PAD_BRANCH] * lack),
            "places": np.array(row.places + [(0, 0, 0)] * lack).T,
            "slots": np.array(row.slots, dtype=np.int64),
        }
