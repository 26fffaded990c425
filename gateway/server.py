"""Puts the gateway together, runs it until a signal comes, and takes it apart in the opposite order."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Generator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from common.aio import tasks
from common.errors import Unavailable
from common.process.descriptors import say
from common.process.malloc import freeze_objects
from common.rpc.tls_files import TlsFiles
from common.telemetry import log, stderr_capture, tracing
from gateway.api.adapters import Adapters
from gateway.api.caches import Caches
from gateway.api.chat import Chat
from gateway.api.completions import Completions
from gateway.api.embeddings import Embeddings
from gateway.api.load import Load
from gateway.api.messages import Messages
from gateway.api.models import Models
from gateway.api.operations import Operations
from gateway.api.page import Page
from gateway.api.responses import Responses
from gateway.api.scores import Scores
from gateway.api.tokenize import Tokenizer
from gateway.api.transcriptions import Transcriptions
from gateway.chat_answers import ChatAnswers
from gateway.config import GatewayConfig
from gateway.connection import Connection
from gateway.embedding_calls import EmbeddingCalls
from gateway.errors import NoRoute
from gateway.generation import Generations, HandoverLimits
from gateway.kept_adapters import KeptAdapters
from gateway.meters import Meters, State
from gateway.middleware import RequestMiddleware
from gateway.prompt_counts import PromptCounts
from gateway.prompt_turns import PromptBatches, PromptTurns
from gateway.services import LlmServices

_log = log.get("server")
_EXPOSED = ("x-request-id", "request-id", "retry-after", "x-should-retry")
"""Headers of answers that pages of other origins may read."""
_KEEP_ALIVE_SECONDS = 65
"""A connection without a request is kept for as long: longer than proxies keep theirs, so that they close it."""
_HANDSHAKE_SECONDS = 2.0
"""For the TLS of connections that came at the very moment when the gateway stops listening."""
_LAST_SECONDS = 0.5
"""Requests that a proxy sent on an idle connection, before it learned that the gateway stops, arrive within this
time."""
_CERTIFICATE_SECONDS = 1.0
"""From one look at the certificate's files to the next."""
_ENDING_SECONDS = 5.0
"""For requests that are ended after the grace time to say so."""


def _closed(routes: Sequence[Route], option: str) -> list[Route]:
    """The same paths where an option has not opened them: nothing is there, and the error names the option."""

    async def refuse(_: Request) -> Response:
        raise NoRoute(404, f"there is something at this path only if the gateway has {option}")

    return [Route(route.path, refuse, methods=["POST"]) for route in routes]


async def serve(config: GatewayConfig) -> None:
    """Serves until SIGTERM or SIGINT. Raises OSError if it cannot start."""
    log.configure(config.log_level, service="gateway")
    stderr_capture.start()
    tracing.start("twinlens-gateway")
    tasks.start_threads()
    meters = Meters()
    services = LlmServices(config.llm, config.llm_security(), request_seconds=config.longest_seconds)
    limits = HandoverLimits(
        config.max_handovers, config.handover_seconds, config.max_kept_bytes, config.longest_seconds
    )
    generations = Generations(services, limits, meters.handover, meters.used)
    chats = ChatAnswers(services, generations)
    chat = Chat(services, chats)
    turns = PromptTurns(config.max_prompt_calls, lambda: config.max_batch_calls * max(1, len(services.usable)))
    batches = PromptBatches(turns, config.max_prompts, config.max_body_bytes)
    completions = Completions(services, generations, batches)
    embedding_calls = EmbeddingCalls(services, config.request_seconds, meters.used)
    embeddings = Embeddings(services, embedding_calls, batches)
    scores = Scores(services, generations, embedding_calls, batches)
    counts = PromptCounts(services, generations)
    responses = Responses(services, chats, counts)
    messages = Messages(services, chats, counts)
    transcriptions = Transcriptions(generations)
    models = Models(services)
    tokenizer = Tokenizer(services)
    load = Load(services)
    kept = KeptAdapters(services, meters.adapter_change)
    adapters = Adapters(services, kept)
    caches = Caches(services)
    operations = Operations(services, meters.metrics)
    routes = [
        Route("/v1/chat/completions", chat.answer, methods=["POST"]),
        Route("/v1/completions", completions.answer, methods=["POST"]),
        Route("/v1/embeddings", embeddings.answer, methods=["POST"]),
        *(Route(path, scores.rerank, methods=["POST"]) for path in ("/v1/rerank", "/v2/rerank", "/rerank")),
        *(Route(path, scores.score, methods=["POST"]) for path in ("/score", "/v1/score")),
        Route("/v1/responses", responses.answer, methods=["POST"]),
        Route("/v1/responses/input_tokens", responses.count, methods=["POST"]),
        Route("/v1/messages", messages.answer, methods=["POST"]),
        Route("/v1/messages/count_tokens", messages.count, methods=["POST"]),
        Route("/v1/audio/transcriptions", transcriptions.answer, methods=["POST"]),
        Route("/v1/models", models.list, methods=["GET"]),
        Route("/v1/models/{name:path}", models.one, methods=["GET"]),
        Route("/v1/twinlens/load", load.answer, methods=["GET"]),
        Route("/tokenize", tokenizer.tokenize, methods=["POST"]),
        Route("/detokenize", tokenizer.detokenize, methods=["POST"]),
        Route("/health/live", operations.live, methods=["GET"]),
        Route("/health/ready", operations.ready, methods=["GET"]),
        Route("/health", operations.ready, methods=["GET"]),  # vLLM's name
        Route("/ping", operations.ready, methods=["GET", "POST"]),  # SageMaker's, and vLLM's too
        Route("/metrics", operations.metrics, methods=["GET"]),
        Route("/version", operations.version, methods=["GET"]),
        *(adapters.routes if config.allow_lora_updates else _closed(adapters.routes, "--allow-lora-updates")),
        *(caches.routes if config.allow_cache_resets else _closed(caches.routes, "--allow-cache-resets")),
        *(Page().routes if config.page else ()),
    ]
    middleware = RequestMiddleware(Router(routes, redirect_slashes=False), config, meters)
    operations.middleware = middleware
    server = _Server(config, middleware)
    meters.watch(
        lambda: State(
            middleware.open_requests,
            len(server.server_state.connections),
            middleware.body_budget.bytes,
            generations.kept_bytes,
        ),
        services,
        kept,
    )
    async with AsyncExitStack() as running:
        running.push_async_callback(tasks.to_thread, tracing.stop)
        await running.enter_async_context(services.watched())
        await running.enter_async_context(kept.brought())
        await services.first_look()
        await server.serve([_listen(config.listen)])


