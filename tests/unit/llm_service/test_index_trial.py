"""Kernels that score tokens by their index keys are used where they give what torch does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from llm_service.layers.gpu import index_kernels, row_kernels
from llm_service.layers.gpu.index_trial import gives_scores
from llm_service.layers.sparse_attention import block_decodes, token_decodes
from llm_service.layers.sparse_attention.index import IndexKeys

TOKENS = IndexKeys(3, 20, 20, 16, torch.float16, torch.device("cpu"))
SCORES: dict[str, tuple[Any, Any, IndexKeys]] = {
    "tokens": (index_kernels.score_tokens, token_decodes, TOKENS),
    "pools": (index_kernels.score_tokens, token_decodes, replace(TOKENS, kept=40, pool=4)),
    "blocks": (index_kernels.score_blocks, block_decodes, replace(TOKENS, pool=32, weighs=False)),
}


@pytest.mark.parametrize("what", SCORES)
def test_a_kernel_that_is_right_passes_and_one_that_is_wrong_behind_its_first_tokens_does_not(what: str) -> None:
    kernel, module, keys = SCORES[what]
    assert gives_scores(kernel, module.score_by_torch, keys)

    def wrong(*given: Any) -> torch.Tensor:
        found: torch.Tensor = kernel(*given)
        return torch.cat((found[..., : index_kernels._PROGRAMS], 2.0 * found[..., index_kernels._PROGRAMS :]), -1)

    assert not gives_scores(wrong, module.score_by_torch, keys)


@pytest.mark.parametrize("what", SCORES)
@pytest.mark.parametrize("right", [True, False])
def test_torch_scores_where_a_trial_fails_or_there_is_no_gpu(
    what: str, monkeypatch: pytest.MonkeyPatch, *, right: bool
) -> None:
    kernel, module, keys = SCORES[what]
    assert module.score_by(keys) is module.score_by_torch
    monkeypatch.setattr(row_kernels, "run_on", lambda _: True)
    monkeypatch.setattr("llm_service.layers.gpu.index_trial.gives_scores", lambda *_: right)
    on_gpu = replace(keys, device=torch.device("cuda"))
    assert module.score_by(on_gpu) is (kernel if right else module.score_by_torch)
