"""Servicers that answer from a script, and remember what they were asked."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

import grpc

from twinlens import v1

WORDS = ("A red", " circle", ".")


def refuse(context: grpc.ServicerContext, code: grpc.StatusCode, status: v1.Status) -> NoReturn:
    """Fails a call as the services do: with the status and the trailer that explains it."""
    context.set_trailing_metadata((("twinlens-status-bin", status.SerializeToString()),))
    context.abort(code, status.message)
    raise AssertionError


def script(request: v1.GenerateRequest) -> Iterator[v1.GenerateResponse]:
    """A generation that says WORDS."""
    yield v1.GenerateResponse(started=v1.GenerateStarted(prompt_tokens=9, request_id=request.request_id))
    yield v1.GenerateResponse()  # an event of a newer service
    sampling = request.sampling
    if sampling.HasField("prompt_logprobs"):
        scored = v1.TokenLogprobs(logprob=-0.5, text="what", top=[v1.TopLogprob(token_id=8, logprob=-0.25, text="\n")])
        prompt = v1.PromptLogprobs(first=1, token_ids=[7], logprobs=[scored])
        yield v1.GenerateResponse(delta=v1.GenerateDelta(prompt=prompt))
    for number, word in enumerate(WORDS):
        logprobs = [v1.TokenLogprobs(logprob=-0.125, text=word)] if sampling.HasField("logprobs") else []
        yield v1.GenerateResponse(delta=v1.GenerateDelta(text=word, token_ids=[number], logprobs=logprobs))
    usage = v1.Usage(prompt_tokens=9, cached_tokens=4, completion_tokens=3)
    timings = [v1.StageTiming(stage="prefill", seconds=0.0123456)]
    finished = v1.GenerateFinished(reason=v1.FINISH_REASON_STOP, usage=usage, timings=timings)
    yield v1.GenerateResponse(finished=finished)


class FakeLlm(v1.LlmServiceServicer):
    """An LLM service. `play` makes the events of a generation; a test may put its own there."""

    def __init__(self) -> None:
        self.requests: list[v1.GenerateRequest] = []
        self.to_embed: list[v1.EmbedRequest] = []
        self.vector = [0.6, -0.8]
        self.embeddings: v1.Embeddings | None = v1.Embeddings(dimensions=2, pooling=v1.POOLING_LAST, normalized=True)
        self.reranker: v1.Reranker | None = None
        self.metadata: dict[str, str | bytes] = {}
        self.remaining = 0.0
        self.generated_with: list[tuple[dict[str, str | bytes], float]] = []
        self.encoders: list[str] = []
        self.play: Callable[[v1.GenerateRequest], Iterator[v1.GenerateResponse]] = script
        self.refusal: tuple[grpc.StatusCode, v1.Status] | None = None
        self.ended = threading.Event()
        self.under_way: dict[int, v1.GenerateRequest] = {}
        self.context_tokens, self.has_engine, self.instance = 4096, True, 7
        self.tool_format = v1.TOOL_FORMAT_JSON
        self.adapters: dict[str, v1.Adapter] = {}
        self.modalities = [v1.MODALITY_IMAGE, v1.MODALITY_VIDEO, v1.MODALITY_AUDIO]

    def LoadAdapter(self, request, context):
        if request.name in self.adapters:
            refuse(
                context,
                grpc.StatusCode.ALREADY_EXISTS,
                v1.Status(code=grpc.StatusCode.ALREADY_EXISTS.value[0], message="it has one of that name"),
            )
        self.adapters[request.name] = v1.Adapter(name=request.name, rank=len(request.path))
        return v1.LoadAdapterResponse(adapter=self.adapters[request.name])

    def UnloadAdapter(self, request, context):
        if request.name not in self.adapters:
            refuse(
                context,
                grpc.StatusCode.NOT_FOUND,
                v1.Status(code=grpc.StatusCode.NOT_FOUND.value[0], message="it has none of that name"),
            )
        return v1.UnloadAdapterResponse(adapter=self.adapters.pop(request.name))

    def Generate(self, request, context):
        self.requests.append(request)
        self.metadata = dict(context.invocation_metadata())
        self.remaining = context.time_remaining()
        self.generated_with.append((self.metadata, self.remaining))
        self.under_way[id(request)] = request

        def over() -> None:
            del self.under_way[id(request)]
            self.ended.set()

        if not context.add_callback(over):  # the call has ended already
            over()
        yield from self.play(request)
        if self.refusal is not None:
            refuse(context, *self.refusal)

    def Embed(self, request, context):
        self.to_embed.append(request)
        self.metadata = dict(context.invocation_metadata())
        self.remaining = context.time_remaining()
        if self.refusal is not None:
            refuse(context, *self.refusal)
        values = self.vector[: request.dimensions] if request.HasField("dimensions") else self.vector
        usage = v1.Usage(prompt_tokens=9, cached_tokens=4)
        return v1.EmbedResponse(values=values, usage=usage, request_id=request.request_id)

    def Abort(self, request, context):
        return v1.AbortResponse(aborted=len(request.request_ids))

    def Tokenize(self, request, context):
        if request.WhichOneof("input") == "text":
            return v1.TokenizeResponse(ids=[len(request.text), int(request.allow_special)])
        return v1.TokenizeResponse(ids=[len(request.chat.messages)])

    def GetInfo(self, request, context):
        self.metadata = dict(context.invocation_metadata())
        self.remaining = context.time_remaining()
        return v1.LlmServiceGetInfoResponse(
            version="0.9",
            model="demo",
            architecture="Qwen3VL",
            tool_format=self.tool_format,
            devices=["cpu"],
            adapters=self.adapters.values(),
            modalities=self.modalities,
            embeddings=self.embeddings,
            reranker=self.reranker,
            encoder_digest="0123456789abcdef",
            context_tokens=self.context_tokens,
            instance=self.instance,
            tensor_parallel=2,
            weights=v1.Weights(quantization="fp8", number="e4m3", bits=8, widened_in="registers", bytes=1 << 30),
        )

    def GetLoad(self, request, context):
        if not (self.context_tokens and self.has_engine):  # as of a service whose engine is not there
            refuse(context, grpc.StatusCode.UNAVAILABLE, v1.Status(code=14, reason="ENGINE_UNAVAILABLE"))
        encoders = [v1.EncoderStatus(address=address, usable=True, failures=2) for address in self.encoders]
        stages = [v1.StageTiming(stage="prefill", seconds=1.5)]
        return v1.LlmServiceGetLoadResponse(
            prompt_tokens=300,
            prefix_query_tokens=200,
            prefix_hit_tokens=50,
            sessions=3,
            rows_received=12,
            rows_shared=5,
            rows_mirrored=7,
            encoders=encoders,
            stage_totals=stages,
        )

    def FlushCache(self, request, context):
        return v1.LlmServiceFlushCacheResponse(kv_blocks=7)


class FakeEncoder(v1.EncoderServiceServicer):
    """An encoder service."""

    def __init__(self) -> None:
        self.metadata: dict[str, str | bytes] = {}

    def Encode(self, request, context):
        for item, media in enumerate(request.items):
            if media.data == b"broken":
                status = v1.Status(code=3, message="the picture is broken", reason="IMAGE_BROKEN")
                yield v1.EncodeResponse(error=v1.EncodeError(item=item, status=status))
                continue
            yield v1.EncodeResponse(header=v1.EncodeHeader(item=item, key=bytes(32), tokens=4))
            yield v1.EncodeResponse(rows=v1.EncodeRows(item=item, count=4, data=b"rows"))
            yield v1.EncodeResponse(done=v1.EncodeDone(item=item))

    def Probe(self, request, context):
        return v1.ProbeResponse(present=[key == bytes(32) for key in request.keys])

    def Prefetch(self, request, context):
        return v1.PrefetchResponse(headers=[v1.EncodeHeader(item=i) for i in range(len(request.items))])

    def Release(self, request, context):
        return v1.ReleaseResponse(released=len(request.leases))

    def GetInfo(self, request, context):
        self.metadata = dict(context.invocation_metadata())
        return v1.EncoderServiceGetInfoResponse(
            version="0.9",
            model="demo",
            architecture="Qwen3VL",
            devices=["cpu"],
            digest="0123456789abcdef",
            width=64,
            levels=3,
            dtype=v1.DATA_TYPE_BFLOAT16,
            transports=[v1.TRANSPORT_INLINE, v1.TRANSPORT_SHARED_MEMORY],
        )

    def GetLoad(self, request, context):
        sent = [v1.RowsSent(transport=kind, rows=9, bytes=9 << 10) for kind in (v1.TRANSPORT_SHARED_MEMORY, 99)]
        return v1.EncoderServiceGetLoadResponse(
            vit_calls=3,
            store_hits=3,
            store_misses=1,
            store_bytes=3 << 20,
            estimated_milliseconds=1500,
            device_pool_bytes=1 << 20,
            device_pool_capacity_bytes=4 << 20,
            rows_sent=sent,
            shared=v1.SharedStoreLoad(hits=6, written=5),
        )

    def FlushCache(self, request, context):
        return v1.EncoderServiceFlushCacheResponse(entries=2, bytes=64)
