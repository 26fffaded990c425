"""The routing key, by which requests reach the service that has computed their beginning."""

from __future__ import annotations

import hashlib

from common.aio import tasks
from twinlens.v1 import llm_pb2

_CHARACTERS, _TOKENS = 2048, 512
"""Characters and tokens of a prompt's beginning that determine its service."""
_LARGE = 256 << 10
"""Bytes of a request that is hashed in a thread."""


Request = llm_pb2.GenerateRequest | llm_pb2.EmbedRequest


async def key_of(request: Request) -> bytes:
    """The routing key; in a thread if there are megabytes to hash."""
    return await tasks.to_thread(routing_key, request) if request.ByteSize() > _LARGE else routing_key(request)


def routing_key(request: Request) -> bytes:
    """The conversation's name; or else the tenant, the prompt up to the first question's end, and the first of its
    media as it is given."""
    if isinstance(request, llm_pb2.GenerateRequest) and request.session_id:
        return hashlib.sha256(f"session\0{request.cache_salt}\0{request.session_id}".encode()).digest()
    digest = hashlib.sha256(f"prompt\0{request.cache_salt}\0".encode())
    match request.WhichOneof("input"):
        case "chat":
            room = _CHARACTERS
            for message in request.chat.messages:
                for part in message.parts:
                    digest.update(part.text[:room].encode())
                    room -= len(part.text[:room])
                if message.role == "user":
                    break
            media = (
                part.media for message in request.chat.messages for part in message.parts if part.HasField("media")
            )
            if (first := next(media, None)) is not None:
                digest.update(first.SerializeToString(deterministic=True))
        case "text":
            digest.update(request.text.prompt[:_CHARACTERS].encode())
        case "tokens":
            digest.update(repr(request.tokens.ids[:_TOKENS]).encode())
        case "transcription":
            assert isinstance(request, llm_pb2.GenerateRequest)
            digest.update(request.transcription.audio.SerializeToString(deterministic=True))
        case _:
            pass
    return digest.digest()
