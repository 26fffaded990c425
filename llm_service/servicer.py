"""The LLM service's RPCs; `convert` turns messages into nouns and back."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace

import grpc

from common.aio import tasks
from common.errors import InvalidInput, Precondition
from common.rows.wire import crc32c
from common.rpc import calls
from llm_service.components import Components
from llm_service.convert import answers, service_state
from llm_service.generation.events import Begun, Delta, Embedded, Ended, PromptLogprobsDelta
from llm_service.prompt_length import check_bytes, check_length
from llm_service.request import MediaItem
from llm_service.token_ids import check_token_ids
from twinlens.v1 import llm_pb2
from twinlens.v1.llm_pb2_grpc import LlmServiceServicer

_MAX_NAMES = 1024
_STALL_SECONDS = 10.0
"""The longest that a service may take to accept a part of a KV block."""

Context = grpc.aio.ServicerContext


class LlmServicer(LlmServiceServicer):
    """Answers for one model."""

    def __init__(self, components: Components) -> None:
        self._components = components
        self._instance = secrets.randbits(64) or 1

    async def Generate(
        self, request: llm_pb2.GenerateRequest, context: Context[llm_pb2.GenerateRequest, llm_pb2.GenerateResponse]
    ) -> AsyncIterator[llm_pb2.GenerateResponse]:
        """Streams a generation."""
        components = self._components
        read = components.requests.read(request, context.time_remaining(), self._limit, context.peer())
        del request  # the bytes of its media are in the nouns
        calls.current().limit_stalls(components.config.stall_seconds)
        begun: Begun | None = None
        async with aclosing(components.generator.generate(read)) as events:
            async for event in events:
                match event:
                    case Begun():
                        begun = event
                        yield answers.started(read, event, components.prompts.template)
                    case PromptLogprobsDelta():
                        yield answers.prompt_logprobs(event, components.prompts.texts)
                    case Delta():
                        yield answers.delta(event, components.prompts.texts)
                    case Ended():
                        assert begun is not None
                        yield answers.finished(event, begun)

    async def Prefill(
        self, request: llm_pb2.PrefillRequest, context: Context[llm_pb2.PrefillRequest, llm_pb2.PrefillResponse]
    ) -> AsyncIterator[llm_pb2.PrefillResponse]:
        """Streams the KV blocks of a prompt."""
        components = self._components
        if not components.config.lend_prefill:
            raise Precondition("this service computes no prompts for others", reason="NOT_LENT")
        if request.kv_layout != components.kv_layout:
            raise Precondition("its KV blocks are not like the caller's", reason="OTHER_KV_LAYOUT", field="kv_layout")
        read = components.requests.read_prefill(request, context.time_remaining(), self._limit, context.peer())
        calls.current().limit_stalls(_STALL_SECONDS)  # blocks are kept for it
        async with aclosing(components.generator.prefill(read, request.first_block)) as parts:
            async for part in parts:
                yield llm_pb2.PrefillResponse(
                    identity=part.identity, offset=part.offset, data=part.data, crc32c=crc32c(part.data)
                )

    async def Embed(
        self, request: llm_pb2.EmbedRequest, context: Context[llm_pb2.EmbedRequest, llm_pb2.EmbedResponse]
    ) -> llm_pb2.EmbedResponse:
        """Gives a prompt's embedding."""
        components = self._components
        dimensions = request.dimensions if request.HasField("dimensions") else None
        read = components.requests.read_embed(request, context.time_remaining(), self._limit, context.peer())
        del request  # the bytes of its media are in the nouns
        begun: Begun | None = None
        embedded: Embedded | None = None
        async with aclosing(components.generator.generate(read)) as events:
            async for event in events:
                match event:
                    case Begun():
                        begun = event
                    case Embedded():
                        embedded = event
        assert begun is not None
        assert embedded is not None
        vector = components.embedder.vector(embedded.pooled, dimensions).tolist()
        return answers.embedded(read, begun, embedded, vector)

    @property
    def _limit(self) -> int:
        """Tokens of a context, as far as is known by now."""
        ready = self._components.engine.ready
        return ready.max_context if ready else self._components.max_context

    async def Abort(
        self, request: llm_pb2.AbortRequest, context: Context[llm_pb2.AbortRequest, llm_pb2.AbortResponse]
    ) -> llm_pb2.AbortResponse:
        """Ends requests by name."""
        if len(request.request_ids) > _MAX_NAMES:
            raise InvalidInput(f"more than {_MAX_NAMES} names", reason="TOO_MANY_NAMES", field="request_ids")
        abort, salt = self._components.generator.abort, request.cache_salt
        return llm_pb2.AbortResponse(aborted=sum(abort(name, salt) for name in set(request.request_ids)))

    async def Tokenize(
        self, request: llm_pb2.TokenizeRequest, context: Context[llm_pb2.TokenizeRequest, llm_pb2.TokenizeResponse]
    ) -> llm_pb2.TokenizeResponse:
        """Gives token ids without generating."""
        prompts = self._components.prompts
        match request.WhichOneof("input"):
            case "text":
                check_bytes([request.text], self._components.config.max_prompt_bytes, "text")
                special, whole = request.allow_special, request.add_special_tokens
                ids = await tasks.to_thread(prompts.encode, request.text, allow_special=special, whole=whole)
            case "chat":
                media: list[MediaItem] = []
                chat = replace(self._components.requests.chat(request.chat, media), unanswered=request.messages_alone)
                if media:
                    raise InvalidInput(
                        "media must be encoded before they can be tokenized",
                        reason="MEDIA_IN_TOKENIZE",
                        field=media[0].field,
                    )
                pieces = await tasks.to_thread(prompts.pieces, chat, ())
                ids = (await tasks.to_thread(prompts.layout, pieces, ())).ids
            case _:
                raise InvalidInput("there is nothing to tokenize", reason="EMPTY_PROMPT", field="input")
        return await tasks.to_thread(answers.tokenized, ids, prompts.texts if request.with_texts else None)

    async def Detokenize(
        self,
        request: llm_pb2.DetokenizeRequest,
        context: Context[llm_pb2.DetokenizeRequest, llm_pb2.DetokenizeResponse],
    ) -> llm_pb2.DetokenizeResponse:
        """Gives the text of token ids."""
        components = self._components
        check_length(len(request.ids), components.max_context, "ids", answered=False)
        check_token_ids(request.ids, components.prompts.vocab_size, "ids")
        text = await tasks.to_thread(components.prompts.decode, request.ids)
        return llm_pb2.DetokenizeResponse(text=text)

    async def GetInfo(
        self,
        request: llm_pb2.LlmServiceGetInfoRequest,
        context: Context[llm_pb2.LlmServiceGetInfoRequest, llm_pb2.LlmServiceGetInfoResponse],
    ) -> llm_pb2.LlmServiceGetInfoResponse:
        """Describes the service."""
        return service_state.info(self._components, self._instance)

    async def GetLoad(
        self,
        request: llm_pb2.LlmServiceGetLoadRequest,
        context: Context[llm_pb2.LlmServiceGetLoadRequest, llm_pb2.LlmServiceGetLoadResponse],
    ) -> llm_pb2.LlmServiceGetLoadResponse:
        """Reports queues and counters."""
        components = self._components
        return service_state.load(components, await components.generator.state())

    async def LoadAdapter(
        self,
        request: llm_pb2.LoadAdapterRequest,
        context: Context[llm_pb2.LoadAdapterRequest, llm_pb2.LoadAdapterResponse],
    ) -> llm_pb2.LoadAdapterResponse:
        """Loads a LoRA adapter."""
        adapter = await self._components.adapters.load(request.name, request.path)
        return llm_pb2.LoadAdapterResponse(adapter=service_state.adapter(adapter))

    async def UnloadAdapter(
        self,
        request: llm_pb2.UnloadAdapterRequest,
        context: Context[llm_pb2.UnloadAdapterRequest, llm_pb2.UnloadAdapterResponse],
    ) -> llm_pb2.UnloadAdapterResponse:
        """Takes a LoRA adapter's name away."""
        return llm_pb2.UnloadAdapterResponse(
            adapter=service_state.adapter(self._components.adapters.unload(request.name))
        )

    async def FlushCache(
        self,
        request: llm_pb2.LlmServiceFlushCacheRequest,
        context: Context[llm_pb2.LlmServiceFlushCacheRequest, llm_pb2.LlmServiceFlushCacheResponse],
    ) -> llm_pb2.LlmServiceFlushCacheResponse:
        """Removes from both caches everything that no request uses."""
        blocks = await self._components.engine.flush()
        return llm_pb2.LlmServiceFlushCacheResponse(kv_blocks=blocks, row_bytes=self._components.encoder_cache.flush())
