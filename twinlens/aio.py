"""The client for an event loop: `twinlens.client`, awaited, with the same deadlines and errors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self, TypeVar

import grpc.aio
from google.protobuf.message import Message

from twinlens import v1
from twinlens.answers import Answer
from twinlens.channel import REQUEST_BYTES, Endpoint, capped
from twinlens.client import (
    LOAD_TIMEOUT,
    STREAM_TIMEOUT,
    UNARY_TIMEOUT,
    as_embed_request,
    as_encode_request,
    as_request,
    tokenize_request,
)
from twinlens.errors import error_from
from twinlens.prompts import Prompt, generate_request, transcription, user
from twinlens.streams import AsyncStream

Reply = TypeVar("Reply", bound=Message)


class _AsyncClient:
    """A channel to one service, closed with the client."""

    def __init__(self, endpoint: Endpoint | str, *, timeout: float = STREAM_TIMEOUT) -> None:
        self.endpoint = Endpoint(endpoint) if isinstance(endpoint, str) else endpoint
        self.timeout = timeout
        self._channel = self.endpoint.open_async()
        self._metadata = self.endpoint.metadata

    async def close(self) -> None:
        """Ends every call under way and the connection."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _about(self, request: Message) -> tuple[tuple[str, str], ...]:
        """The metadata of a call with a large request: its size, so that a service without room can say so."""
        return (*self._metadata, (REQUEST_BYTES, str(request.ByteSize())))

    def _limit(self, timeout: float | None) -> float:
        return capped(self.timeout if timeout is None else timeout)

    async def _unary(self, method: Callable[..., Awaitable[Reply]], request: Message, timeout: float) -> Reply:
        try:
            return await method(request, timeout=capped(timeout), metadata=self._about(request))
        except grpc.aio.AioRpcError as error:
            raise error_from(error) from None


class AsyncLlmClient(_AsyncClient):
    """Calls an LLM service. Made, used and closed in one event loop."""

    def __init__(self, endpoint: Endpoint | str = "127.0.0.1:7002", *, timeout: float = STREAM_TIMEOUT) -> None:
        super().__init__(endpoint, timeout=timeout)
        self._stub = v1.LlmServiceStub(self._channel)

    async def ask(
        self,
        question: str,
        *media: v1.Media,
        sampling: v1.SamplingParams | None = None,
        cache_salt: str = "",
        session_id: str = "",
        timeout: float | None = None,
    ) -> Answer:
        """Asks about pictures and videos and waits for the whole answer.

        Nothing is shared with requests of another `cache_salt`; what a `session_id` has used is kept for its next turn.
        """
        answer = Answer()
        request = generate_request(user(*media, question), sampling, cache_salt=cache_salt, session_id=session_id)
        async with self.generate(request, timeout=timeout) as events:
            async for event in events:
                answer.add(event)
        return answer

    def generate(
        self,
        prompt: Prompt | v1.GenerateRequest,
        sampling: v1.SamplingParams | None = None,
        *,
        timeout: float | None = None,
    ) -> AsyncStream[v1.GenerateResponse]:
        """Streams a generation: `started`, then `delta`s, then one `finished` for each choice.

        A `GenerateRequest` (see `twinlens.prompts.generate_request`) names salt, priority and the rest; its
        own sampling stands, so giving `sampling` too is a ValueError.
        """
        request = as_request(prompt, sampling)
        return AsyncStream(self._stub.Generate(request, timeout=self._limit(timeout), metadata=self._about(request)))

    async def embed(
        self,
        prompt: Prompt | v1.EmbedRequest,
        *,
        dimensions: int | None = None,
        cache_salt: str = "",
        timeout: float | None = None,
    ) -> v1.EmbedResponse:
        """Waits for the embedding of a prompt, its media included: `values`, `dimensions` of them (None: all).

        An `EmbedRequest` (see `twinlens.prompts.embed_request`) names model, priority and the rest; giving anything
        else beside it is a ValueError.
        """
        request = as_embed_request(prompt, dimensions, cache_salt)
        return await self._unary(self._stub.Embed, request, self._limit(timeout))

    async def transcribe(
        self,
        sound: v1.Media,
        *,
        language: str = "",
        prompt: str = "",
        turns: bool = False,
        sampling: v1.SamplingParams | None = None,
        cache_salt: str = "",
        timeout: float | None = None,
    ) -> Answer:
        """Waits for the words of a sound (see `twinlens.prompts.transcription`), by default the likeliest ones."""
        answer = Answer()
        asked = transcription(sound, language=language, prompt=prompt, turns=turns)
        request = generate_request(asked, sampling or v1.SamplingParams(temperature=0), cache_salt=cache_salt)
        async with self.generate(request, timeout=timeout) as events:
            async for event in events:
                answer.add(event)
        return answer

    async def abort(self, *request_ids: str, cache_salt: str = "", timeout: float = UNARY_TIMEOUT) -> int:
        """Ends requests with these ids under this salt; returns how many were running."""
        request = v1.AbortRequest(request_ids=request_ids, cache_salt=cache_salt)
        return (await self._unary(self._stub.Abort, request, timeout)).aborted

    async def tokenize(
        self,
        prompt: str | v1.ChatMessage | Sequence[v1.ChatMessage],
        *,
        allow_special: bool = False,
        add_special_tokens: bool = False,
        timeout: float = UNARY_TIMEOUT,
    ) -> list[int]:
        """The token ids of a text, or of messages as the chat template lays them out."""
        request = tokenize_request(prompt, allow_special, add_special_tokens)
        return list((await self._unary(self._stub.Tokenize, request, timeout)).ids)

    async def detokenize(self, *ids: int, timeout: float = UNARY_TIMEOUT) -> str:
        """The text of token ids, special tokens by their names."""
        return (await self._unary(self._stub.Detokenize, v1.DetokenizeRequest(ids=ids), timeout)).text

    async def get_info(self, *, timeout: float = UNARY_TIMEOUT) -> v1.LlmServiceGetInfoResponse:
        """The service's description."""
        return await self._unary(self._stub.GetInfo, v1.LlmServiceGetInfoRequest(), timeout)

    async def get_load(self, *, timeout: float = UNARY_TIMEOUT) -> v1.LlmServiceGetLoadResponse:
        """Its queues and counters."""
        return await self._unary(self._stub.GetLoad, v1.LlmServiceGetLoadRequest(), timeout)

    async def load_adapter(self, name: str, path: str, *, timeout: float = LOAD_TIMEOUT) -> v1.Adapter:
        """Has it read a LoRA adapter from a folder below its --lora-dir; requests may name it as their model."""
        request = v1.LoadAdapterRequest(name=name, path=path)
        response = await self._unary(self._stub.LoadAdapter, request, timeout)
        return response.adapter

    async def unload_adapter(self, name: str, *, timeout: float = UNARY_TIMEOUT) -> v1.Adapter:
        """Takes an adapter's name away; requests that have begun with it end as they would."""
        response = await self._unary(self._stub.UnloadAdapter, v1.UnloadAdapterRequest(name=name), timeout)
        return response.adapter

    async def flush_cache(self, *, timeout: float = UNARY_TIMEOUT) -> v1.LlmServiceFlushCacheResponse:
        """Makes it forget cached KV blocks and rows that no request uses."""
        return await self._unary(self._stub.FlushCache, v1.LlmServiceFlushCacheRequest(), timeout)


