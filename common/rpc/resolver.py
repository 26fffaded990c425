"""Addresses of services: given directly, by name, or in files, all of which are resolved repeatedly. A source that
cannot be read now keeps its last result."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from common.aio.tasks import in_daemon_thread, to_thread
from common.config import is_port
from common.telemetry import log

_log = log.get("resolver")

DNS = "dns:///"
"""Prefix of names to resolve."""
FILE = "file://"
"""Prefix of a list's path: one `host:port` per line; empty lines and comments after # are skipped. An empty list counts
as unreadable: files are empty while they are being written."""


class Resolver:
    """Sources of addresses: `host:port`, `dns:///name:port` or `file:///path`."""

    def __init__(self, sources: Sequence[str]) -> None:
        self._sources = tuple(sources)
        self._last: dict[str, dict[str, str]] = {}

    async def resolve(self) -> dict[str, str]:
        """Every address, with the host name that it was found for (empty for one that was given as it is)."""
        found: dict[str, str] = {}
        for source in self._sources:
            try:
                self._last[source] = await _read(source)
            except (OSError, UnicodeError, ValueError, RuntimeError) as error:  # the last: no thread can be had
                _log.debug("a source of addresses cannot be read", source=source, cause=type(error).__name__)
            found |= self._last.get(source, {})
        return found


async def _read(source: str) -> dict[str, str]:
    if source.startswith(DNS):
        return await _look_up(source.removeprefix(DNS))
    if source.startswith(FILE):
        text = await to_thread(Path(source.removeprefix(FILE)).read_text, "utf-8")
        lines = [line.partition("#")[0].strip() for line in text.splitlines()]
        found = {check_address(line): "" for line in lines if line}
        if not found:
            raise ValueError("the list is empty: it may be being written")
        return found
    return {source: ""}


async def _look_up(name: str) -> dict[str, str]:
    host, _, port = name.rpartition(":")
    looking = asyncio.wrap_future(in_daemon_thread(partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)))
    answers = await asyncio.shield(looking)
    return {f"[{ip}]:{port}" if ":" in str(ip) else f"{ip}:{port}": host for *_, (ip, *_) in answers}


def check_address(address: str) -> str:
    """The address; raises ValueError if it is not `host:port`."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not is_port(port):
        raise ValueError(f"{address} is not host:port")
    return address
