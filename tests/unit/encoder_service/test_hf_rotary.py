"""Our rotary function in the place of those of transformers' modules."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from encoder_service.models.hf import rotary as hf_rotary
from encoder_service.models.hf.rotary import TurningBy
from testkit import reference

assert reference, "which prepares transformers' import"

NAME = "apply_rotary_pos_emb_vision"


def module_of(kind: str) -> ModuleType:
    return importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")


def model_of(module: ModuleType) -> nn.Module:
    """One with a part that is of this module."""
    return nn.Sequential(type("Part", (nn.Module,), {"__module__": module.__name__})())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["glm4v", "kimi_k25", "muse_spark", "ernie4_5_vl_moe"])
def test_ours_computes_what_transformers_does(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    module, turned = module_of(kind), list[torch.Size]()
    turn = hf_rotary.turn
    monkeypatch.setattr(
        hf_rotary, "turn", lambda x, *given, **named: turned.append(x.shape) or turn(x, *given, **named)
    )
    turning, theirs = TurningBy(model_of(module)), getattr(module, NAME)
    turned.clear()
    torch.manual_seed(0)
    packed = torch.randn(6, 3, 4, 16).to(dtype)
    cos, sin = torch.randn(2, 6, 16)
    for q, k in (
        packed[:, :2].unbind(1),
        packed.permute(1, 0, 2, 3)[:2, None].unbind(0),
        packed.transpose(2, 3).contiguous().transpose(2, 3)[:, :2].unbind(1),
    ):
        expected = theirs(q, k, cos, sin)
        with turning:
            found = getattr(module, NAME)(q, k, cos, sin)
        assert [each.shape for each in found] == [q.shape, k.shape]
        torch.testing.assert_close(found, expected)
    assert turned == 6 * [torch.Size((6, 4, 16))]
    assert getattr(module, NAME) is theirs, "afterwards transformers has its own again"


def test_what_computes_something_else_or_has_other_shapes_is_left_to_transformers() -> None:
    module = ModuleType("theirs")
    sys.modules["theirs"] = module
    try:
        for other in (lambda q, k, cos, sin: (q * cos.unsqueeze(1), k), lambda q: q):
            setattr(module, NAME, other)
            assert len(TurningBy(model_of(module))) == 0
        assert len(TurningBy(nn.Linear(2, 2))) == 0
    finally:
        del sys.modules["theirs"]
    glm = module_of("glm4v")
    q, k = torch.randn(2, 2, 5, 3, 8)  # of two sequences, which share their tables
    cos, sin = torch.randn(2, 5, 8)
    expected = getattr(glm, NAME)(q, k, cos, sin)
    with TurningBy(model_of(glm)):
        torch.testing.assert_close(getattr(glm, NAME)(q, k, cos, sin), expected)


def test_transformers_has_its_own_again_when_a_pass_fails() -> None:
    glm = module_of("glm4v")
    theirs = getattr(glm, NAME)
    q, angles = torch.zeros(2, 4, 8), torch.zeros(5, 8)
    with pytest.raises(RuntimeError), TurningBy(model_of(glm)):
        getattr(glm, NAME)(q, q, angles, angles)
    assert getattr(glm, NAME) is theirs
