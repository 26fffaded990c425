"""Both halves on a GPU against transformers on the CPU: the same rows, the same greedy tokens, in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from common.checkpoints.checkpoint import Checkpoint
from common.media.item import Grid
from encoder_service.families import config
from encoder_service.models.tower import load_tower
from llm_service.request import SamplingParams
from testkit import reference
from testkit.checkpoints import FAMILIES, Family
from testkit.local_engine import LocalEngine, make_prompt
from tests import pictures

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
GREEDY = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, checkpoints: Callable[..., Path]) -> Path:
    family: Family = request.param
    return checkpoints(family)


def test_rows_are_the_references(folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    patches, grids = reference.images_inputs(folder, [pictures.photograph("astronaut"), pictures.photograph("coffee")])
    expected = reference.rows(folder, patches, grids)
    for dtype, tolerance in ((torch.float32, 1e-3), (torch.bfloat16, 0.2)):
        tower = load_tower(checkpoint, config.read(checkpoint), torch.device(DEVICE), dtype)
        rows = tower(patches.to(DEVICE, dtype), [Grid(*grid) for grid in grids.tolist()])
        error = (rows.float().cpu() - expected).norm() / expected.norm()
        assert error < tolerance, dtype


def test_greedy_tokens_are_the_references(folder: Path) -> None:
    prompts = [
        make_prompt(folder, [pictures.photograph("astronaut"), "What is in the picture?"]),
        make_prompt(folder, ["Tell me about two red circles."]),
    ]
    expected = [reference.reference_generate(folder, prompt.inputs, 32) for prompt in prompts]
    for step_tokens in (4096, 16):
        engine = LocalEngine(folder, step_tokens=step_tokens, device=DEVICE)
        assert [outcome.tokens for outcome in engine.run(prompts, GREEDY)] == expected
