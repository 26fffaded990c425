"""What the service reports of itself, as the contract's messages: its description and its load."""

from __future__ import annotations

import msgspec

from common.media.convert import MODALITIES
from llm_service.components import Components
from llm_service.embedder import Embedder
from llm_service.engine.messages import State
from llm_service.model_config.served import Weights
from llm_service.prompt.output_marks import ToolFormat
from llm_service.request import LoadedAdapter, Pooling
from llm_service.reranker import Reranker
from twinlens import __version__
from twinlens.v1 import encoder_pb2, llm_pb2, media_pb2

_TOLD = (
    *("queued_items", "running_items", "vit_calls", "store_hits", "store_misses"),
    *("store_bytes", "store_capacity_bytes"),
)
"""The numbers of an encoder's load that are passed on."""
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
    ToolFormat.NONE: llm_pb2.TOOL_FORMAT_NONE,
}


def info(components: Components, instance: int) -> llm_pb2.LlmServiceGetInfoResponse:
    """The service's description; `instance` identifies its process."""
    ready = components.engine.ready
    return llm_pb2.LlmServiceGetInfoResponse(
        version=__version__,
        model=components.names[0],
        aliases=components.names[1:],
        architecture=components.architecture,
        encoder_digest=components.digest,
        context_tokens=ready.max_context if ready else 0,
        vocab_size=components.prompts.vocab_size,
        tensor_parallel=components.config.tp,
        unimplemented=["Embed"] if components.embedder.why_not else [],
        embeddings=_embeddings(components.embedder),
        reranker=_reranker(components.reranker),
        devices=ready.devices if ready else [],
        modalities=[MODALITIES[modality] for modality in components.requests.max_items],
        tool_format=_TOOL_FORMATS[components.prompts.template.tool_format],
        weights=_weights(ready.weights) if ready else None,
        adapters=map(adapter, components.adapters.all),
        instance=instance,
    )


def load(components: Components, state: State) -> llm_pb2.LlmServiceGetLoadResponse:
    """Its queues and counters; `state` is the engine's report."""
    outcomes = components.generator.outcomes
    return llm_pb2.LlmServiceGetLoadResponse(
        waiting=state.waiting,
        running=state.running,
        kv_blocks_used=state.kv_blocks_used,
        kv_blocks_total=state.kv_blocks_total,
        rows_received=components.encoder_cache.counters.received,
        rows_shared=components.encoder_cache.counters.by_transport[encoder_pb2.TRANSPORT_SHARED_MEMORY],
        rows_mirrored=components.encoder_cache.counters.by_transport[encoder_pb2.TRANSPORT_CUDA_IPC],
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
        state_slots=state.state_slots,
        state_slots_used=state.state_slots_used,
        state_snapshots=state.state_snapshots,
        **msgspec.structs.asdict(state.counters),
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
                **{field: getattr(replica.last_load, field) for field in _TOLD},
            )
            for replica in components.pool.replicas
        ],
    )


def adapter(given: LoadedAdapter) -> llm_pb2.Adapter:
    """A LoRA adapter that is loaded, or was."""
    return llm_pb2.Adapter(name=given.name, rank=given.rank, in_flight=given.in_flight)


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


def _weights(weights: Weights) -> llm_pb2.Weights:
    return llm_pb2.Weights(
        quantization=weights.quantization,
        number=weights.number,
        bits=weights.bits,
        widened_in=weights.widened_in,
        bytes=weights.bytes,
        inputs=weights.inputs,
    )


def _exchanged(components: Components) -> dict[str, int]:
    """The counters of GetLoad about prompts that one service computes for another."""
    blocks, prefills = components.engine.blocks, components.generator.prefills
    found: dict[str, int] = {}
    if blocks is not None:
        found |= {"kv_blocks_received": blocks.received_blocks, "kv_blocks_lent": blocks.lent_blocks}
    if prefills is not None:
        counters = prefills.counters
        found |= {"prefills_elsewhere": counters.prompts, "prefills_failed": counters.failed}
    return found
