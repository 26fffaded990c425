"""The LLM service's RPCs: messages to nouns, nouns to messages, nothing else."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

import grpc

from common import tasks
from common.errors import InvalidInput, Precondition
from common.media.convert import MODALITIES, write_stages
from common.rpc import calls
from common.wire import crc32c
from llm_service.config import LlmConfig
from llm_service.convert.requests import RequestReader
from llm_service.embedder import Embedder
from llm_service.encoders.encoder_cache import EncoderCache
from llm_service.encoders.pool import EncoderPool
from llm_service.encoders.receiver import RowReceiver
from llm_service.engine.prompt_length import check_bytes, check_length
from llm_service.engine_client.client import EngineClient
from llm_service.generation.adapters import Adapters
from llm_service.generation.events import Begun, Delta, Embedded, Ended, PromptLogprobsDelta
from llm_service.generation.generator import Generator
from llm_service.model_config.served import Weights
from llm_service.plan import TokenLogprobs
from llm_service.prompt.builder import PromptBuilder
from llm_service.prompt.chat_template import ChatTemplate
from llm_service.prompt.detokenizer import TokenTexts
from llm_service.prompt.output_marks import ToolFormat
from llm_service.request import LoadedAdapter, MediaItem, Pooling, Request
from llm_service.reranker import Reranker
from llm_service.token_ids import check_token_ids
from twinlens import __version__
from twinlens.v1 import encoder_pb2, llm_pb2, media_pb2
from twinlens.v1.encoder_pb2 import TRANSPORT_CUDA_IPC, TRANSPORT_SHARED_MEMORY
from twinlens.v1.llm_pb2_grpc import LlmServiceServicer

_TOLD = (
    *("queued_items", "running_items", "vit_calls", "store_hits", "store_misses"),
    *("store_bytes", "store_capacity_bytes"),
)
"""What an encoder says of its load that is passed on."""
_REASONS = {
    "stop": llm_pb2.FINISH_REASON_STOP,
    "length": llm_pb2.FINISH_REASON_LENGTH,
    "structure": llm_pb2.FINISH_REASON_STRUCTURE,
}

_POOLINGS = {
    Pooling.LAST: llm_pb2.POOLING_LAST,
    Pooling.MEAN: llm_pb2.POOLING_MEAN,
    Pooling.CLS: llm_pb2.POOLING_CLS,
}

_TOOL_FORMATS = {
    None: llm_pb2.TOOL_FORMAT_UNSPECIFIED,
    ToolFormat.JSON: llm_pb2.TOOL_FORMAT_JSON,
    ToolFormat.XML: llm_pb2.TOOL_FORMAT_XML,
    ToolFormat.GLM: llm_pb2.TOOL_FORMAT_GLM,
    ToolFormat.MISTRAL: llm_pb2.TOOL_FORMAT_MISTRAL,
    ToolFormat.KIMI: llm_pb2.TOOL_FORMAT_KIMI,
    ToolFormat.GEMMA: llm_pb2.TOOL_FORMAT_GEMMA,
    ToolFormat.LLAMA: llm_pb2.TOOL_FORMAT_LLAMA,
    ToolFormat.LFM: llm_pb2.TOOL_FORMAT_LFM,
    ToolFormat.MINIMAX: llm_pb2.TOOL_FORMAT_MINIMAX,
    ToolFormat.GRANITE: llm_pb2.TOOL_FORMAT_GRANITE,
    ToolFormat.APERTUS: llm_pb2.TOOL_FORMAT_APERTUS,
    ToolFormat.DEEPSEEK: llm_pb2.TOOL_FORMAT_DEEPSEEK,
    ToolFormat.HUNYUAN: llm_pb2.TOOL_FORMAT_HUNYUAN,
    ToolFormat.PHI: llm_pb2.TOOL_FORMAT_PHI,
    ToolFormat.INTERNLM: llm_pb2.TOOL_FORMAT_INTERNLM,
}

_MAX_NAMES = 1024
_STALL_SECONDS = 10.0
"""The longest that a service may take to accept a part of a KV block."""

Context = grpc.aio.ServicerContext


@dataclass(frozen=True, slots=True)
class Components:
    """What the servicer speaks for. `kv_layout` is what other services' KV blocks must be like to be exchanged, empty
    where none are. `longest` are the tokens of a context, as long as the engine has not said how many
    there is memory for."""

    config: LlmConfig
    names: tuple[str, ...]
    architecture: str
    digest: str
    kv_layout: bytes
    longest: int
    requests: RequestReader
    prompts: PromptBuilder
    embedder: Embedder
    reranker: Reranker | None
    generator: Generator
    adapters: Adapters
    engine: EngineClient
    encoder_cache: EncoderCache
    receiver: RowReceiver
    pool: EncoderPool


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
                        yield llm_pb2.GenerateResponse(started=_started(read, event, components.prompts.template))
                    case PromptLogprobsDelta():
                        yield llm_pb2.GenerateResponse(delta=_prompt_delta(event, components.prompts.texts))
                    case Delta():
                        yield llm_pb2.GenerateResponse(delta=_delta(event, components.prompts.texts))
                    case Ended():
                        assert begun is not None
                        yield llm_pb2.GenerateResponse(finished=_finished(event, begun))

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
        return llm_pb2.EmbedResponse(
            values=components.embedder.vector(embedded.pooled, dimensions).tolist(),
            usage=llm_pb2.Usage(prompt_tokens=len(begun.layout.ids), cached_tokens=begun.cached),
            timings=write_stages(embedded.stages),
            request_id=read.id,
        )

    @property
    def _limit(self) -> int:
        """Tokens of a context, as far as is known by now."""
        ready = self._components.engine.ready
        return ready.context if ready else self._components.longest

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
                        "media have no tokens before they are encoded", reason="MEDIA_IN_TOKENIZE", field=media[0].field
                    )
                pieces = await tasks.to_thread(prompts.pieces, chat, ())
                ids = (await tasks.to_thread(prompts.layout, pieces, ())).ids
            case _:
                raise InvalidInput("there is nothing to tokenize", reason="EMPTY_PROMPT", field="input")
        texts = map(prompts.texts.text_of, ids) if request.with_texts else ()
        return llm_pb2.TokenizeResponse(ids=ids, texts=texts)

    async def Detokenize(
        self,
        request: llm_pb2.DetokenizeRequest,
        context: Context[llm_pb2.DetokenizeRequest, llm_pb2.DetokenizeResponse],
    ) -> llm_pb2.DetokenizeResponse:
        """Gives the text of token ids."""
        components = self._components
        check_length(len(request.ids), components.longest, "ids", answered=False)
        check_token_ids(request.ids, components.prompts.vocab_size, "ids")
        text = await tasks.to_thread(components.prompts.decode, request.ids)
        return llm_pb2.DetokenizeResponse(text=text)

    async def GetInfo(
        self,
        request: llm_pb2.LlmServiceGetInfoRequest,
        context: Context[llm_pb2.LlmServiceGetInfoRequest, llm_pb2.LlmServiceGetInfoResponse],
    ) -> llm_pb2.LlmServiceGetInfoResponse:
        """Describes the service."""
        components, ready = self._components, self._components.engine.ready
        return llm_pb2.LlmServiceGetInfoResponse(
            version=__version__,
            model=components.names[0],
            aliases=components.names[1:],
            architecture=components.architecture,
            encoder_digest=components.digest,
            context_tokens=ready.context if ready else 0,
            vocab_size=components.prompts.vocab_size,
            tensor_parallel=components.config.tp,
            unimplemented=["Embed"] if components.embedder.why_not else [],
            embeddings=_embeddings(components.embedder),
            reranker=_reranker(components.reranker),
            devices=ready.devices if ready else [],
            modalities=[MODALITIES[modality] for modality in components.requests.max_items],
            tool_format=_TOOL_FORMATS[components.prompts.template.tool_format],
            weights=_weights(ready.weights) if ready else None,
            adapters=map(_adapter, components.adapters.all),
            instance=self._instance,
        )

    async def GetLoad(
        self,
        request: llm_pb2.LlmServiceGetLoadRequest,
        context: Context[llm_pb2.LlmServiceGetLoadRequest, llm_pb2.LlmServiceGetLoadResponse],
    ) -> llm_pb2.LlmServiceGetLoadResponse:
        """Reports queues and counters."""
        components = self._components
        state, outcomes = await components.generator.state(), components.generator.outcomes
        return llm_pb2.LlmServiceGetLoadResponse(
            waiting=state.waiting,
            running=state.running,
            kv_blocks_used=state.kv_blocks_used,
            kv_blocks_total=state.kv_blocks_total,
            prefix_hit_tokens=state.prefix_hit_tokens,
            prompt_tokens=state.prompt_tokens,
            generated_tokens=state.generated_tokens,
            preemptions=state.preemptions,
            steps=state.steps,
            rows_received=components.encoder_cache.counters.received,
            rows_shared=components.encoder_cache.counters.by_transport[TRANSPORT_SHARED_MEMORY],
            rows_mirrored=components.encoder_cache.counters.by_transport[TRANSPORT_CUDA_IPC],
            rows_nixl=components.encoder_cache.counters.by_transport[encoder_pb2.TRANSPORT_NIXL],
            encode_attempts=components.receiver.counters.attempts,
            encode_retries=components.receiver.counters.retries,
            items_covered=components.receiver.counters.covered,
            headers_known=components.receiver.counters.headers_known,
            row_hits=components.encoder_cache.counters.hits,
            row_bytes=components.encoder_cache.used_bytes,
            row_capacity_bytes=components.encoder_cache.capacity_bytes,
            finished_requests=outcomes["finished"],
            failed_requests=outcomes["failed"],
            refused_requests=components.generator.admission.refused,
            waiting_tokens=components.generator.admission.waiting_tokens,
            kv_blocks_cached=state.kv_blocks_cached,
            kv_host_blocks_total=state.kv_host_blocks_total,
            kv_host_blocks_used=state.kv_host_blocks_used,
            kv_blocks_offloaded=state.kv_blocks_offloaded,
            kv_blocks_loaded=state.kv_blocks_loaded,
            **_exchanged(components),
            prefix_query_tokens=state.prefix_query_tokens,
            graph_steps=state.graph_steps,
            state_slots=state.state_slots,
            state_slots_used=state.state_slots_used,
            state_snapshots=state.state_snapshots,
            draft_tokens=state.draft_tokens,
            accepted_draft_tokens=state.accepted_draft_tokens,
            adapter_fills=state.adapter_fills,
            sessions=len(components.generator.sessions),
            cancelled_requests=outcomes["cancelled"],
            stage_totals=[
                media_pb2.StageTiming(stage=stage, seconds=seconds)
                for stage, seconds in components.generator.stage_totals.items()
            ],
            encoders=[
                llm_pb2.EncoderStatus(
                    address=replica.address,
                    usable=replica.usable,
                    in_flight=replica.in_flight,
                    shared_memory=encoder_pb2.TRANSPORT_SHARED_MEMORY in replica.transports,
                    cuda_ipc=encoder_pb2.TRANSPORT_CUDA_IPC in replica.transports,
                    nixl=encoder_pb2.TRANSPORT_NIXL in replica.transports,
                    failures=replica.breaker.failures,
                    **{field: getattr(replica.told, field) for field in _TOLD},
                )
                for replica in components.pool.replicas
            ],
        )

    async def LoadAdapter(
        self,
        request: llm_pb2.LoadAdapterRequest,
        context: Context[llm_pb2.LoadAdapterRequest, llm_pb2.LoadAdapterResponse],
    ) -> llm_pb2.LoadAdapterResponse:
        """Loads a LoRA adapter."""
        adapter = await self._components.adapters.load(request.name, request.path)
        return llm_pb2.LoadAdapterResponse(adapter=_adapter(adapter))

    async def UnloadAdapter(
        self,
        request: llm_pb2.UnloadAdapterRequest,
        context: Context[llm_pb2.UnloadAdapterRequest, llm_pb2.UnloadAdapterResponse],
    ) -> llm_pb2.UnloadAdapterResponse:
        """Takes a LoRA adapter's name away."""
        return llm_pb2.UnloadAdapterResponse(adapter=_adapter(self._components.adapters.unload(request.name)))

    async def FlushCache(
        self,
        request: llm_pb2.LlmServiceFlushCacheRequest,
        context: Context[llm_pb2.LlmServiceFlushCacheRequest, llm_pb2.LlmServiceFlushCacheResponse],
    ) -> llm_pb2.LlmServiceFlushCacheResponse:
        """Empties both caches of what no request uses."""
        blocks = await self._components.engine.flush()
        return llm_pb2.LlmServiceFlushCacheResponse(kv_blocks=blocks, row_bytes=self._components.encoder_cache.flush())


