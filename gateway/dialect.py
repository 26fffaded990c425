"""The API that a request belongs to: the format of its errors, and how callers send their token."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from pydantic_core import to_json

from common.errors import TwinlensError
from gateway.errors import NOT_SERVED, body_of, message_of, status_of

_MESSAGES = "/v1/messages"
_SHARED = "/v1/models"
"""A path of both APIs: callers of Anthropic's send its version."""
_VERSION = b"anthropic-version"
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_NO_THREAD = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
"""Of a request for a thread: Anthropic's clients ask for one by themselves, and on this word go on without it."""


class OpenAI:
    """OpenAI's, and ours."""

    id_headers: tuple[bytes, ...] = (b"x-request-id",)
    """Headers of an answer that name its request."""
    error_event: bytes = b""
    """The line that marks an event as an error."""

    def tokens(self, headers: Mapping[bytes, str]) -> list[bytes]:
        """The tokens in a request's headers, at least one."""
        kind, _, token = headers.get(b"authorization", "").partition(" ")
        return [token.strip().encode("latin-1") if kind.lower() == "bearer" else b""]

    def error(self, error: TwinlensError, request_id: str) -> bytes:  # noqa: ARG002
        """The body that tells of an error."""
        return body_of(error)


class Anthropic(OpenAI):
    """Anthropic's API, whose errors have no field of their own for the parameter at fault."""

    id_headers = (b"x-request-id", b"request-id")
    error_event = b"event: error\n"

    def tokens(self, headers: Mapping[bytes, str]) -> list[bytes]:
        """An API key counts as a bearer token does."""
        return [headers.get(b"x-api-key", "").encode("latin-1"), *super().tokens(headers)]

    def error(self, error: TwinlensError, request_id: str) -> bytes:
        """`{"type": "error", "error": {"type", "message", "details": {"error_code"}}, "request_id"}`."""
        status = status_of(error)
        threads = (error.reason, error.field) == (NOT_SERVED, "thread")
        said = {
            "type": _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error"),
            "message": message_of(error),
            "details": _NO_THREAD if threads else {"error_code": error.reason},
        }
        return to_json({"type": "error", "error": said, "request_id": request_id})


_OPENAI: Final = OpenAI()
_ANTHROPIC: Final = Anthropic()


def dialect_of(path: str, headers: Mapping[bytes, str] = MappingProxyType({})) -> OpenAI:
    """The API that a request is of."""
    anthropic = _is_below(_MESSAGES, path) or (_VERSION in headers and _is_below(_SHARED, path))
    return _ANTHROPIC if anthropic else _OPENAI


def _is_below(folder: str, path: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")
