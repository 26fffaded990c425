"""Errors in OpenAI's shape: our stable reason is the `code`, unless OpenAI has a word for it, the field at fault the
`param`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import to_json

from common import errors
from common.errors import InvalidInput, TwinlensError, Unsupported

LONGEST = 128
"""Characters of a param; a field's name is the caller's own."""

TOO_LONG = "PROMPT_TOO_LONG"
"""The reason of a prompt that exceeds the context, for which OpenAI has a code of its own."""
NOT_SERVED = "FIELD_NOT_SERVED"
"""The reason of a field, or kind, that is not served."""
NOT_STORED = "not_stored"
"""The kind of violation of a reference to what would have to be stored here."""
_CODES = {TOO_LONG: "context_length_exceeded"}
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class TooLarge(InvalidInput):
    """The body, or the request made from it, is too large."""


class Compressed(InvalidInput):
    """The body has an encoding that is not taken."""


class Stalled(TwinlensError):
    """The rest of the request does not arrive. The connection is closed, since later data would not be a request."""


class NoRoute(TwinlensError):
    """There is nothing at this path, or not for this method."""

    default_reason = "NOT_FOUND"

    def __init__(self, status: int, message: str, allowed: str = "") -> None:
        super().__init__(message, reason="NOT_FOUND" if status == 404 else "METHOD_NOT_ALLOWED")
        self.status = status
        self.allowed = allowed


class NotEverywhere(TwinlensError):
    """Some LLM services have done what all were asked to, or they refused it for different reasons: the outcome by the
    service's address, None if it succeeded."""

    default_reason = "NOT_EVERYWHERE"

    def __init__(self, outcomes: Mapping[str, TwinlensError | None]) -> None:
        done = sum(error is None for error in outcomes.values())
        super().__init__(f"{done} of {len(outcomes)} LLM services have done it; `services` shows the others' results")
        self.outcomes = outcomes


def status_of(error: TwinlensError) -> int:
    """The HTTP status."""
    match error:
        case TooLarge():
            return 413
        case Compressed():
            return 415
        case Stalled():
            return 408
        case NoRoute(status=status):
            return status
        case NotEverywhere():
            return 502
        case Unsupported() if error.reason != Unsupported.default_reason:
            return 400  # the model lacks it; other releases would not help
        case _:
            return int(errors.outcome(error).http)


def headers_of(error: TwinlensError) -> list[tuple[bytes, bytes]]:
    """When a retry can help, and, for clients that would retry by the status alone, whether one can."""
    retryable = error.retry_after is not None
    headers = [(b"x-should-retry", b"true" if retryable else b"false")]
    if error.retry_after is not None:
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after))))
    if isinstance(error, NoRoute) and error.allowed:
        headers.append((b"allow", error.allowed.encode()))
    if isinstance(error, Compressed):
        headers.append((b"accept-encoding", b"identity"))
    if isinstance(error, Stalled):
        headers.append((b"connection", b"close"))
    if status_of(error) == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    return headers


def code_of(error: TwinlensError) -> str:
    """The error's `code` in OpenAI's API."""
    return _CODES.get(error.reason, error.reason)


def param_in(error: TwinlensError) -> str | None:
    """The field at fault, if there is one."""
    return error.field[:LONGEST] or None


def message_of(error: TwinlensError) -> str:
    """The message, which begins with the field at fault: most clients show their callers nothing else. That of a prompt
    that is too long does not, since clients know it by its beginning."""
    field = "" if error.reason == TOO_LONG else error.field[:LONGEST]
    begins = error.message.partition(" ")[0] == field
    return error.message if begins or not field else f"{field}: {error.message}"


def body_of(error: TwinlensError) -> bytes:
    """`{"error": {"message", "type", "param", "code"}}`; for partial failures with `services` beside it."""
    status = status_of(error)
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    said = {"message": message_of(error), "type": kind, "param": param_in(error), "code": code_of(error)}
    return to_json(
        {"error": said, "services": _services(error)} if isinstance(error, NotEverywhere) else {"error": said}
    )