def _exchanged(components: Components) -> dict[str, int]:
    """What GetLoad says of prompts that one service computes for another."""
    blocks, prefills = components.engine.blocks, components.generator.prefills
    found: dict[str, int] = {}
    if blocks is not None:
        found |= {"kv_blocks_received": blocks.received_blocks, "kv_blocks_lent": blocks.lent_blocks}
    if prefills is not None:
        counters = prefills.counters
        found |= {"prefills_elsewhere": counters.prompts, "prefills_failed": counters.failed}
    return found


def _started(request: Request, event: Begun, template: ChatTemplate) -> llm_pb2.GenerateStarted:
    spans = [
        llm_pb2.MediaSpan(
            item=span.item,
            start=span.start,
            length=span.end - span.start,
            rows=span.header.tokens,
            key=span.header.key,
            cached=span.header.cached,
        )
        for span in event.layout.spans
    ]
    return llm_pb2.GenerateStarted(
        prompt_tokens=len(event.layout.ids),
        cached_tokens=event.cached,
        spans=spans,
        request_id=request.id,
        thinking=event.thinking,
        resumed_choices=len(request.resume),
        reasoning_begin=template.reasoning_marks[0],
        reasoning_end=template.reasoning_marks[1],
        prompt_token_ids=event.layout.ids if request.return_prompt_token_ids else (),
    )


