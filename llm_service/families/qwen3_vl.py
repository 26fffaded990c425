"""Qwen3-VL, dense or a mixture of experts: query and key heads are normed; a video's frame groups stand apart."""

from __future__ import annotations

from collections.abc import Iterator

from common.media.item import Header, Modality
from llm_service.families.family import AttentionRules, Family, InPrompt, QkNorm, RopeRules, Rows, SpecialToken

_START, _END = "vision_start_token_id", "vision_end_token_id"


def _frames_apart(header: Header) -> Iterator[str | SpecialToken | Rows]:
    """For each frame group its time, and its rows between marks. The marks that the template puts around the video's
    placeholder stay, as transformers has it since 5.17 (before, it took them out)."""
    for seconds in header.timestamps:
        yield from (
            f"<{seconds:.1f} seconds>",
            SpecialToken(_START),
            Rows(header.all_rows // header.grid.t),
            SpecialToken(_END),
        )


MODALITIES = {
    Modality.IMAGE: InPrompt("image_token_id"),
    Modality.VIDEO: InPrompt("video_token_id", expand=_frames_apart, marks=(_START, _END)),
}
QWEN3_VL = Family(MODALITIES, attention=AttentionRules(qk_norm=QkNorm()), rope=RopeRules(mrope_interleaved=True))
