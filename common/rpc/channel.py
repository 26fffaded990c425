"""A long-lived channel to another service: TLS, token, keepalive, and foreign statuses turned into our errors."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from common import errors
from common.rpc.bearer_tokens import TokenFile
from common.rpc.status import from_plain_status
from common.rpc.tls_files import TlsFiles
from twinlens.v1 import media_pb2

OPTIONS = (
    ("grpc.max_receive_message_length", 68 << 20),
    ("grpc.max_send_message_length", -1),  # the receiver decides how large a message may be
    # A frozen peer answers no ping; without ping_timeout_ms it would be noticed only after a minute.
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.ping_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    # Time limit of a connection, handshakes included. A slow or distant peer is not gone; and if there was no peer, the
    # kernel retries after 1 and 3 seconds, so that it is found soon after it returns.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_retries", 0),
    # `http_proxy` is for downloads; resolved addresses are connected to one by one, and no `no_proxy` lists them.
    ("grpc.enable_http_proxy", 0),
    # A window of four chunks from the first byte on, instead of probing for it (docs/design/link.md).
    ("grpc.http2.lookahead_bytes", 4 << 20),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.use_local_subchannel_pool", 1),  # channels to one address do not share one connection
)


@dataclass(frozen=True, slots=True)
class ChannelSecurity:
    """How to speak to the other side: PEM files (empty: no TLS, no client certificate) and a bearer token, or the file
    that holds it."""

    ca: str = ""
    cert: str = ""
    key: str = ""
    token: str = ""
    token_file: TokenFile | None = None

    @property
    def metadata(self) -> Sequence[tuple[str, str]]:
        """The metadata of every call; a token from a file is the current one."""
        token = self.token_file.token if self.token_file else self.token
        return (("authorization", f"Bearer {token}"),) if token else ()

    def files(self) -> TlsFiles | None:
        """Tells when channels must be reopened because their files were replaced; None without TLS.

        Raises OSError or ValueError if they cannot be used.
        """
        if not self.ca:
            return None
        files = TlsFiles(self.cert, self.key, self.ca, options=("certificate", "key", "roots"))
        files.read()
        return files


def open_channel(target: str, security: ChannelSecurity, *, name: str = "") -> grpc.aio.Channel:
    """A channel to `target`, which connects on first use and reconnects by itself.

    `name` is the host name that the other side's certificate must have, if `target` is a resolved address.
    """
    if not security.ca:
        return grpc.aio.insecure_channel(target, options=OPTIONS)
    credentials = grpc.ssl_channel_credentials(
        Path(security.ca).read_bytes(),
        Path(security.key).read_bytes() if security.key else None,
        Path(security.cert).read_bytes() if security.cert else None,
    )
    named = (("grpc.ssl_target_name_override", name),) if name else ()
    return grpc.aio.secure_channel(target, credentials, options=(*OPTIONS, *named))


def is_transport_error(error: grpc.aio.AioRpcError) -> bool:
    """Whether a call failed between the services, in gRPC or below: the other service stated no error. A deadline that
    has passed is our own, and no such failure."""
    return error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED and _stated(error) is None


def is_cut_off(call: grpc.aio.RpcContext) -> bool:
    """Whether a call raised CancelledError because its channel was closed, and not because of the waiting task."""
    task = asyncio.current_task()
    return bool(call.cancelled()) and task is not None and not task.cancelling()


def is_stream_reset(error: grpc.aio.AioRpcError) -> bool:
    """Whether the callee is up, but has too many calls to take one more: gRPC itself then resets the stream."""
    if _stated(error) is not None:
        return False
    return error.code() is grpc.StatusCode.CANCELLED or "RST_STREAM" in (error.details() or "")


def is_stream_refused(error: grpc.aio.AioRpcError) -> bool:
    """Whether gRPC at the other end refused the stream as one too many, so that the service has not seen the call."""
    return _stated(error) is None and "RST_STREAM with error code 7" in (error.details() or "")


def is_too_large(error: grpc.aio.AioRpcError) -> bool:
    """Whether gRPC has refused a message for its size: with the status that a full queue has, told by the words."""
    exhausted = error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and _stated(error) is None
    return exhausted and "larger than max" in (error.details() or "")


def from_rpc_error(error: grpc.aio.AioRpcError) -> errors.TwinlensError:
    """The error that a failed call stands for. A peer's free text is not passed on; our own fixed sentences are."""
    if (stated := _stated(error)) is not None:
        return stated
    number: int = error.code().value[0]
    return errors.from_code(number, "the other service could not be reached or failed", retry_after=1.0)


def _stated(error: grpc.aio.AioRpcError) -> errors.TwinlensError | None:
    """The error stated in a failed call's trailers; None if there is none, or it cannot be read."""
    trailers: dict[str, Any] = dict(error.trailing_metadata() or ())
    try:
        if packed := trailers.get("twinlens-status-bin"):
            return from_plain_status(media_pb2.Status.FromString(packed))
        if packed := trailers.get("grpc-status-details-bin"):
            rich = status_pb2.Status.FromString(packed)
            info = error_details_pb2.ErrorInfo()
            if any(detail.Unpack(info) for detail in rich.details):
                return errors.from_code(rich.code, rich.message, reason=info.reason)
    except DecodeError:
        return None
    return None