class AsyncEncoderClient(_AsyncClient):
    """Calls an encoder service. Made, used and closed in one event loop."""

    def __init__(self, endpoint: Endpoint | str = "127.0.0.1:7001", *, timeout: float = STREAM_TIMEOUT) -> None:
        super().__init__(endpoint, timeout=timeout)
        self._stub = v1.EncoderServiceStub(self._channel)

    def encode(
        self, request: v1.EncodeRequest | v1.Media, *, timeout: float | None = None
    ) -> AsyncStream[v1.EncodeResponse]:
        """Streams an encode: for each item `header`, `rows`, `done`; or an `error` for that item alone."""
        request = as_encode_request(request)
        return AsyncStream(self._stub.Encode(request, timeout=self._limit(timeout), metadata=self._about(request)))

    async def probe(self, *keys: bytes, cache_salt: str = "", timeout: float = UNARY_TIMEOUT) -> list[bool]:
        """Which content keys are in the store, in the order asked."""
        request = v1.ProbeRequest(keys=keys, cache_salt=cache_salt)
        return list((await self._unary(self._stub.Probe, request, timeout)).present)

    async def prefetch(self, request: v1.PrefetchRequest, *, timeout: float | None = None) -> v1.PrefetchResponse:
        """Starts encoding into the store; returns headers without waiting for rows."""
        return await self._unary(self._stub.Prefetch, request, self._limit(timeout))

    async def release(self, *leases: str, timeout: float = UNARY_TIMEOUT) -> int:
        """Gives leases back; returns how many were still held."""
        return (await self._unary(self._stub.Release, v1.ReleaseRequest(leases=leases), timeout)).released

    async def get_info(self, *, timeout: float = UNARY_TIMEOUT) -> v1.EncoderServiceGetInfoResponse:
        """The service's description."""
        return await self._unary(self._stub.GetInfo, v1.EncoderServiceGetInfoRequest(), timeout)

    async def get_load(self, *, timeout: float = UNARY_TIMEOUT) -> v1.EncoderServiceGetLoadResponse:
        """Its queues, counters and store."""
        return await self._unary(self._stub.GetLoad, v1.EncoderServiceGetLoadRequest(), timeout)

    async def flush_cache(self, *, timeout: float = UNARY_TIMEOUT) -> v1.EncoderServiceFlushCacheResponse:
        """Makes it forget every entry that no one is reading."""
        return await self._unary(self._stub.FlushCache, v1.EncoderServiceFlushCacheRequest(), timeout)
