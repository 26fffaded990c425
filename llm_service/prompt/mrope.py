"""Positions of prompt tokens in time, height and width (multimodal rotary positions). They belong to the prompt and not
to the layers that turn them into rotary tables: the front computes them once, when the prompt is laid out, and gives
them to the engine as numbers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.errors import DataLoss
from common.media import kept_rows
from common.media.item import MAX_POSITION, Header, Modality
from llm_service.families.family import Family, InPrompt
from llm_service.families.registry import family_of
from llm_service.request import MediaRun, Span


@dataclass(frozen=True, slots=True)
class MediaLayout:
    """How a model lays media out in a prompt: a row covers `merge` × `merge` patches; `modalities`,
    `layout_from_encoder` and `pinned` as in its family; `tokens_per_second` for modalities whose time counts
    seconds."""

    merge: int
    modalities: Mapping[Modality, InPrompt]
    tokens_per_second: float
    layout_from_encoder: bool = False
    pinned: Collection[int] = ()

    @classmethod
    def of(cls, config: dict[str, Any], family: Family | None = None) -> MediaLayout:
        """Reads config.json, for its own family unless one is given. Raises CheckpointError if that family is not
        served."""
        family = family or family_of(config)
        encoder = config.get(family.encoder.section, {})
        return cls(
            merge=1 if family.prompt.layout_from_encoder else int(encoder.get("spatial_merge_size", 2)),
            modalities=family.modalities,
            tokens_per_second=float(encoder.get("tokens_per_second", 4)),
            layout_from_encoder=family.prompt.layout_from_encoder,
            pinned=family.prompt.pinned_tokens,
        )


def positions(ids: Sequence[int], spans: Sequence[Span], layout: MediaLayout) -> tuple[np.ndarray, int]:
    """int32 [3, n] of a prompt's tokens, and the mrope_delta that turns a later token's index into its position, as
    transformers' `get_rope_index` has it: text counts on in all three; a run of rows that starts at p has time p + t,
    height p + row, width p + column over its merged grid, and what follows goes on at p + max(rows, columns). Where
    rows are pruned, those that are kept and what follows stand where they would without.

    >>> from common.media.item import Grid, Modality
    >>> grid = Header(b"", Modality.IMAGE, Grid(1, 4, 4), 4)
    >>> layout = MediaLayout(2, {Modality.IMAGE: InPrompt("image_token_id")}, 0.0)
    >>> positions(range(7), [Span(0, grid, (MediaRun(2, 0, 4),))], layout)[0].tolist()
    [[0, 1, 2, 2, 2, 2, 4], [0, 1, 2, 2, 3, 3, 4], [0, 1, 2, 3, 2, 3, 4]]
    """
    if layout.layout_from_encoder:
        return _told_positions(ids, spans, layout.pinned)
    length = len(ids)
    out = np.empty((3, length), np.int32)
    at, position = 0, 0
    runs = sorted((each for span in spans for each in _runs(span)), key=lambda each: each[0].begin)
    for run, header, kept in runs:
        text = run.begin - at
        out[:, at : run.begin] = np.arange(position, position + text)
        position += text
        if layout.modalities[header.modality].counted:
            rows = run.grid_rows or run.count
            out[:, run.begin : run.end] = np.arange(position, position + rows)[kept]
            position += rows
        else:
            block = _grid_positions(run.grid_rows or run.count, header, layout)[:, kept]
            out[:, run.begin : run.end] = position + block
            position += max(header.grid.h, header.grid.w) // layout.merge
        at = run.end
    out[:, at:] = np.arange(position, position + length - at)
    return out, int(out.max(initial=-1)) + 1 - length


def _told_positions(ids: Sequence[int], spans: Sequence[Span], pinned: Collection[int]) -> tuple[np.ndarray, int]:
    """The same, if encoders state positions; text, and rows without stated positions, count on. Tokens `pinned` to the
    item right before them stay at the time of its last token. Raises DataLoss if an encoder gives positions to more
    tokens of a text than there are, or the model's prompts have none."""
    length = len(ids)
    out = np.tile(np.arange(length, dtype=np.int64), (3, 1))
    at, moved = 0, 0  # how far a token is from its index
    for before, span in enumerate(sorted(spans, key=lambda span: span.begin)):
        parts = [part for part in span.header.replacement if part.has_run]
        for run, part in zip(span.runs, parts, strict=True):
            block = np.frombuffer(part.positions, "<i4").reshape(3, -1)
            end = run.end
            begin = end - (block.shape[1] or run.count)
            if begin < at:
                raise DataLoss("an encoder placed more tokens than a prompt has")
            out[:, at:begin] += moved
            if part.positions:
                out[:, begin:end] = block if part.from_origin else np.maximum(begin + moved + block, 0)
                out[2, begin:end] += before * part.from_origin
            else:
                out[:, begin:end] += moved
            if part.positions or not part.rows:
                moved += part.advance - (end - begin)
            at = end
        while at < length and ids[at] in pinned:
            out[:, at] = out[0, at - 1]
            at, moved = at + 1, moved - 1
    out[:, at:] += moved
    if out.min(initial=0) < 0 or out.max(initial=0) > length + MAX_POSITION:
        raise DataLoss("an encoder placed tokens before a prompt, or far after it")
    return out.astype(np.int32), int(out.max(initial=-1)) + 1 - length


def _runs(span: Span) -> Iterator[tuple[MediaRun, Header, slice | np.ndarray]]:
    """Each run, and which rows of its grid it has, bool [grid_rows]; all rows unless some are pruned."""
    header, at = span.header, 0
    kept = kept_rows.unpack(header.kept_rows, header.grid_rows) if header.grid_rows else None
    for run in span.runs:
        yield run, header, slice(None) if kept is None else kept[at : at + run.grid_rows]
        at += run.grid_rows


def _grid_positions(rows: int, header: Header, layout: MediaLayout) -> np.ndarray:
    """int32 [3, rows] of whole frame groups, relative to the position where their run begins."""
    height, width = header.grid.h // layout.merge, header.grid.w // layout.merge
    time = np.arange(rows // (height * width), dtype=np.int32)
    if layout.modalities[header.modality].timed_frames:
        # transformers multiplies in float32 and truncates, which decides the last bit of some positions.
        interval = np.float32(layout.tokens_per_second) * np.float32(header.seconds_per_grid)
        time = (time.astype(np.float32) * interval).astype(np.int32)
    grid = np.meshgrid(time, np.arange(height), np.arange(width), indexing="ij")
    return np.stack(grid).reshape(3, -1).astype(np.int32)
