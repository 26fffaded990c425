"""The frame of a gRPC server, independent of the service: ports, TLS, tokens, health, reflection, draining. `bind`
opens the port; `announce` publishes to health checks what was `report`ed, and prints `ready grpc=HOST:PORT`, with `
metrics=…` if there are metrics; `wait` returns on SIGTERM or SIGINT; `drain` lets calls in progress finish."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from common.config import is_port, option, size
from common.errors import Unavailable
from common.process.descriptors import say
from common.rpc import reflection
from common.rpc.bearer_tokens import AcceptedTokens, of_option
from common.rpc.calls import CallInterceptor
from common.rpc.request_budget import UNREAD, RequestBudget, max_large_bytes
from common.rpc.tls_files import Certificates, TlsFiles
from common.telemetry import log
from twinlens import credentials

_log = log.get("server")

LISTEN: Final = "address to serve gRPC on; port 0 picks a free one"
"""The meaning of --listen; each service has its own default."""

_LAST_WORDS_SECONDS = 0.5
"""Time for sending the statuses of calls that have just ended; shorter if nobody watches health."""

_ENDING_SECONDS = 5.0
"""Time that calls ended after the grace period have to give back what they hold; they have their status by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Options that every server has."""

    listen: str = option("127.0.0.1:0", LISTEN)
    tls_cert: str = option(
        "", "PEM certificate chain; with --tls-key, the port speaks only TLS", group="TLS and tokens"
    )
    tls_key: str = option("", "PEM private key of --tls-cert")
    tls_client_ca: str = option("", "PEM roots; callers must then show a certificate signed by one of them")
    auth_token: str = option("", "callers must send `authorization: Bearer TOKEN`", secret=True)
    auth_token_file: str = option("", "file of such tokens, one a line, in place of --auth-token; callers send one")
    grace_seconds: float = option(30.0, "on SIGTERM, running calls get this long to finish", minimum=0, group="calls")
    max_inflight_bytes: int = option(
        256 << 20,
        "bytes of requests held or arriving at once; further ones are refused",
        parse=size,
        minimum=2 << 20,
    )
    request_stall_seconds: float = option(
        10.0, "a request whose connection brings less than 64 KiB in this time is dropped", minimum=0.1
    )
    max_concurrent_calls: int = option(
        1024, "calls served at once; further ones are refused", minimum=1, maximum=(1 << 30) - 1
    )
    max_message_bytes: int = option(
        68 << 20, "largest gRPC message accepted", parse=size, minimum=1 << 20, maximum=(1 << 31) - 1
    )
    metrics_listen: str = option(
        "", "address to serve Prometheus metrics on, plain HTTP; port 0 picks a free one", group="monitoring"
    )
    log_level: str = option("info", "what is logged", choices=("debug", "info", "warning", "error"))

    def check_server(self) -> None:
        """Raises ValueError if server options contradict each other."""
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError("--tls-cert and --tls-key go together")
        if self.tls_client_ca and not self.tls_cert:
            raise ValueError("--tls-client-ca needs --tls-cert")
        credentials.check_files(
            ca=("--tls-client-ca", self.tls_client_ca),
            cert=("--tls-cert", self.tls_cert),
            key=("--tls-key", self.tls_key),
        )
        if self.auth_token and self.auth_token_file:
            raise ValueError("give --auth-token or --auth-token-file, not both")
        if max_large_bytes(self.max_inflight_bytes) < self.max_message_bytes:
            raise ValueError(
                "--max-inflight-bytes must be at least 16/7 of --max-message-bytes, or the largest message would never"
                " be admitted"
            )
        with of_option("--auth-token-file" if self.auth_token_file else "--auth-token"):
            self.accepted()
        host, _, port = self.listen.rpartition(":")
        if not (host and is_port(port)):  # gRPC would take another port, or 443, and say nothing
            raise ValueError("--listen must be HOST:PORT, with a port of at most 65535")
        port = self.metrics_listen.rpartition(":")[2]
        if self.metrics_listen and not (is_port(port) and ":" in self.metrics_listen):
            raise ValueError("--metrics-listen must be HOST:PORT, with a port of at most 65535")

    def accepted(self) -> AcceptedTokens:
        """The tokens that callers must send. Raises as `read_tokens`."""
        return AcceptedTokens(self.auth_token, self.auth_token_file)


PINGS = (("grpc.http2.min_ping_interval_without_data_ms", 1_000), ("grpc.http2.max_ping_strikes", 0))
"""Lets clients check a silent connection as often as ours do: by default gRPC hangs up on them."""


def _is_no_departure(record: logging.LogRecord) -> bool:
    """gRPC logs an error with traceback if a call's last message cannot be sent because its client has just left; the
    call's outcome has a line of ours."""
    return not (record.exc_info and type(record.exc_info[1]).__name__ == "ExecuteBatchError")