def _services(error: NotEverywhere) -> list[dict[str, str | None]]:
    return [
        {"address": address, "code": its.reason, "message": its.message} if its else {"address": address, "code": None}
        for address, its in error.outcomes.items()
    ]


def from_validation(error: ValidationError) -> InvalidInput:
    """The error for a request's body, from the first violation."""
    first: Any = error.errors(include_url=False, include_input=False)[0]
    field = _path(first["loc"])
    match first["type"]:
        case "json_invalid":
            return InvalidInput(first["msg"], reason="BAD_JSON")
        case "extra_forbidden":
            return InvalidInput("this field is not supported", reason=NOT_SERVED, field=field)
        case code if code == NOT_STORED:
            return InvalidInput(first["msg"], reason=NOT_SERVED, field=field)
        case "union_tag_invalid":
            *others, last = re.findall(r"\$(\w+)", first["ctx"]["expected_tags"])
            only = f"{', '.join(others)} and {last}" if others else last
            return InvalidInput(f"this kind is not supported, only {only}", reason=NOT_SERVED, field=f"{field}.type")
        case "union_tag_not_found":
            return InvalidInput("its type is missing", reason="BAD_FIELD", field=f"{field}.type")
        case "list_type" if str(first["loc"][-1]).startswith("$"):
            return InvalidInput("it is neither a string nor an array", reason="BAD_FIELD", field=field)
        case "too_short":
            least = first["ctx"]["min_length"]
            why = f"it has fewer than {least} {'item' if least == 1 else 'items'}"
            return InvalidInput(why, reason="BAD_FIELD", field=field)
        case "value_error":
            return InvalidInput(first["msg"].removeprefix("Value error, "), reason="BAD_FIELD", field=field)
        case _:
            return InvalidInput(first["msg"], reason="BAD_FIELD", field=field)


def _path(location: tuple[str | int, ...]) -> str:
    """A field's path; names of alternatives, which begin with $, are no part of it.

    >>> _path(("messages", 0, "content", "$parts", 1, "$text", "text"))
    'messages[0].content[1].text'
    """
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif not step.startswith("$"):
            path += f".{step[:LONGEST]}" if path else step[:LONGEST]
    return path


ErrorT = TypeVar("ErrorT", bound=TwinlensError)


def called(error: ErrorT, names: Mapping[str, str]) -> ErrorT:
    """The same error, by the name that its field has for the caller, in a message that begins with that as well."""
    name = names.get(error.field, error.field)
    own = error.at(name)
    first, space, rest = error.message.partition(" ")
    if first == error.field:
        own.message = name + space + rest
    return own


_OURS = {
    "session_id": "prompt_cache_key",
    "text.prompt": "prompt",
    "tokens.ids": "prompt",
    "ids": "tokens",
    "chat.thinking": "chat_template_kwargs.enable_thinking",
    "chat.template_variables": "chat_template_kwargs",
}
_TOOL = re.compile(r"chat\.(tools\[\d+\])\.(\w+)")
_CHAT = re.compile(r"chat\.messages\[(\d+)\](?:\.parts\[(\d+)\])?(?:\.(role)\b)?.*")


def param_of(field: str) -> str:
    """What callers know by another name than the contract.

    >>> param_of("chat.messages[0].parts[1].media.modality"), param_of("sampling.top_p"), param_of("session_id")
    ('messages[0].content[1]', 'top_p', 'prompt_cache_key')
    """
    if match := _CHAT.fullmatch(field):
        message, part, role = match.groups()
        return f"messages[{message}]" + (f".content[{part}]" if part else ".role" if role else "")
    if match := _TOOL.fullmatch(field):
        return f"{match[1]}.function.{match[2]}"
    if field in _OURS:
        return _OURS[field]
    if field.startswith("transcription.audio"):
        return "file"
    return field.removeprefix("sampling.").removeprefix("chat.").removeprefix("transcription.")
