"""Services that several modules share: none of their tests may kill them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.rpc.pairs import Pair, pair


@pytest.fixture(scope="package")
def qwen3(checkpoints: Callable[..., Path]) -> Iterator[Pair]:
    """Both services over a Qwen3-VL checkpoint."""
    with pair(checkpoints("qwen3_vl")) as both:
        yield both
