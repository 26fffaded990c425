"""Who is who: the digest of a vision tower, and the content key of an item.

Everything that can change a row is part of the key; every field is framed by its length, so that no two different
lists of fields run together into the same bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any, Final

from common.checkpoint import Checkpoint
from common.wire import DType

SCHEMA: Final = b"twinlens/1"
"""Changes whenever rows or keys of one release would not fit another's."""

VISION_PREFIXES: Final = ("visual.", "model.visual.")
"""How vision tensors are named in checkpoints."""

PROCESSOR_FILES: Final = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")

MOST_TIMES: Final = 16_384
"""Times of one item at most. They are part of its key, and a message holds millions, which would take seconds."""

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


def about_pixels(frames: int, height: int, width: int, seconds: Sequence[float]) -> dict[str, Any]:
    """What the key of decoded pixels covers besides their bytes: the shape, and the time of each frame."""
    return {"pixels": [frames, height, width], "seconds": list(seconds)}


def about_rows(
    grid: tuple[int, int, int], shape: tuple[int, int, int], dtype: str, seconds: Sequence[float], apart: float
) -> dict[str, Any]:
    """What the key of ready-made rows covers besides their bytes: the grid (t, h, w), the block's shape (count, levels,
    width) and element type, and a video's times. So a block that contradicts itself never has the key of a good one."""
    return {"rows": list(grid), "shape": [*shape, dtype], "seconds": list(seconds), "apart": apart}


def content_key(
    digest: str, modality: str, options: dict[str, Any], salt: str, content: Iterable[bytes | memoryview]
) -> bytes:
    """The key of an item: SHA-256, 32 bytes.

    `digest` is the tower's, `options` the item's own (unset ones left out), `content` the encoded bytes, in any number
    of pieces. Hashing megabytes takes milliseconds: call it off the event loop.
    """
    key = hashlib.sha256(framed(SCHEMA, digest.encode(), modality.encode(), canonical(options), salt.encode()))
    for piece in content:
        key.update(piece)
    return key.digest()
