"""Puts the gateway together, runs it until a signal comes, and takes it apart in the opposite order."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import Generator
from contextlib import AsyncExitStack, contextmanager

import uvicorn
from starlette.routing import Route, Router

from common import log, stderr_capture, tracing
from common.errors import Unavailable
from gateway.api.chat import Chat
from gateway.api.completions import Completions
from gateway.api.house import House
from gateway.api.responses import Responses
from gateway.config import GatewayConfig
from gateway.connection import Connection
from gateway.frame import Frame
from gateway.meters import Meters, State
from gateway.services import LlmServices

_log = log.get("server")
_KEEP_ALIVE_SECONDS = 65
"""A connection without a request is kept for as long: longer than proxies keep theirs, so that they close it."""
_ENDING_SECONDS = 5.0
"""For requests that are ended after the grace time to say so."""


async def serve(config: GatewayConfig) -> None:
    """Serves until SIGTERM or SIGINT. Raises OSError where it cannot begin."""
    log.configure(config.log_level, service="gateway")
    stderr_capture.start()
    tracing.start("twinlens-gateway")
    meters = Meters()
    services = LlmServices(config.llm, config.link())
    chat = Chat(services, config.request_seconds)
    completions = Completions(services, config.request_seconds, config.max_prompts)
    responses = Responses(services, config.request_seconds)
    house = House(services, meters.metrics)
    routes = [
        Route("/v1/chat/completions", chat.answer, methods=["POST"]),
        Route("/v1/completions", completions.answer, methods=["POST"]),
        Route("/v1/responses", responses.answer, methods=["POST"]),
        Route("/v1/models", house.models, methods=["GET"]),
        Route("/v1/models/{name:path}", house.model, methods=["GET"]),
        Route("/tokenize", house.tokenize, methods=["POST"]),
        Route("/detokenize", house.detokenize, methods=["POST"]),
        Route("/health/live", house.live, methods=["GET"]),
        Route("/health/ready", house.ready, methods=["GET"]),
        Route("/metrics", house.metrics, methods=["GET"]),
        Route("/version", house.version, methods=["GET"]),
    ]
    frame = Frame(Router(routes, redirect_slashes=False), config, meters)
    house.frame = frame
    server = _Server(config, frame)
    meters.watch(lambda: State(frame.open_calls, len(server.server_state.connections), frame.bodies.bytes), services)
    async with AsyncExitStack() as running:
        running.push_async_callback(asyncio.to_thread, tracing.stop)
        await running.enter_async_context(services.watched())
        await server.serve([_listen(config.listen)])


def _listen(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host.strip("[]"), int(port)), family=family, backlog=2048)
    except OSError as error:
        raise OSError(f"cannot listen on {address} (--listen): {error.strerror or error}") from error


class _Server(uvicorn.Server):
    """uvicorn, with our signals, our `ready` line and our way to end."""

    def __init__(self, config: GatewayConfig, frame: Frame) -> None:
        connection = type(
            "Connection", (Connection,), {"head_seconds": config.request_stall_seconds, "most": config.max_connections}
        )
        super().__init__(
            uvicorn.Config(
                frame,
                http=connection,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="error",  # of what strangers send, nothing fills the log
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                ssl_certfile=config.tls_cert or None,
                ssl_keyfile=config.tls_key or None,
            )
        )
        self._frame = frame
        self._host = config.listen.rpartition(":")[0]
        self._grace = config.grace_seconds

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """A signal ends the serving, and nothing else."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        yield

    def _stop(self) -> None:
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens, and says so on standard output."""
        await super().startup(sockets)
        assert sockets is not None
        address = f"{self._host}:{sockets[0].getsockname()[1]}"
        sys.stdout.write(f"ready http={address}\n")
        sys.stdout.flush()
        _log.info("ready", address=address)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """New connections are refused, running requests get the grace time; then they are ended, each with an error."""
        self._frame.closed = True
        _log.info("draining", grace_seconds=self._grace, open_requests=self._frame.open_calls)
        stopping = Unavailable("the gateway stops and has ended this request", reason="CALL_ENDED")
        ending = asyncio.get_running_loop().call_later(self._grace, self._frame.end_all, stopping)
        self.config.timeout_graceful_shutdown = self._grace + _ENDING_SECONDS  # type: ignore[assignment]
        await super().shutdown(sockets)
        ending.cancel()
