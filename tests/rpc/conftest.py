"""Services that several modules share: none of their tests may kill them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.launch import Service, encoder_server
from tests.rpc.encoder_client import Client
from tests.rpc.pairs import Pair, pair
from tests.rpc.refusals import Strict


@pytest.fixture(scope="package")
def qwen3(checkpoints: Callable[..., Path]) -> Iterator[Pair]:
    """Both services over a Qwen3-VL checkpoint, with the real model in them."""
    with pair(checkpoints("qwen3_vl"), light=False) as both:
        yield both


@pytest.fixture(scope="package")
def service(checkpoints: Callable[..., Path]) -> Iterator[Service]:
    """An encoder alone, with every option as it comes but one: who reads its memory may take as long as a busy machine
    makes it. Its workers may be held up, and its decoders killed."""
    with encoder_server(checkpoints("qwen3_vl"), lease_seconds=600) as running:
        yield running


@pytest.fixture(scope="package")
def client(service: Service) -> Iterator[Client]:
    """A client of it."""
    with Client(service) as calls:
        yield calls


@pytest.fixture(scope="package")
def strict(checkpoints: Callable[..., Path]) -> Iterator[Strict]:
    """An encoder for what it must refuse."""
    with (
        encoder_server(checkpoints("qwen2_5_vl"), decode_processes=1, max_frames=64) as running,
        Client(running) as calls,
    ):
        yield Strict(running, calls)
