"""The first start on a machine: it serves before our kernels are compiled, and goes on with them, on every rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from encoder_service.models.attention import candidates
from tests.launch import Service, encoder_server, llm_server
from tests.rpc.pairs import LLM_FLAGS, asked, greedy, tokens
from tests.scrape import scrape
from tests.waiting import until
from twinlens import LlmClient, user

MEANWHILE = "our kernels are being compiled; torch computes until then"
CHANGED = "our kernels are in use from now on"
COMPILER = "common.cpu.compile"
BEFORE = "our kernels are compiled before this serves"


def said(service: Service, event: str) -> int:
    return service.log.read_text(encoding="utf-8").count(event)


@pytest.mark.soak
def test_a_first_start_serves_with_torch_and_changes_over_on_all_ranks(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With torch's attention, whose numba kernel alone takes half of the time to compile."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    prompt = asked(user("Tell me about two red circles."), greedy(24))
    flags = {**LLM_FLAGS, "tp": 2, "attention": "torch", "metrics_listen": "127.0.0.1:0"}
    with llm_server(checkpoint, **flags, light=False, kernels="auto") as service, LlmClient(service.address) as llm:
        assert said(service, MEANWHILE) == 2
        first = tokens(llm, prompt)
        until(lambda: said(service, CHANGED) == 2, "both ranks compute with our kernels", seconds=600)
        assert tokens(llm, prompt) == first
        until(lambda: not scrape(service.metrics)["twinlens_llm_kernels_compiling"], "the metric says so")
        assert not service.children(COMPILER)
    with llm_server(checkpoint, **flags, light=False, kernels="auto") as service, LlmClient(service.address) as llm:
        assert tokens(llm, prompt) == first
        assert not said(service, MEANWHILE), "the second start finds what the first one made"


@pytest.mark.soak
@pytest.mark.skipif("numba" not in candidates(torch.device("cpu"), torch.bfloat16), reason="needs AVX512-BF16")
def test_an_encoder_waits_for_its_kernels_where_it_is_told_to(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    flags = {"light": False, "dtype": "bfloat16", "kernels": "wait", "fork": False}
    with encoder_server(checkpoint, **flags) as service:
        assert said(service, BEFORE) == 1
        assert not service.children(COMPILER)
    with encoder_server(checkpoint, **flags) as service:
        assert not said(service, BEFORE), "the second start finds what the first one made"
