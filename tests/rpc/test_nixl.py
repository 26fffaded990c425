"""Rows that LLM services read from encoders' memory by NIXL: both services whole, with its library, by TCP."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import pictures
from tests.launch import encoder_server, llm_server
from tests.nixl_agents import needs_library, processes
from tests.rpc.pairs import ENCODER_FLAGS, LLM_FLAGS, Pair, about, asked, pair, tokens, usable
from tests.rpc.test_transports import by_transport
from tests.waiting import until
from twinlens import LlmClient, v1

FILES = [pictures.encoded(pictures.noise(96, 64 + 32 * n, 9_400 + n)) for n in range(8)]


@pytest.fixture(scope="module")
def inline(checkpoint: Path) -> Iterator[Pair]:
    """Two services that share no memory."""
    with pair(checkpoint, shared_memory=False) as both:
        yield both


@pytest.fixture
def by_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """As between hosts."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")


@needs_library
@pytest.mark.usefixtures("by_tcp")
def test_rows_are_read_by_nixl_and_the_tokens_are_the_same_whoever_s_agent_ends(checkpoint: Path, inline: Pair) -> None:
    with pair(checkpoint, shared_memory=False, nixl="UCX", encoder_flags={"nixl": "UCX"}) as both:

        def connected() -> bool:
            return both.text.get_load().encoders[0].nixl

        until(connected, "the agents are connected")
        assert v1.TRANSPORT_NIXL in both.media.get_info().transports
        for file in FILES[:4]:
            assert tokens(both.text, asked(about(file))) == tokens(inline.text, asked(about(file)))
        load = both.text.get_load()
        assert load.rows_nixl == load.rows_received > 0
        assert by_transport(both.media) == {v1.TRANSPORT_NIXL: load.rows_received}
        for file, service in zip(FILES[4:6], (both.encoder, both.llm), strict=True):
            (agent,) = processes(service.pid)
            os.kill(agent, signal.SIGKILL)
            assert tokens(both.text, asked(about(file))) == tokens(inline.text, asked(about(file)))
            until(lambda before=agent, service=service: set(processes(service.pid)) - {before}, "there is another")
            until(connected, "the agents are connected again")
        before = both.text.get_load().rows_nixl
        assert tokens(both.text, asked(about(FILES[6]))) == tokens(inline.text, asked(about(FILES[6])))
        assert both.text.get_load().rows_nixl > before
        until(lambda: both.idle() and both.media.get_load().leases == 0, "nothing is held")


@needs_library
def test_an_encoder_without_it_sends_rows_inline(checkpoint: Path, inline: Pair) -> None:
    with (
        encoder_server(checkpoint, **ENCODER_FLAGS, shared_memory=False) as encoder,
        llm_server(checkpoint, encoder.address, **LLM_FLAGS, nixl="UCX") as llm,
        LlmClient(llm.address) as text,
    ):
        until(lambda: usable(text, 1), "the encoder is usable")
        assert tokens(text, asked(about(FILES[0]))) == tokens(inline.text, asked(about(FILES[0])))
        assert (text.get_load().rows_nixl, text.get_load().rows_received > 0) == (0, True)


@needs_library
@pytest.mark.parametrize("service", ["encoder", "llm"])
def test_a_back_end_that_cannot_be_had_ends_the_start_with_a_sentence(checkpoint: Path, service: str) -> None:
    launch = encoder_server(checkpoint, nixl="NOPE") if service == "encoder" else llm_server(checkpoint, nixl="NOPE")
    with pytest.raises(RuntimeError, match=re.escape("--nixl")), launch:
        pass
