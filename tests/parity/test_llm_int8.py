"""A model with 8-bit weights is nearly the model that it was rounded from."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from common.checkpoints.checkpoint import Checkpoint
from llm_service.layers.attention.backend import PagedChunk
from llm_service.models.decoder import Decoder
from llm_service.models.loader import load_decoder
from llm_service.worker.caches import Caches
from testkit.checkpoints import Family

CPU = torch.device("cpu")
TOKENS = 120


def logits(decoder: Decoder) -> torch.Tensor:
    """Of a random prompt, at every place of it."""
    caches = Caches(decoder.mixers(), 8, 16, torch.float32, CPU, attention="torch", state_slots=1)
    batches = caches.batches([PagedChunk(0, TOKENS, list(range(8)))], slots=[0])
    ids = torch.randint(0, 500, (TOKENS,), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(TOKENS, dtype=torch.int32).expand(3, -1)
    with torch.inference_mode():
        hidden = decoder(decoder.embed_tokens(ids), positions, caches.layers, batches, None)
        return decoder.logits(hidden)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5"])
def test_logits_and_greedy_tokens_are_near_those_of_the_whole_weights(
    family: Family, checkpoints: Callable[..., Path]
) -> None:
    checkpoint = Checkpoint(checkpoints(family))
    whole = logits(load_decoder(checkpoint, torch.float32, CPU))
    decoder = load_decoder(checkpoint, torch.float32, CPU, weight_dtype="int8")
    rounded = logits(decoder)
    assert not torch.equal(whole, rounded)
    assert (whole - rounded).norm() / whole.norm() < (0.07 if family == "qwen3_5" else 0.06), "states add up"
    assert (whole.argmax(-1) == rounded.argmax(-1)).float().mean() > 0.85
    plain = re.compile(r"embed|gate\.|heads\.conv|in_proj_ab")
    matrices = [p for name, p in decoder.named_parameters() if p.dim() > 1 and not plain.search(name)]
    assert not sum(parameter.numel() for parameter in matrices), "no plain matrix is kept"


def test_the_gates_of_delta_nets_are_not_rounded(checkpoints: Callable[..., Path]) -> None:
    """They are small, and what they say adds up over a whole prompt."""
    checkpoint = Checkpoint(checkpoints("qwen3_5"))
    whole, rounded = (load_decoder(checkpoint, torch.float32, CPU, weight_dtype=given) for given in ("", "int8"))
    same = {"in_proj": False, "in_proj_ab": True, "out": False}
    for name, equal in same.items():
        ours, theirs = (getattr(decoder.layers[0].mixer, name) for decoder in (whole, rounded))
        given = torch.randn(5, ours._inputs.stop - ours._inputs.start)
        assert torch.equal(ours(given), theirs(given)) == equal, name
