"""One gateway over light services, which its tests share: none of them may stop it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.gateway.trio import Trio, trio

collect_ignore = ["clients"]
"""Programs that run in an environment of their own."""


@pytest.fixture(scope="package")
def door(checkpoints: Callable[..., Path]) -> Iterator[Trio]:
    """An encoder, an LLM service and a gateway."""
    with trio(checkpoints("qwen3_vl")) as three:
        yield three
