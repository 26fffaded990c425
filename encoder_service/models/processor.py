"""The library's processor of a checkpoint, for one item at a time: what stands for it in a prompt, and what its tower
takes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from common.checkpoint import CheckpointError
from common.library_models import base_of, config_of, processor_of, rope_positions
from common.media.item import PromptPart

_OF_THE_TEXT = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})


class ItemProcessor:
    """Pictures are [height, width, 3] uint8. What the library raises for one of them is a ValueError."""

    def __init__(self, folder: Path) -> None:
        self._processor = processor_of(folder)
        config, tokenizer = config_of(folder), self._processor.tokenizer
        token = getattr(config, "image_token_id", None)
        if token is None:
            raise CheckpointError(f"{config.model_type} does not state the token at whose places rows go")
        self._token = int(token)
        base = base_of(config)
        self._base = base if hasattr(base, "get_rope_index") else None
        self._mark = re.compile(f"({re.escape(tokenizer.convert_ids_to_tokens(self._token))})")

    def replacement(self, picture: np.ndarray) -> tuple[PromptPart, ...]:
        """What stands in a prompt for a picture; it follows from its size alone."""
        made = self._call(picture, return_text_replacement_offsets=True)
        (replaced,) = made["text_replacement_offsets"][0]
        parts = prompt_parts(replaced["replacement"], self._mark, self._token)
        return parts if self._base is None else self._placed(parts, self._base, picture)

    def _placed(self, parts: tuple[PromptPart, ...], base: Any, picture: np.ndarray) -> tuple[PromptPart, ...]:
        """With the positions of rows, as the model has them in a prompt with a text before the item and one behind."""
        text = f"a{self._processor.image_token}b"
        made = self._call(picture, text, return_tensors="pt", return_mm_token_type_ids=True)
        ids, places = made["input_ids"][0].tolist(), rope_positions(base, made).numpy()
        placed, at = list[PromptPart](), 0
        for part in parts:
            if not part.rows:
                placed.append(part)
                continue
            at = ids.index(self._token, at)
            run, begin = places[:, at : at + part.rows], int(places[:, at - 1].max()) + 1
            at += part.rows
            positions = (run - begin).astype("<i4").tobytes()
            placed.append(replace(part, positions=positions, advance=int(places[0, at]) - begin))
        self._check(placed, np.array(ids), places)
        return tuple(placed)

    def _check(self, parts: list[PromptPart], ids: np.ndarray, places: np.ndarray) -> None:
        """Raises ValueError unless tokens that take no rows count on, which is all that a prompt's layout can do."""
        runs, position = iter([part for part in parts if part.rows]), 0
        at = 0
        while at < len(ids):
            if ids[at] == self._token:
                part = next(runs)
                at, position = at + part.rows, position + part.advance
                continue
            if set(places[:, at].tolist()) != {position}:
                raise ValueError("marks between rows have positions of their own")
            at, position = at + 1, position + 1

    def inputs(self, picture: np.ndarray) -> dict[str, torch.Tensor]:
        """Named tensors, of which the tower takes those that it knows."""
        made: Mapping[str, Any] = self._call(picture, return_tensors="pt")
        return {
            name: value for name, value in made.items() if isinstance(value, torch.Tensor) and name not in _OF_THE_TEXT
        }

    def _call(self, picture: np.ndarray, text: str = "", **options: Any) -> Mapping[str, Any]:
        try:
            made: Mapping[str, Any] = self._processor(
                images=[Image.fromarray(picture)], text=[text or self._processor.image_token], **options
            )
        except (TypeError, KeyError, IndexError, RuntimeError, ZeroDivisionError) as error:
            raise ValueError(f"{type(self._processor).__name__}: {type(error).__name__}: {error}") from error
        return made


def prompt_parts(text: str, mark: re.Pattern[str], token: int) -> tuple[PromptPart, ...]:
    """A text cut at the runs of a mark, which the pattern has as its one group.

    >>> parts = prompt_parts("<a><i><i>, <i><b>", re.compile("(<i>)"), 7)
    >>> [(part.text, part.rows, part.token) for part in parts]
    [('<a>', 2, 7), (', ', 1, 7), ('<b>', 0, 0)]
    """
    parts, before = list[PromptPart](), ""
    pieces = [piece for piece in mark.split(text) if piece]
    for is_mark, run in groupby(pieces, key=lambda piece: mark.fullmatch(piece) is not None):
        if is_mark:
            parts.append(PromptPart(before, len(list(run)), token))
            before = ""
        else:
            before = "".join(run)
    return (*parts, PromptPart(before)) if before else tuple(parts)
