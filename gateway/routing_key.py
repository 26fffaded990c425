"""The routing key, by which requests reach the service that has computed their beginning."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from common.aio import tasks
from twinlens.v1 import llm_pb2

_CHARACTERS, _TOKENS = 2048, 512
"""Characters and tokens of a prompt's beginning that determine its service."""
_LARGE = 256 << 10
"""Bytes of a request that is hashed in a thread."""


Request = llm_pb2.GenerateRequest | llm_pb2.EmbedRequest


async def key_of(request: Request) -> bytes:
    """The hash of the conversation's name; or else of the tenant, the prompt up to the first question's end, and the
    first of its media as it is given. In a thread if there are megabytes to hash."""
    beginning = _beginning(request)
    if sum(map(len, beginning)) > _LARGE:
        return await tasks.to_thread(_digest, beginning)
    return _digest(beginning)


def _digest(beginning: Sequence[bytes]) -> bytes:
    digest = hashlib.sha256()
    for piece in beginning:
        digest.update(piece)
    return digest.digest()


def _beginning(request: Request) -> list[bytes]:
    """What `key_of` hashes. protobuf finds a request's size by serialising all of it, so nobody asks for that."""
    if isinstance(request, llm_pb2.GenerateRequest) and request.session_id:
        return [f"session\0{request.cache_salt}\0{request.session_id}".encode()]
    found = [f"prompt\0{request.cache_salt}\0".encode()]
    match request.WhichOneof("input"):
        case "chat":
            room = _CHARACTERS
            for message in request.chat.messages:
                for part in message.parts if room else ():
                    text = part.text[:room]
                    found.append(text.encode())
                    room -= len(text)
                if message.role == "user":
                    break
            media = (
                part.media for message in request.chat.messages for part in message.parts if part.HasField("media")
            )
            if (first := next(media, None)) is not None:
                found.append(first.SerializeToString(deterministic=True))
        case "text":
            found.append(request.text.prompt[:_CHARACTERS].encode())
        case "tokens":
            found.append(repr(request.tokens.ids[:_TOKENS]).encode())
        case "transcription":
            assert isinstance(request, llm_pb2.GenerateRequest)
            found.append(request.transcription.audio.SerializeToString(deterministic=True))
        case _:
            pass
    return found
