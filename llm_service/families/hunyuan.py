"""HunyuanOCR's text: places on four axes, heads that are normed once they are rotated."""

from __future__ import annotations

from llm_service.families.family import FULL, Family, Mixer

HUNYUAN_TEXT = Family(
    {},
    qk_norm=True,
    mixers={FULL: Mixer.LATE_NORMED_ATTENTION},
    text_defaults={"rms_norm_eps": 1e-5},
    part_names={"query_layernorm": "q_norm", "key_layernorm": "k_norm"},
)