class GrpcServer:
    """One listening gRPC server; `names` are the full names of the services that the owner adds to `server`."""

    def __init__(self, config: ServerConfig, names: Sequence[str]) -> None:
        self._config = config
        self._names = tuple(names)
        self._stop = asyncio.Event()
        self._announced, self._ready = False, True
        self._reports: set[asyncio.Task[None]] = set()
        self._budget = RequestBudget(
            config.max_inflight_bytes, config.max_message_bytes, stall_seconds=config.request_stall_seconds
        )
        self._interceptor = CallInterceptor(config.accepted(), config.max_concurrent_calls, self._budget)
        pending = min(16 * config.max_concurrent_calls, (1 << 31) - 1)  # of all connections; each has two times as many
        self.server = grpc.aio.server(
            interceptors=[self._interceptor],
            options=[
                ("grpc.max_receive_message_length", config.max_message_bytes),
                ("grpc.max_send_message_length", -1),  # we decide what we send
                # More than are served: beyond this, calls wait at their client, which hears nothing and takes us for
                # dead.
                ("grpc.max_concurrent_streams", 2 * config.max_concurrent_calls),
                # Of more calls than 1000 that no handler has taken yet, gRPC by itself cancels some by chance.
                ("grpc.server.max_pending_requests", pending),
                ("grpc.server.max_pending_requests_hard_limit", pending),
                # What gRPC reads of a message before anyone asks for it, on each stream (common/rpc/request_budget.py).
                ("grpc.http2.lookahead_bytes", UNREAD),
                ("grpc.http2.bdp_probe", 0),
                # Otherwise calls that have waited for half a minute for a busy event loop are cancelled without a
                # reason.
                ("grpc.server_max_unrequested_time_in_server", 3600),
                ("grpc.so_reuseport", 0),
                ("grpc.keepalive_time_ms", 10_000),
                ("grpc.keepalive_timeout_ms", 5_000),
                ("grpc.http2.ping_timeout_ms", 5_000),  # else it takes a minute to notice that a client's host is gone
                *PINGS,
                ("grpc.keepalive_permit_without_calls", 1),
            ],
        )
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        reflection.serve((*self._names, health.SERVICE_NAME), self.server)
        self.address = ""
        logging.getLogger("grpc._cython.cygrpc").addFilter(_is_no_departure)

    def watch(self, on_error: Callable[[str], None]) -> None:
        """Has `on_error` told the reason of each call that ends in an error."""
        self._interceptor.on_error = on_error

    async def bind(self) -> None:
        """Opens the port and answers health checks (NOT_SERVING). Raises OSError if the port cannot be opened."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        host = self._config.listen.rpartition(":")[0]
        try:
            if credentials := self._credentials():
                port = self.server.add_secure_port(self._config.listen, credentials)
            else:
                port = self.server.add_insecure_port(self._config.listen)
        except RuntimeError as error:
            raise OSError(
                f"cannot listen on {self._config.listen}: another program uses it, or this machine has no such address;"
                " --listen says where else"
            ) from error
        self.address = f"{host}:{port}"
        await self._publish()
        await self.server.start()

    async def announce(self, metrics: str = "") -> None:
        """Every service is SERVING from now on, unless its owner has reported otherwise. Prints that to standard
        output; `metrics` is their address."""
        self._announced = True
        await self._publish()
        unsaid = say(f"ready grpc={self.address}" + (f" metrics={metrics}" if metrics else ""))
        _log.info("ready", address=self.address, metrics=metrics, **({"standard_output": unsaid} if unsaid else {}))

    def report(self, ready: bool) -> None:
        """Whether the services can serve, at any time: health checks say so once the server has been announced, and
        until it drains."""
        self._ready = ready
        if self._announced and not self.stopping:
            task = asyncio.create_task(self._publish())
            self._reports.add(task)
            task.add_done_callback(self._reports.discard)

    async def _publish(self) -> None:
        """Publishes the current state to health checks: of concurrent calls, the last to set a name sets it right."""
        for name in ("", *self._names):
            serving = self._announced and self._ready
            known = health_pb2.HealthCheckResponse
            await self._health.set(name, known.SERVING if serving else known.NOT_SERVING)

    async def wait(self) -> None:
        """Returns on SIGTERM, SIGINT or `stop`."""
        await self._stop.wait()

    def stop(self) -> None:
        """Makes `wait` return."""
        self._stop.set()

    @property
    def inflight_bytes(self) -> int:
        """Bytes counted for requests here and on their way in, of `max_inflight_bytes`."""
        return self._budget.held + self._budget.arriving

    @property
    def open_calls(self) -> int:
        """Calls under way, health checks excepted."""
        return self._interceptor.open_calls

    @property
    def stopping(self) -> bool:
        """A signal has come, or `stop` was called."""
        return self._stop.is_set()

    async def drain(self) -> None:
        """Health turns NOT_SERVING, new calls are refused, running ones get the grace time; then they are ended, and
        the port is closed.

        It is not gRPC that refuses and ends: it cancels calls without a word of why.
        """
        _log.info("draining", grace_seconds=self._config.grace_seconds, open_calls=self._interceptor.open_calls)
        self._interceptor.closed = True
        await self._health.enter_graceful_shutdown()
        if not await self._emptied(self._config.grace_seconds):
            _log.warning("ending calls", open_calls=self._interceptor.open_calls)
            self._interceptor.end_all(Unavailable("the service stops and has ended this call", reason="CALL_ENDED"))
            await self._emptied(_ENDING_SECONDS)
        await self.server.stop(_LAST_WORDS_SECONDS)

    async def _emptied(self, seconds: float) -> bool:
        """No call is open any more, within this time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._interceptor.empty()
        return not self._interceptor.open_calls

    def _credentials(self) -> grpc.ServerCredentials | None:
        config = self._config
        if not config.tls_cert:
            return None
        files = TlsFiles(config.tls_cert, config.tls_key, config.tls_client_ca)

        def replaced() -> grpc.ServerCertificateConfiguration | None:
            """Called at each handshake; None keeps the last certificate."""
            return _certificates(certificates) if (certificates := files.changed()) else None

        return grpc.dynamic_ssl_server_credentials(
            _certificates(files.read()),
            replaced,  # type: ignore[arg-type]  # None is what gRPC documents for it
            require_client_authentication=bool(config.tls_client_ca),
        )


def _certificates(certificates: Certificates) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(certificates.key, certificates.cert)], certificates.roots)