def _embeddings(embedder: Embedder) -> llm_pb2.Embeddings | None:
    if embedder.why_not:
        return None
    return llm_pb2.Embeddings(
        dimensions=embedder.dimensions, pooling=_POOLINGS[embedder.pooling], normalized=embedder.normalized
    )


def _reranker(reranker: Reranker | None) -> llm_pb2.Reranker | None:
    if reranker is None:
        return None
    return llm_pb2.Reranker(true_token_id=reranker.true_token, false_token_id=reranker.false_token)


def _adapter(adapter: LoadedAdapter) -> llm_pb2.Adapter:
    return llm_pb2.Adapter(name=adapter.name, rank=adapter.rank, in_flight=adapter.in_flight)


def _weights(weights: Weights) -> llm_pb2.Weights:
    return llm_pb2.Weights(
        quantization=weights.quantization,
        number=weights.number,
        bits=weights.bits,
        widened_in=weights.widened_in,
        bytes=weights.bytes,
        inputs=weights.inputs,
    )


def _delta(event: Delta, texts: TokenTexts) -> llm_pb2.GenerateDelta:
    logprobs = _logprobs(event.tokens, event.logprobs, texts)
    turns = [
        llm_pb2.TranscriptTurn(start_seconds=turn.start, end_seconds=turn.end, speaker=turn.speaker, text=turn.text)
        for turn in event.turns
    ]
    return llm_pb2.GenerateDelta(
        index=event.choice, text=event.text, token_ids=event.tokens, logprobs=logprobs, turns=turns
    )