def _with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Allows pages of these origins to read responses, errors included, and to send preflight requests without a
    token."""
    if not origins:
        return app
    return CORSMiddleware(
        app, allow_origins=origins, allow_methods=("GET", "POST"), allow_headers=("*",), expose_headers=_EXPOSED
    )


def _listen(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host.strip("[]"), int(port)), family=family, backlog=2048)
    except OSError as error:
        number = error.errno or 0  # errors of look-ups are negative, and have texts of their own
        cause = os.strerror(number) if number > 0 else error.strerror or error
        raise OSError(f"cannot listen on {address}: {cause}; --listen says where else") from error


class _Server(uvicorn.Server):
    """uvicorn, with our signals, our `ready` line and our way to end."""

    def __init__(self, config: GatewayConfig, middleware: RequestMiddleware) -> None:
        connection = type(
            "Connection",
            (Connection,),
            {
                "head_seconds": config.request_stall_seconds,
                "answer_seconds": config.answer_stall_seconds,
                "max_connections": config.max_connections,
            },
        )
        super().__init__(
            uvicorn.Config(
                _with_cors(middleware, config.allow_origins),
                http=connection,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="error",  # strangers' requests must not fill the log
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                ssl_certfile=config.tls_cert or None,
                ssl_keyfile=config.tls_key or None,
            )
        )
        self._middleware = middleware
        self._host = config.listen.rpartition(":")[0]
        self._grace = config.grace_seconds
        self._files = TlsFiles(config.tls_cert, config.tls_key) if config.tls_cert else None
        self._renewing: asyncio.Task[None] | None = None

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """A signal ends the serving, and nothing else."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        yield

    def _stop(self) -> None:
        self.should_exit = True  # uvicorn looks ten times a second
        self._middleware.draining = True
        for connection in self.server_state.connections:
            connection.shutdown()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens, and says so on standard output."""
        if self._files:
            self._files.read()
            self._renewing = tasks.start(self._renew(self._files), "renew certificates")
        await super().startup(sockets)
        assert sockets is not None
        address = f"{self._host}:{sockets[0].getsockname()[1]}"
        freeze_objects()
        unsaid = say(f"ready http={address}")
        _log.info("ready", address=address, **({"standard_output": unsaid} if unsaid else {}))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """New connections are refused, running requests get the grace time; then they are ended, each with an error."""
        _log.info("draining", grace_seconds=self._grace, open_requests=self._middleware.open_requests)
        stopping = Unavailable("the gateway stops and has ended this request", reason="CALL_ENDED")
        ending = asyncio.get_running_loop().call_later(self._grace, self._middleware.end_all, stopping)
        self.config.timeout_graceful_shutdown = self._grace + _ENDING_SECONDS  # type: ignore[assignment]
        await self._stop_listening(sockets or ())
        hanging_up = asyncio.create_task(self._hang_up())
        await super().shutdown(sockets)
        if self._renewing:
            self._renewing.cancel()
        hanging_up.cancel()
        ending.cancel()

    async def _renew(self, files: TlsFiles) -> None:
        """Has connections from now on be shown the certificate that the files hold now."""
        while True:
            await asyncio.sleep(_CERTIFICATE_SECONDS)
            if files.changed() and self.config.ssl:
                self.config.ssl.load_cert_chain(str(self.config.ssl_certfile), str(self.config.ssl_keyfile))

    async def _hang_up(self) -> None:
        """Closes idle connections, once no request is left and requests in transit have arrived."""
        await asyncio.sleep(_LAST_SECONDS)
        while True:
            if not self._middleware.open_requests:
                for connection in list(self.server_state.connections):
                    assert isinstance(connection, Connection)
                    connection.hang_up()
            await asyncio.sleep(_LAST_SECONDS / 10)

    async def _stop_listening(self, sockets: Sequence[socket.socket]) -> None:
        """Takes the connections that the kernel has accepted for us: closing would reset them under their requests."""
        accepted = []
        for listening in sockets:
            with suppress(BlockingIOError):  # there is none left
                while True:
                    accepted.append(listening.accept()[0])
        for server in self.servers:
            server.close()
        loop = asyncio.get_running_loop()
        context = self.config.ssl if self.config.is_ssl else None
        seconds = _HANDSHAKE_SECONDS if context else None
        for connection in accepted:
            connection.setblocking(False)
        await asyncio.gather(
            *(
                loop.connect_accepted_socket(self._connection, each, ssl=context, ssl_handshake_timeout=seconds)
                for each in accepted
            ),
            return_exceptions=True,
        )

    def _connection(self) -> Connection:
        connection: Connection = self.config.http_protocol_class(  # type: ignore[call-arg, assignment]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        connection.shutdown()
        return connection
