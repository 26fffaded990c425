"""The encoder's end of the local link: who has its memory mapped, and which leases they release."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import secrets
import socket

from common.aio import tasks
from common.shm import local_link
from common.shm.arena import SharedBuffer
from common.shm.local_link import GRANT_BYTES, RELEASE, SECRET_BYTES, SharedArena
from common.telemetry import log
from common.telemetry.rate_limit import STRANGERS_SECONDS, RateLimit
from encoder_service.engine.leases import Leases

_log = log.get("local socket")
_GREETING_SECONDS = 1.0
_PAUSE = 0.1


class LocalSocket:
    """Hands the arena and the lease board to every process of our own user that knows the secret.

    The end of a connection releases what its reader had leased. `start` and `stop` are called by the owner.
    """

    def __init__(self, folder: str, arena: SharedBuffer, board: SharedBuffer, leases: Leases) -> None:
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self._folder = folder
        self._shared = (arena, board)
        self._leases = leases
        self._server, self.name = local_link.listen(folder)
        self._readers: dict[bytes, asyncio.Task[None]] = {}
        self._accepting: asyncio.Task[None] | None = None
        self._refusals = RateLimit(STRANGERS_SECONDS)

    def knows(self, grant: bytes) -> bool:
        """Whether a grant is one of a connection that is open."""
        return grant in self._readers

    def start(self) -> None:
        """Begins to accept connections."""
        self._accepting = tasks.start(self._accept(), "local socket")

    async def stop(self) -> None:
        """Closes all connections and leaves nothing behind."""
        running = [*self._readers.values(), *([self._accepting] if self._accepting else [])]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        self._server.close()
        local_link.unlink(self._folder, self.name)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                link, _ = await loop.sock_accept(self._server)
            except OSError as error:  # for example, no descriptor is free: the new connection waits for a moment
                _log.error("a local reader cannot be accepted", cause=type(error).__name__)
                await asyncio.sleep(_PAUSE)
                continue
            grant = secrets.token_bytes(GRANT_BYTES)
            self._readers[grant] = tasks.start(self._serve(link, grant), "local reader")

    async def _serve(self, link: socket.socket, grant: bytes) -> None:
        """One reader, from its greeting to its end."""
        link.setblocking(False)
        try:
            with contextlib.suppress(OSError, TimeoutError):
                if not local_link.same_user(link):  # who may hold none of our descriptors, however many come
                    self._refused()
                    return
                async with tasks.StallTolerantTimeout(_GREETING_SECONDS):
                    told = await _exactly(link, SECRET_BYTES)
                if not told:  # another encoder checked at its start whether somebody listens here
                    return
                if not hmac.compare_digest(told, self.secret):
                    self._refused()
                    return
                self._hand_over(link, grant)
                while len(word := await _exactly(link, RELEASE.size)) == RELEASE.size:
                    self._leases.release_number(RELEASE.unpack(word)[0], grant)
        finally:
            link.close()
            self._leases.drop(grant)
            self._readers.pop(grant, None)

    def _refused(self) -> None:
        if (before := self._refusals.take()) is not None:
            _log.warning("a local reader was refused", others=before)

    def _hand_over(self, link: socket.socket, grant: bytes) -> None:
        with contextlib.ExitStack() as opened:
            descriptors = []
            for buffer in self._shared:
                descriptors.append(buffer.open_reader())
                opened.callback(os.close, descriptors[-1])
            local_link.hand_over(link, SharedArena(grant, *descriptors))


async def _exactly(link: socket.socket, count: int) -> bytes:
    """`count` bytes; fewer if the other side has closed."""
    loop, got = asyncio.get_running_loop(), b""
    while len(got) < count and (more := await loop.sock_recv(link, count - len(got))):
        got += more
    return got
