"""The families that are served."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from common.checkpoints.checkpoint import CheckpointError
from llm_service.families.apertus import APERTUS_TEXT
from llm_service.families.chameleon import CHAMELEON_TEXT
from llm_service.families.cohere2 import COHERE2_TEXT, COHERE_COMPASS_TEXT
from llm_service.families.deepseek import DEEPSEEK_V3_TEXT, DOTS3_TEXT, MISTRAL4_TEXT, MISTRAL_LARGE4_TEXT
from llm_service.families.deepseek_ocr import DEEPSEEK_OCR2_TEXT, UNLIMITED_OCR_TEXT
from llm_service.families.ernie import ERNIE_TEXT
from llm_service.families.exaone4 import EXAONE4_TEXT
from llm_service.families.family import (
    WINDOWED,
    AttentionRules,
    CheckpointNames,
    Family,
    Mixer,
    MlpRules,
    MoeRules,
    QkNorm,
    RopeRules,
)
from llm_service.families.gemma3 import GEMMA2_TEXT, GEMMA3_TEXT, GEMMA_TEXT
from llm_service.families.gemma4 import GEMMA3N_TEXT, GEMMA4_TEXT, GEMMA4_UNIFIED_TEXT
from llm_service.families.glm4v import GLM4V_MOE_TEXT, GLM4V_TEXT, GLM_OCR_TEXT
from llm_service.families.glm5 import GLM5_TEXT
from llm_service.families.granite import GRANITE_TEXT, HYPERCLOVAX_TEXT
from llm_service.families.hunyuan import HUNYUAN4_TEXT, HUNYUAN_TEXT
from llm_service.families.internvl import INTERNVL
from llm_service.families.lfm import LFM2, LFM3
from llm_service.families.llama4 import LLAMA4_TEXT
from llm_service.families.muse import MUSE_GLIMMER_TEXT, MUSE_SPARK_TEXT
from llm_service.families.nemotron_h import NEMOTRON_H
from llm_service.families.opt import OPT_TEXT
from llm_service.families.phi import PHI_TEXT
from llm_service.families.qwen2_audio import QWEN2_AUDIO
from llm_service.families.qwen2_vl import QWEN2_5_VL, QWEN2_VL
from llm_service.families.qwen3_5 import QWEN3_5
from llm_service.families.qwen3_vl import QWEN3_VL
from llm_service.families.qwen4 import QWEN4
from llm_service.families.step3 import MINIMAX_M3_TEXT, STEP3_TEXT

FAMILIES: Final = {
    "qwen2_vl": QWEN2_VL,
    "qwen2_5_vl": QWEN2_5_VL,
    "qwen3_vl": QWEN3_VL,
    "qwen3_vl_moe": QWEN3_VL,
    "qwen3_5": QWEN3_5,
    "qwen3_5_moe": QWEN3_5,
    "qwen4_exp": QWEN4,
    "qwen2_audio": QWEN2_AUDIO,
    "internvl": INTERNVL,
}
"""By `model_type` in config.json, as in the encoder service."""

TEXT_FAMILIES: Final = {
    "apertus1p5_text": APERTUS_TEXT,
    "aria_text": Family(
        {},
        moe=MoeRules(inputs_first=True, ungated_shared=True),
        checkpoint=CheckpointNames(part_names={"mlp.router": "mlp.gate"}),
    ),
    "chameleon": CHAMELEON_TEXT,
    "cohere2": COHERE2_TEXT,
    "cohere_compass_text": COHERE_COMPASS_TEXT,
    "cosmos3_edge_text": Family(
        {},
        rope=RopeRules(mrope_interleaved=True),
        mlp=MlpRules(ungated=True),
        checkpoint=CheckpointNames(
            text_defaults={"hidden_act": "relu2"}, part_names={"mlp.fc1": "mlp.up_proj", "mlp.fc2": "mlp.down_proj"}
        ),
    ),
    "deepseek_ocr2_text": DEEPSEEK_OCR2_TEXT,
    "deepseek_v3": DEEPSEEK_V3_TEXT,
    "dots3_note_text": DOTS3_TEXT,
    "emu3_text_model": Family({}),
    "ernie4_5_vl_moe_text": ERNIE_TEXT,
    "exaone4": EXAONE4_TEXT,
    "gemma": GEMMA_TEXT,
    "gemma2": GEMMA2_TEXT,
    "gemma3_text": GEMMA3_TEXT,
    "gemma3n_text": GEMMA3N_TEXT,
    "gemma4_text": GEMMA4_TEXT,
    "gemma4_unified_text": GEMMA4_UNIFIED_TEXT,
    "glm4v_moe_text": GLM4V_MOE_TEXT,
    "glm4v_text": GLM4V_TEXT,
    "glm5_next_text": GLM5_TEXT,
    "glm_ocr_text": GLM_OCR_TEXT,
    "granite": GRANITE_TEXT,
    "granite4_vision_text": GRANITE_TEXT,
    "granite_docling_text": GRANITE_TEXT,
    "hunyuan_vl_text": HUNYUAN_TEXT,
    "hy_v4_vl_text": HUNYUAN4_TEXT,
    "hyperclovax": HYPERCLOVAX_TEXT,
    "lfm2": LFM2,
    "lfm3": LFM3,
    "llama": Family({}),
    "llama4_text": LLAMA4_TEXT,
    "minimax_m3_vl_text": MINIMAX_M3_TEXT,
    "ministral3": Family(
        {},
        checkpoint=CheckpointNames(text_defaults={"use_sliding_window": True, "sliding_window": None}),
        mixers=dict.fromkeys(WINDOWED, Mixer.TEMPERED_ATTENTION),
    ),
    "mistral": Family({}, checkpoint=CheckpointNames(text_defaults={"use_sliding_window": True}), mixers=WINDOWED),
    "mistral4": MISTRAL4_TEXT,
    "mistral_large4_text": MISTRAL_LARGE4_TEXT,
    "molmo2_text": Family({}, attention=AttentionRules(qk_norm=QkNorm())),
    "muse_glimmer_text": MUSE_GLIMMER_TEXT,
    "muse_spark_text": MUSE_SPARK_TEXT,
    "nemotron_h": NEMOTRON_H,
    "opt": OPT_TEXT,
    "paddleocr_vl_text": Family({}),
    "phi3": PHI_TEXT,
    "phi4_multimodal": PHI_TEXT,
    "qwen2": Family({}, attention=AttentionRules(bias=True)),
    "qwen2_5_omni_text": QWEN2_5_VL,
    "qwen3": Family({}, attention=AttentionRules(qk_norm=QkNorm())),
    "qwen3_5_text": QWEN3_5,
    "qwen3_moe": Family(
        {},
        attention=AttentionRules(qk_norm=QkNorm()),
        checkpoint=CheckpointNames(text_defaults={"norm_topk_prob": False}),
    ),
    "qwen3_omni_moe_text": QWEN3_VL,
    "qwen3_vl_moe_text": QWEN3_VL,
    "qwen3_vl_text": QWEN3_VL,
    "qwen4_exp_text": QWEN4,
    "step3p5": STEP3_TEXT,
    "unlimited_ocr_text": UNLIMITED_OCR_TEXT,
}
"""By a text's `model_type`: of models without media that propose drafts, of families combined with several texts, and
of models without a family whose text our decoder computes while transformers computes the rest."""


def check_text(kind: str) -> None:
    """Raises CheckpointError unless our decoder computes texts of this `model_type`."""
    if kind not in TEXT_FAMILIES:
        raise CheckpointError(f"our decoder knows no {kind}")


def find_family(config: Mapping[str, Any]) -> Family | None:
    """The family of a config.json with media, combined with that of its text; None if either is missing."""
    family = FAMILIES.get(config.get("model_type", "?"))
    if family is None or not family.texts:
        return family
    kind = (config.get("text_config") or {}).get("model_type", "?")
    if kind not in family.texts:
        return None
    text = TEXT_FAMILIES[kind]
    return replace(
        family, attention=replace(family.attention, bias=text.attention.bias, qk_norm=text.attention.qk_norm)
    )


def family_of(config: Mapping[str, Any]) -> Family:
    """The same, or the family of a text alone. Raises CheckpointError, which lists the known ones, if there is none."""
    model_type = config.get("model_type", "?")
    family = find_family(config) or TEXT_FAMILIES.get(model_type)
    if family is None:
        raise CheckpointError(f"{model_type} is not supported; these are: {', '.join(FAMILIES)}")
    return family
