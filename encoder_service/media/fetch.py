"""Downloads of media: from allowed hosts alone, to checked addresses alone, within bounds of size, time and number.

The HTTP library (httpcore) follows no redirect, keeps no cookie, reads no proxy setting and unpacks nothing.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import httpcore2

from common.aio.tasks import in_daemon_thread, to_thread
from common.config import option, words
from common.errors import MEDIA_HOST, DeadlineExceeded, InvalidInput, Precondition, TwinlensError, Unavailable
from common.telemetry import log
from encoder_service.media.address import Address, HostRule, HostRules, forbidden, is_reachable, literal, parse
from encoder_service.media.fair_slots import Caller, FairSlots

Resolve = Callable[[str, int], Awaitable[list[str]]]
"""Resolves a host and a port to all of the host's IP addresses; raises OSError if there are none."""

_REDIRECTS = (301, 302, 303, 307, 308)
_MAX_REDIRECTS = 3
_TRY_LATER = (408, 425, 429)
_MAX_ADDRESSES = 4
"""Most addresses of a host that are tried, in the order of the answer."""

_HEADERS = [(b"User-Agent", b"twinlens"), (b"Accept", b"*/*"), (b"Accept-Encoding", b"identity")]

_log = log.get("fetch")


@dataclass(frozen=True, kw_only=True)  # no slots: the service's configuration has several bases
class FetchConfig:
    """Options of fetching. A host is `example.org`, `*.example.org` or `*`, followed by `:port` if it is not 80 or
    443."""

    allow_media_host: tuple[str, ...] = option(
        (),
        "hosts that media may be fetched from, as HOST, *.DOMAIN or *, with :PORT if need be",
        parse=words,
        group="media by address",
    )
    allow_private_media_host: tuple[str, ...] = option(
        (), "the same, for hosts that may be in a private network or on this machine", parse=words
    )
    fetch_seconds: float = option(
        15.0, "longest that one download may take, including its wait for a place", minimum=0.1
    )
    fetch_stall_seconds: float = option(5.0, "longest wait for a media host's next bytes", minimum=0.1)
    max_fetches: int = option(
        32,
        "downloads at once, of which a single host or caller gets at most half; further ones wait",
        minimum=1,
    )

    def check_fetch(self) -> None:
        """Raises ValueError for an entry that is not a host."""
        HostRules(self.allow_media_host, self.allow_private_media_host)


@dataclass(slots=True)
class _Asked:
    """A caller's request, and whether it `waits` for a slot."""

    max_bytes: int
    field: str
    caller: Caller
    on_size: Callable[[int], None]
    waits: bool = False

    async def waiting(self, slot: Awaitable[ExitStack]) -> ExitStack:
        """The slot, once there is one."""
        self.waits = True
        taken = await slot
        self.waits = False
        return taken


