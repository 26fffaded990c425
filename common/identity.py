"""The digest of a vision tower, and how fields are put together to be hashed."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final

from common.checkpoint import Checkpoint
from common.wire import DType

SCHEMA: Final = b"twinlens/1"
"""Changes whenever rows or keys of one release would not fit another's."""

VISION_PREFIXES: Final = ("visual.", "model.visual.")
"""How vision tensors are named in checkpoints."""

PROCESSOR_FILES: Final = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")

_SAMPLE = 4096


def framed(*fields: bytes) -> bytes:
    """Fields joined so that they can be told apart: each after its length."""
    return b"".join(len(field).to_bytes(8, "little") + field for field in fields)


def canonical(value: Any) -> bytes:
    """JSON with sorted keys and no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def vision_digest(checkpoint: Checkpoint, dtype: DType) -> str:
    """Identifies what an encoder computes: vision weights, vision and processor settings, dtype and schema.

    Of each vision tensor it takes the name, type, shape, and its first and last 4 KiB, so that it costs megabytes of
    reading, not gigabytes, and still tells two fine-tunes apart. Both services compute it from their own checkpoint.
    """
    digest = hashlib.sha256(framed(SCHEMA, dtype.value.encode()))
    digest.update(framed(canonical(checkpoint.config.get("vision_config", {}))))
    digest.update(framed(*(canonical(checkpoint.json(name)) for name in PROCESSOR_FILES)))
    for name, info in sorted(checkpoint.tensors.items()):
        if not name.startswith(VISION_PREFIXES):
            continue
        with info.file.open("rb") as file:
            file.seek(info.begin)
            head = file.read(min(_SAMPLE, info.end - info.begin))
            file.seek(max(info.begin, info.end - _SAMPLE))
            tail = file.read(min(_SAMPLE, info.end - info.begin))
        digest.update(framed(name.encode(), info.dtype.encode(), canonical(info.shape), head, tail))
    return digest.hexdigest()
