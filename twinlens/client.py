"""The client for threads: one class for each service, over the generated stubs.

Every call has a deadline: `timeout` seconds of the client for a stream, from its first byte to its last, and
10 seconds for anything else, 300 to load an adapter; each call can name its own. Every failure is a TwinlensError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self, TypeVar, cast

import grpc
from google.protobuf.message import Message

from twinlens import v1
from twinlens.answers import Answer
from twinlens.channel import REQUEST_BYTES, Endpoint, capped
from twinlens.errors import FailedCall, error_from
from twinlens.prompts import Prompt, chat, embed_request, generate_request, transcription, user
from twinlens.streams import Stream

STREAM_TIMEOUT = 600.0
"""Seconds that a stream may take in all, unless the client or the call says otherwise."""

UNARY_TIMEOUT = 10.0
"""Seconds that any other call may take, unless it says otherwise."""

LOAD_TIMEOUT = 300.0
"""For calls that load a LoRA adapter, which may be large."""

Reply = TypeVar("Reply", bound=Message)


class _Client:
    """A channel to one service, closed with the client."""

    def __init__(self, endpoint: Endpoint | str, *, timeout: float = STREAM_TIMEOUT) -> None:
        self.endpoint = Endpoint(endpoint) if isinstance(endpoint, str) else endpoint
        self.timeout = timeout
        self._channel = self.endpoint.open()
        self._metadata = self.endpoint.metadata

    def close(self) -> None:
        """Ends every call under way and the connection."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _about(self, request: Message) -> tuple[tuple[str, str], ...]:
        """The metadata of a call with a large request: its size, so that a service without room can say so."""
        return (*self._metadata, (REQUEST_BYTES, str(request.ByteSize())))

    def _limit(self, timeout: float | None) -> float:
        return capped(self.timeout if timeout is None else timeout)

    def _unary(self, method: Callable[..., Reply], request: Message, timeout: float) -> Reply:
        try:
            return method(request, timeout=capped(timeout), metadata=self._about(request))
        except grpc.RpcError as error:
            raise error_from(cast(FailedCall, error)) from None


