"""Apertus 1.5's text by our decoder: xIELU between the products of a feed-forward part."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.activations import XIELUActivation

from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from common.hf.classes import state_tokens
from llm_service.families.sight import SpanRule
from llm_service.layers.mlp import squared_relu
from llm_service.layers.tensor_parallel import ALONE
from llm_service.layers.xielu import Xielu
from llm_service.models.loader import load_decoder
from llm_service.models.trial import try_ours_of
from testkit.hf_side import Served
from tools.models.drawn_prompts import drawn_prompt
from tools.models.tiny import config_of_recipe, make


def made(*coefficients: float) -> Xielu:
    """Of what a checkpoint has."""
    ours = Xielu()
    places = ours.targets("act_fn").values()
    for place, value in zip(places, coefficients, strict=True):
        place(torch.tensor([value]))
    return ours


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_that_of_transformers(dtype: torch.dtype) -> None:
    theirs = XIELUActivation(dtype=torch.float32)
    torch.nn.init.constant_(theirs.alpha_p, 0.3)
    torch.nn.init.constant_(theirs.alpha_n, -1.2)
    ours = made(0.3, -1.2, float(theirs.beta), float(theirs.eps))
    x = torch.cat([torch.linspace(-30, 30, 999), torch.tensor([0.0, -1e-7, -1e-6, 1e-7, 3e4])]).to(dtype)
    torch.testing.assert_close(ours(x), theirs(x.float()).to(dtype), rtol=1e-6, atol=1e-7)


def test_a_checkpoint_s_numbers_are_read(tmp_path: Path) -> None:
    served = Served.of(make("apertus1p5", tmp_path))
    text = served.text()
    assert text is not None
    decoder = load_decoder(Checkpoint(served.folder), torch.bfloat16, torch.device("cpu"), ALONE, text=text)
    found = [part.coefficients for part in decoder.modules() if isinstance(part, Xielu)]
    assert len(found) == text.config.layers
    for raised, _, slope, least in map(Tensor.tolist, found):
        assert raised != 0.0
        assert slope == 0.5
        assert -2e-6 < least < 0.0


def _without_softplus(part: Xielu, x: Tensor) -> Tensor:
    raised, sunk, slope, least = part.coefficients.unbind()
    return torch.where(x > 0, raised * x * x, (x.minimum(least).expm1() - x) * (sunk + slope)) + slope * x


def _one_sided(part: Xielu, x: Tensor) -> Tensor:
    raised, slope = part.coefficients[0], part.coefficients[2]
    return functional.softplus(raised) * x.relu().square() + slope * x


@pytest.mark.parametrize("otherwise", [_without_softplus, _one_sided, lambda _, x: squared_relu(x)])
def test_a_text_that_computes_otherwise_is_told(
    otherwise: Callable[[Xielu, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def small() -> Any:
        config = config_of_recipe("apertus1p5")
        state_tokens(config)
        return config

    assert try_ours_of(small(), drawn_prompt).spans is SpanRule.NOWHERE
    monkeypatch.setattr(Xielu, "forward", otherwise)
    with pytest.raises(CheckpointError, match="the logits of our decoder are not transformers': they differ by"):
        try_ours_of(small(), drawn_prompt)
