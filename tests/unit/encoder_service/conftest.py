"""A shared store for those who need a real one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import valkey_server


@pytest.fixture(scope="package")
def running() -> Iterator[valkey_server.Server]:
    """A server that lives as long as the tests of this folder."""
    with valkey_server.server() as made:
        yield made


@pytest.fixture
def server(running: valkey_server.Server) -> valkey_server.Server:
    """The same, empty."""
    with running.client() as client:
        client.flushall()
    return running