class LlmClient(_Client):
    """Calls an LLM service. Safe to use from several threads."""

    def __init__(self, endpoint: Endpoint | str = "127.0.0.1:7002", *, timeout: float = STREAM_TIMEOUT) -> None:
        super().__init__(endpoint, timeout=timeout)
        self._stub = v1.LlmServiceStub(self._channel)

    def ask(
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
        with self.generate(request, timeout=timeout) as events:
            for event in events:
                answer.add(event)
        return answer

    def generate(
        self,
        prompt: Prompt | v1.GenerateRequest,
        sampling: v1.SamplingParams | None = None,
        *,
        timeout: float | None = None,
    ) -> Stream[v1.GenerateResponse]:
        """Streams a generation: `started`, then `delta`s, then one `finished` for each choice.

        A `GenerateRequest` (see `twinlens.prompts.generate_request`) names salt, priority and the rest; its
        own sampling stands, so giving `sampling` too is a ValueError.
        """
        request = as_request(prompt, sampling)
        return Stream(self._stub.Generate(request, timeout=self._limit(timeout), metadata=self._about(request)))

    def embed(
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
        return self._unary(self._stub.Embed, request, self._limit(timeout))

    def transcribe(
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
        with self.generate(request, timeout=timeout) as events:
            for event in events:
                answer.add(event)
        return answer

    def abort(self, *request_ids: str, cache_salt: str = "", timeout: float = UNARY_TIMEOUT) -> int:
        """Ends requests with these ids under this salt; returns how many were running."""
        request = v1.AbortRequest(request_ids=request_ids, cache_salt=cache_salt)
        return self._unary(self._stub.Abort, request, timeout).aborted

    def tokenize(
        self,
        prompt: str | v1.ChatMessage | Sequence[v1.ChatMessage],
        *,
        allow_special: bool = False,
        add_special_tokens: bool = False,
        timeout: float = UNARY_TIMEOUT,
    ) -> list[int]:
        """The token ids of a text, or of messages as the chat template lays them out."""
        request = tokenize_request(prompt, allow_special, add_special_tokens)
        return list(self._unary(self._stub.Tokenize, request, timeout).ids)

    def detokenize(self, *ids: int, timeout: float = UNARY_TIMEOUT) -> str:
        """The text of token ids, special tokens by their names."""
        return self._unary(self._stub.Detokenize, v1.DetokenizeRequest(ids=ids), timeout).text

    def get_info(self, *, timeout: float = UNARY_TIMEOUT) -> v1.LlmServiceGetInfoResponse:
        """The service's description."""
        return self._unary(self._stub.GetInfo, v1.LlmServiceGetInfoRequest(), timeout)

    def get_load(self, *, timeout: float = UNARY_TIMEOUT) -> v1.LlmServiceGetLoadResponse:
        """Its queues and counters."""
        return self._unary(self._stub.GetLoad, v1.LlmServiceGetLoadRequest(), timeout)

    def load_adapter(self, name: str, path: str, *, timeout: float = LOAD_TIMEOUT) -> v1.Adapter:
        """Has it read a LoRA adapter from a folder below its --lora-dir; requests may name it as their model."""
        request = v1.LoadAdapterRequest(name=name, path=path)
        response = self._unary(self._stub.LoadAdapter, request, timeout)
        return response.adapter

    def unload_adapter(self, name: str, *, timeout: float = UNARY_TIMEOUT) -> v1.Adapter:
        """Takes an adapter's name away; requests that have begun with it end as they would."""
        response = self._unary(self._stub.UnloadAdapter, v1.UnloadAdapterRequest(name=name), timeout)
        return response.adapter

    def flush_cache(self, *, timeout: float = UNARY_TIMEOUT) -> v1.LlmServiceFlushCacheResponse:
        """Makes it forget cached KV blocks and rows that no request uses."""
        return self._unary(self._stub.FlushCache, v1.LlmServiceFlushCacheRequest(), timeout)


class EncoderClient(_Client):
    """Calls an encoder service. Safe to use from several threads."""

    def __init__(self, endpoint: Endpoint | str = "127.0.0.1:7001", *, timeout: float = STREAM_TIMEOUT) -> None:
        super().__init__(endpoint, timeout=timeout)
        self._stub = v1.EncoderServiceStub(self._channel)

    def encode(
        self, request: v1.EncodeRequest | v1.Media, *, timeout: float | None = None
    ) -> Stream[v1.EncodeResponse]:
        """Streams an encode: for each item `header`, `rows`, `done`; or an `error` for that item alone."""
        request = as_encode_request(request)
        return Stream(self._stub.Encode(request, timeout=self._limit(timeout), metadata=self._about(request)))

    def probe(self, *keys: bytes, cache_salt: str = "", timeout: float = UNARY_TIMEOUT) -> list[bool]:
        """Which content keys are in the store, in the order asked."""
        return list(self._unary(self._stub.Probe, v1.ProbeRequest(keys=keys, cache_salt=cache_salt), timeout).present)

    def prefetch(self, request: v1.PrefetchRequest, *, timeout: float | None = None) -> v1.PrefetchResponse:
        """Starts encoding into the store; returns headers without waiting for rows."""
        return self._unary(self._stub.Prefetch, request, self._limit(timeout))

    def release(self, *leases: str, timeout: float = UNARY_TIMEOUT) -> int:
        """Gives leases back; returns how many were still held."""
        return self._unary(self._stub.Release, v1.ReleaseRequest(leases=leases), timeout).released

    def get_info(self, *, timeout: float = UNARY_TIMEOUT) -> v1.EncoderServiceGetInfoResponse:
        """The service's description."""
        return self._unary(self._stub.GetInfo, v1.EncoderServiceGetInfoRequest(), timeout)

    def get_load(self, *, timeout: float = UNARY_TIMEOUT) -> v1.EncoderServiceGetLoadResponse:
        """Its queues, counters and store."""
        return self._unary(self._stub.GetLoad, v1.EncoderServiceGetLoadRequest(), timeout)

    def flush_cache(self, *, timeout: float = UNARY_TIMEOUT) -> v1.EncoderServiceFlushCacheResponse:
        """Makes it forget every entry that no one is reading."""
        return self._unary(self._stub.FlushCache, v1.EncoderServiceFlushCacheRequest(), timeout)


def as_request(prompt: Prompt | v1.GenerateRequest, sampling: v1.SamplingParams | None) -> v1.GenerateRequest:
    """The request that a `generate` call means."""
    if not isinstance(prompt, v1.GenerateRequest):
        return generate_request(prompt, sampling)
    if sampling is not None:
        raise ValueError("sampling belongs inside the GenerateRequest")
    return prompt


def as_embed_request(prompt: Prompt | v1.EmbedRequest, dimensions: int | None, cache_salt: str) -> v1.EmbedRequest:
    """The request that an `embed` call means."""
    if not isinstance(prompt, v1.EmbedRequest):
        return embed_request(prompt, dimensions=dimensions, cache_salt=cache_salt)
    if dimensions is not None or cache_salt:
        raise ValueError("dimensions and cache_salt belong inside the EmbedRequest")
    return prompt


def as_encode_request(request: v1.EncodeRequest | v1.Media) -> v1.EncodeRequest:
    """The request that an `encode` call means: one item by itself is a request of its own."""
    return v1.EncodeRequest(items=[request]) if isinstance(request, v1.Media) else request


def tokenize_request(
    prompt: str | v1.ChatMessage | Sequence[v1.ChatMessage], allow_special: bool, add_special_tokens: bool
) -> v1.TokenizeRequest:
    """The request that a `tokenize` call means."""
    if isinstance(prompt, str):
        return v1.TokenizeRequest(text=prompt, allow_special=allow_special, add_special_tokens=add_special_tokens)
    return v1.TokenizeRequest(chat=chat(prompt), allow_special=allow_special)