class Fetcher:
    """Fetches media. `resolve` and `tls` exist for tests."""

    def __init__(
        self, config: FetchConfig, *, resolve: Resolve | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        self._rules = HostRules(config.allow_media_host, config.allow_private_media_host)
        self._seconds = config.fetch_seconds
        self._stall = config.fetch_stall_seconds
        self._downloads = FairSlots(config.max_fetches, kept_free=True)
        self._look_ups = FairSlots(config.max_fetches, kept_free=True)
        self._resolve = resolve
        self._tls = tls

    def check(self, url: str, field: str) -> Address:
        """The parsed address, if it is valid and on a list. Raises InvalidInput or Forbidden. Nothing is resolved, so
        whether the host may be connected to is not known yet."""
        address = parse(url, field)
        rule = self._rules.find(address, field)
        number = literal(address.host)
        if number and not is_reachable(number, private=rule.private):
            raise forbidden(field)
        return address

    async def fetch(
        self,
        url: str,
        max_bytes: int,
        field: str,
        caller: Caller = ("", ""),
        on_size: Callable[[int], None] = lambda _: None,
    ) -> bytearray:
        """The content at an address, at most `max_bytes`, for a caller who shares the slots with others.

        `on_size` is called with the content's size, or with the bytes so far if the host does not state it, before they
        are read. Its errors cancel the download.

        Raises InvalidInput (an invalid address, too many redirects, content that is too large), Forbidden, Precondition
        (the host does not have it), Unavailable (the host fails) and DeadlineExceeded (it is too slow, or all slots are
        taken for too long).
        """
        address, asked = self.check(url, field), _Asked(max_bytes, field, caller, on_size)
        try:
            async with asyncio.timeout(self._seconds):
                return await self._follow(address, asked)
        except (TimeoutError, httpcore2.TimeoutException):
            raise _too_late(asked) from None
        except (httpcore2.NetworkError, httpcore2.ProtocolError, OSError) as error:
            _log.info("a media host failed", host=address.host, cause=type(error).__name__)
            raise _failed("the media host cannot be reached, or broke off", field) from None

    async def _follow(self, address: Address, asked: _Asked) -> bytearray:
        for _ in range(_MAX_REDIRECTS + 1):
            with await asked.waiting(self._downloads.take(asked.caller, address.host)):
                found = await self._get(address, asked)
            if isinstance(found, bytearray):
                return found
            address = address.joined(found, asked.field)
        raise InvalidInput(f"more than {_MAX_REDIRECTS} redirects", reason="TOO_MANY_REDIRECTS", field=asked.field)

    async def _get(self, address: Address, asked: _Asked) -> bytearray | str:
        """The content at an address, or the target of a redirect. Uses one connection, for this request only."""
        max_bytes, field = asked.max_bytes, asked.field
        resolve = self._resolve or partial(self._look_up, asked)
        network = _CheckedNetwork(resolve, self._rules.find(address, field), field)
        url = httpcore2.URL(
            scheme=address.scheme.encode(), host=address.host.encode(), port=address.port, target=address.target
        )
        limits = dict.fromkeys(("connect", "read", "write", "pool"), self._stall)
        async with (
            httpcore2.AsyncConnectionPool(await self._context(address), network_backend=network) as pool,
            pool.stream(
                b"GET", url, headers=[(b"Host", address.authority), *_HEADERS], extensions={"timeout": limits}
            ) as response,
        ):
            headers = {name.lower(): value for name, value in response.headers}
            if response.status in _REDIRECTS and b"location" in headers:
                return _text(headers[b"location"])
            size = _check_answer(response.status, headers, max_bytes, field)
            asked.on_size(size)
            content = bytearray()
            async for piece in response.aiter_stream():
                if (come := len(content) + len(piece)) > size:
                    if come > max_bytes:
                        raise _too_large(max_bytes, field)
                    asked.on_size(come)
                    size = come
                content += piece
            return content

    async def _context(self, address: Address) -> ssl.SSLContext | None:
        if address.scheme == "https" and self._tls is None:  # reading the system's roots takes a while
            self._tls = await to_thread(httpcore2.default_ssl_context)
        return self._tls

    async def _look_up(self, asked: _Asked, host: str, port: int) -> list[str]:
        """One that hangs cannot be cancelled: it keeps its thread, and its slot, until it ends."""
        slot = await asked.waiting(self._look_ups.take(asked.caller, host))
        looking = asyncio.wrap_future(in_daemon_thread(_addresses, host, port))
        looking.add_done_callback(lambda _: slot.close())
        return list(dict.fromkeys(await asyncio.shield(looking)))


class _CheckedNetwork(httpcore2.AsyncNetworkBackend):
    """Connects to a host's addresses after checking that all of them may be reached.

    The library would connect by name. The certificate and the Host header remain those of the name, and no second
    look-up can come between check and connection.
    """

    def __init__(self, resolve: Resolve, rule: HostRule, field: str) -> None:
        self._resolve = resolve
        self._rule = rule
        self._field = field
        self._network = httpcore2.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        """Raises Forbidden if any of the host's addresses may not be reached."""
        answers = await self._answers(host, port)
        if not all(is_reachable(answer, private=self._rule.private) for answer in answers):
            _log.warning("a media host is in a network that is not allowed", host=host)
            raise forbidden(self._field)
        failures: list[Exception] = []
        for answer in answers[:_MAX_ADDRESSES]:
            try:
                return await self._network.connect_tcp(answer, port, timeout, local_address, socket_options)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                failures.append(error)
        raise failures[-1]

    async def _answers(self, host: str, port: int) -> list[str]:
        try:
            answers = await self._resolve(host, port)
        except socket.gaierror as error:
            if error.errno == socket.EAI_AGAIN:
                raise _failed("the media host's name cannot be resolved now", self._field) from None
            raise _unknown(self._field) from None
        except UnicodeError:
            raise _unknown(self._field) from None
        if not answers:
            raise _unknown(self._field)
        return answers


def _addresses(host: str, port: int) -> list[str]:
    """Every address of a host. Numbers in any spelling come out as the addresses that they are."""
    return [str(answer[4][0]) for answer in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def _text(header: bytes) -> str:
    """A header's text: UTF-8, as browsers read it, or Latin-1 if it is not."""
    try:
        return header.decode("utf-8")
    except UnicodeDecodeError:
        return header.decode("latin-1")


def _check_answer(status: int, headers: dict[bytes, bytes], max_bytes: int, field: str) -> int:
    """The stated size in bytes; 0 if it is not stated."""
    if status >= 500 or status in _TRY_LATER:
        raise _failed("the media host cannot answer now", field)
    if status != 200:
        raise Precondition("the media host does not have it", reason="MEDIA_HOST_REFUSED", field=field)
    if headers.get(b"content-encoding", b"identity").strip().lower() not in (b"identity", b""):
        raise Precondition("the media host compresses what it sends", reason="MEDIA_HOST_REFUSED", field=field)
    length = headers.get(b"content-length", b"")
    size = int(length) if length.isdigit() else 0
    if size > max_bytes:
        raise _too_large(max_bytes, field)
    return size


def _too_late(asked: _Asked) -> TwinlensError:
    if asked.waits:
        why = "too many downloads from this media host, or for this caller"
        return DeadlineExceeded(why, reason="FETCHES_BUSY", field=asked.field)
    return DeadlineExceeded("the media host is too slow", reason="MEDIA_HOST_SLOW", field=asked.field)


def _too_large(max_bytes: int, field: str) -> InvalidInput:
    return InvalidInput(f"the media is larger than {max_bytes} bytes", reason="MEDIA_TOO_LARGE", field=field)


def _failed(why: str, field: str) -> TwinlensError:
    return Unavailable(why, reason=MEDIA_HOST, field=field)


def _unknown(field: str) -> TwinlensError:
    return Precondition("the media host's name is not known", reason="MEDIA_HOST_UNKNOWN", field=field)
