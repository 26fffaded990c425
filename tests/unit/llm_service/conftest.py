"""Tiny checkpoints, read as the service reads them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from common.checkpoints.checkpoint import Checkpoint
from llm_service.prompt.builder import PromptBuilder


@pytest.fixture(scope="session")
def builder(checkpoints: Callable[..., Path]) -> PromptBuilder:
    """The prompt builder of a Qwen3-VL checkpoint, whose videos stand frame by frame."""
    return PromptBuilder(Checkpoint(checkpoints("qwen3_vl")))


@pytest.fixture(scope="session")
def older_builder(checkpoints: Callable[..., Path]) -> PromptBuilder:
    """The prompt builder of a Qwen2.5-VL checkpoint, whose videos are one span."""
    return PromptBuilder(Checkpoint(checkpoints("qwen2_5_vl")))
