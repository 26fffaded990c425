"""The digest of what computes rows."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.metadata import version
from typing import Final

from common.checkpoints.checkpoint import Checkpoint
from common.hash_fields import canonical, framed
from common.rows.wire import DType

SCHEMA: Final = b"twinlens/1"
"""Changes whenever rows or keys of one release would not fit another's."""

_SAMPLE = 4096


@dataclass(frozen=True, slots=True)
class EncoderParts:
    """What computes rows: tensors of a checkpoint, by their prefixes, a section of config.json, whole files, further
    `fields` of config.json, and a package whose version matters.

    Both services must state the same for a family, or their digests differ.
    """

    tensors: tuple[str, ...]
    section: str
    files: tuple[str, ...]
    package: str = ""
    fields: tuple[str, ...] = ()


VISION: Final = EncoderParts(
    tensors=("visual.", "model.visual."),
    section="vision_config",
    files=("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"),
)
"""Of towers for pictures, as Qwen has them: the default of a family."""


QWEN2_AUDIO_PARTS: Final = EncoderParts(
    tensors=tuple(f"{where}{part}." for where in ("", "model.") for part in ("audio_tower", "multi_modal_projector")),
    section="audio_config",
    files=("preprocessor_config.json", "processor_config.json"),
)
"""Of Qwen2-Audio."""

INTERNVL_PARTS: Final = EncoderParts(
    tensors=tuple(f"{where}{part}." for where in ("", "model.") for part in ("vision_tower", "multi_modal_projector")),
    section="vision_config",
    files=VISION.files,
    fields=("downsample_ratio", "projector_hidden_act", "vision_feature_layer", "vision_feature_select_strategy"),
)
"""Of InternVL."""

INTERNVL_TEXTS: Final = frozenset({"llama", "qwen2", "qwen3"})
"""The `model_type`s of text with which InternVL is a family of ours, in both services; with others transformers
computes all of it."""


def encoder_digest(checkpoint: Checkpoint, dtype: DType, parts: EncoderParts) -> str:
    """Identifies what an encoder computes: its weights, settings, processors, dtype and schema.

    It covers each tensor's name, type, shape, and first and last 4 KiB: megabytes of reading instead of gigabytes, and
    still different for two fine-tunes. Both services compute it from their own checkpoint.
    """
    digest = hashlib.sha256(framed(SCHEMA, dtype.value.encode()))
    digest.update(framed(canonical(checkpoint.config.get(parts.section, {}))))
    digest.update(framed(*(canonical(checkpoint.json(name)) for name in parts.files)))
    if parts.fields:
        digest.update(framed(*(canonical(checkpoint.config.get(name)) for name in parts.fields)))
    if parts.package:
        digest.update(framed(parts.package.encode(), version(parts.package).encode()))
    _add_tensors(digest, checkpoint, parts.tensors)
    return digest.hexdigest()


def tensors_digest(checkpoint: Checkpoint) -> bytes:
    """Identifies all weights of a checkpoint, by as much of each tensor as `encoder_digest` takes."""
    digest = hashlib.sha256()
    _add_tensors(digest, checkpoint, ("",))
    return digest.digest()


def _add_tensors(digest: hashlib._Hash, checkpoint: Checkpoint, prefixes: tuple[str, ...]) -> None:
    for name, info in sorted(checkpoint.part(prefixes).tensors.items()):
        if not name.startswith(prefixes):
            continue
        with info.file.open("rb") as file:
            file.seek(info.begin)
            head = file.read(min(_SAMPLE, info.end - info.begin))
            file.seek(max(info.begin, info.end - _SAMPLE))
            tail = file.read(min(_SAMPLE, info.end - info.begin))
        digest.update(framed(name.encode(), info.dtype.encode(), canonical(info.shape), head, tail))
