"""What a checkpoint's files say of its embeddings, and the numbers that are answered."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from common.checkpoints.checkpoint import Checkpoint
from common.errors import Internal, Unsupported
from llm_service.embedder import Embedder

MODULES = json.dumps(
    [{"type": "sentence_transformers.models.Transformer", "path": ""}, {"type": "x.Pooling", "path": "1_Pooling"}]
).encode()


@pytest.mark.parametrize(
    ("modules", "pooling"),
    [
        (b"\xff", b"{}"),
        (b"{", b"{}"),
        (b"null", b"{}"),
        (b'[{"type": "x.Transformer"}]', b"{}"),
        (MODULES, b"{"),
        (MODULES, b"\xff"),
        (MODULES, b"[]"),
        (MODULES, b"{}"),
        (MODULES, b'{"pooling_mode": ["mean", "cls"]}'),
    ],
)
def test_files_that_cannot_be_read_cost_a_service_its_embeddings_alone(
    tmp_path: Path, modules: bytes, pooling: bytes
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "modules.json").write_bytes(modules)
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_bytes(pooling)
    made = Embedder.of(Checkpoint(tmp_path), 8)
    assert made.why_not
    with pytest.raises(Unsupported, match="not served"):
        made.check(None)


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_a_vector_that_is_not_finite_is_no_answer(number: float, *, normalized: bool) -> None:
    embedder, pooled = Embedder(3, normalized=normalized), np.array([3.0, 4.0, number], np.float32).tobytes()
    with pytest.raises(Internal) as error:
        embedder.vector(pooled)
    assert error.value.reason == "EMBEDDING_NOT_FINITE"
    assert embedder.vector(pooled, 2).tolist() == pytest.approx([0.6, 0.8] if normalized else [3.0, 4.0])


def test_a_vector_of_zeros_stays_one() -> None:
    assert Embedder(2).vector(bytes(8)).tolist() == [0.0, 0.0]
