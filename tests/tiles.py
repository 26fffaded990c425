"""Products of bfloat16 both by AMX's tiles and by AVX-512's vectors, which other processors have."""

from __future__ import annotations

import pytest

from common.hardware import multiplies_tiles
from llm_service.layers.cpu import selection

WAYS = TILES, VECTORS = "tiles", "vectors"


def multiply_by(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has products computed that way; skips where the processor has no tiles."""
    if way == VECTORS:
        monkeypatch.setattr(selection, "multiplies_tiles", lambda: False)
    elif not multiplies_tiles():
        pytest.skip("this processor lacks AMX")
