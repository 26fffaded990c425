"""Real gRPC servers on free ports, with fake services behind them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest
import trustme

from common.rpc.server import PINGS
from tests.unit.twinlens.fakes import FakeEncoder, FakeLlm
from twinlens import v1


@contextmanager
def serving(
    llm: FakeLlm | None = None,
    encoder: FakeEncoder | None = None,
    credentials: grpc.ServerCredentials | None = None,
    handlers: tuple[grpc.GenericRpcHandler, ...] = (),
    options: tuple[tuple[str, int], ...] = (),
) -> Iterator[str]:
    """A server for the services that are given; yields its address."""
    with ThreadPoolExecutor(8) as pool:  # more than a test has streams, so that questions are answered beside them
        usual = [("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", -1), *PINGS]
        server = grpc.server(pool, options=[*usual, *options])
        if llm is not None:
            v1.add_LlmServiceServicer_to_server(llm, server)
        if encoder is not None:
            v1.add_EncoderServiceServicer_to_server(encoder, server)
        server.add_generic_rpc_handlers(handlers)
        if credentials is None:
            port = server.add_insecure_port("127.0.0.1:0")
        else:
            port = server.add_secure_port("127.0.0.1:0", credentials)
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(grace=None).wait()


@pytest.fixture
def llm() -> FakeLlm:
    return FakeLlm()


@pytest.fixture
def llm_address(llm: FakeLlm) -> Iterator[str]:
    with serving(llm=llm) as address:
        yield address


@pytest.fixture
def encoder_address() -> Iterator[str]:
    with serving(encoder=FakeEncoder()) as address:
        yield address


@pytest.fixture(scope="session")
def authority() -> trustme.CA:
    return trustme.CA()
