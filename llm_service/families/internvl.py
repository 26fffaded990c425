"""InternVL: a picture's rows between two marks, and a video's a frame at a time; its text is of a family of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from common.media.encoder_digest import INTERNVL_PARTS, INTERNVL_TEXTS
from common.media.item import Header, Modality
from llm_service.families.family import CheckpointNames, Family, InPrompt, Rows, SpecialToken

_START, _END, _ROW = "start_image_token", "end_image_token", "image_token_id"
_MARKS: Final = (_START, _END, _ROW)


def _picture(header: Header) -> Iterator[str | SpecialToken | Rows]:
    yield from (SpecialToken(_START), Rows(header.all_rows), SpecialToken(_END))


def _frames(header: Header) -> Iterator[str | SpecialToken | Rows]:
    """Each frame on a line with its number; their rows are like those of pictures."""
    for number in range(1, header.grid.t + 1):
        yield f"{'' if number == 1 else chr(10)}Frame{number}: "
        yield from (SpecialToken(_START), Rows(header.all_rows // header.grid.t, _ROW), SpecialToken(_END))


INTERNVL = Family(
    {
        Modality.IMAGE: InPrompt(_ROW, _picture, marks=_MARKS, counted=True),
        Modality.VIDEO: InPrompt("video_token", _frames, marks=_MARKS, counted=True),
    },
    encoder=INTERNVL_PARTS,
    checkpoint=CheckpointNames(text_defaults={"tie_word_embeddings": True}),
    texts=INTERNVL_TEXTS,
)
