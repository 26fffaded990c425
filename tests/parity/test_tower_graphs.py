"""Graphs of transformers' towers whose host looks at grids, masks or pictures, replayed on the CPU with others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.models.graphs import Again, graphs_of
from tools.models.tiny import make

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of transformers' processors
soak = pytest.mark.soak


@pytest.mark.parametrize(
    ("kind", "looks"),
    [
        ("mistral3", []),  # Pixtral's grids
        ("idefics3", ["aten::index"]),  # which drops pictures that are empty
        pytest.param("glm4v", [], marks=soak),
        pytest.param("kimi_k25", [], marks=soak),
        pytest.param("gemma4", [], marks=soak),
        pytest.param("phi4_multimodal", ["aten::_local_scalar_dense"], marks=soak),
    ],
)
def test_replays_of_other_pictures_are_passes_to_the_bit(kind: str, looks: list[str], tmp_path: Path) -> None:
    assert graphs_of(make(kind, tmp_path), Again()) == ("", looks)