def _prompt_delta(event: PromptLogprobsDelta, texts: TokenTexts) -> llm_pb2.GenerateDelta:
    logprobs = _logprobs(event.tokens, event.logprobs, texts)
    prompt = llm_pb2.PromptLogprobs(first=event.first, token_ids=event.tokens, logprobs=logprobs)
    return llm_pb2.GenerateDelta(prompt=prompt)


def _logprobs(tokens: Sequence[int], given: Sequence[TokenLogprobs], texts: TokenTexts) -> list[llm_pb2.TokenLogprobs]:
    """One for each token, or none at all where nothing is given."""
    return [
        llm_pb2.TokenLogprobs(
            logprob=each.chosen,
            text=texts.text_of(token),
            text_bytes=texts.bytes_of(token),
            top=[
                llm_pb2.TopLogprob(
                    token_id=likely, logprob=value, text=texts.text_of(likely), text_bytes=texts.bytes_of(likely)
                )
                for likely, value in each.top
            ],
        )
        for token, each in zip(tokens, given, strict=False)
    ]


def _finished(event: Ended, begun: Begun) -> llm_pb2.GenerateFinished:
    usage = llm_pb2.Usage(
        prompt_tokens=len(begun.layout.ids),
        cached_tokens=begun.cached,
        completion_tokens=event.completion_tokens,
        reasoning_tokens=event.reasoning_tokens,
        draft_tokens=event.draft_tokens,
        accepted_draft_tokens=event.accepted_draft_tokens,
    )
    return llm_pb2.GenerateFinished(
        index=event.choice,
        reason=_REASONS[event.reason],
        usage=usage,
        stop_text=event.stop_text,
        stop_token_id=event.stop_token,
        timings=write_stages(event.stages),
    )
