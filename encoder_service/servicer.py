"""The encoder service's RPCs: messages to nouns, nouns to messages, nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc

from common.aio.merged import merged
from common.errors import TwinlensError, Unavailable, without_traces
from common.media import convert as media_convert
from common.media.item import Modality
from common.rpc import calls
from common.telemetry import log
from encoder_service import convert
from encoder_service.config import EncoderConfig
from encoder_service.delivery import Delivery, ends_item, log_deliveries
from encoder_service.engine.encode import EncoderEngine
from encoder_service.families.family import ServedConfig
from encoder_service.meters import Meters
from encoder_service.transports.transports import Transports
from twinlens import __version__
from twinlens.v1 import encoder_pb2
from twinlens.v1.encoder_pb2_grpc import EncoderServiceServicer

_log = log.get("servicer")

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class Components:
    """The parts of the service."""

    config: EncoderConfig
    name: str
    model: ServedConfig
    encoder: EncoderEngine
    transports: Transports
    meters: Meters

    @property
    def modalities(self) -> Collection[Modality]:
        """The modalities that the model takes."""
        return self.model.modalities


class EncoderServicer(EncoderServiceServicer):
    """Answers for one model. `served` is None until the service has started."""

    def __init__(self) -> None:
        self.served: Components | None = None
        self._open_streams = 0

    async def Encode(self, request: encoder_pb2.EncodeRequest, context: Context) -> AsyncGenerator[Any, None]:
        """Streams headers and rows."""
        served = self._ready()
        if request.digest not in ("", served.encoder.digest):
            raise Unavailable("the encoder serves another model than the caller expects", reason="OTHER_MODEL")
        convert.check_items(request.items, served.config)
        convert.check_lists(request)
        served.transports.check(request.accepts, request.host)
        if request.attempt:
            _log.info("an item is asked for again", attempt=request.attempt, namespace=request.host.namespace)
        items, rest = (
            convert.read_items(request.items, request.cache_salt, request.priority, served.modalities, context.peer()),
            convert.without_items(request),
        )
        del request
        call = calls.current()
        call.limit_stalls(served.config.stall_seconds)
        await call.accept(context)
        self._open_streams += 1
        deliveries = [
            Delivery(served.encoder, served.transports, served.meters, rest, index, item)
            for index, item in enumerate(items)
        ]
        del items
        try:
            under_way = len(deliveries)
            async with aclosing(merged([each.run for each in deliveries])) as events:
                async for event in events:
                    under_way -= ends_item(event)
                    call.complete = not under_way
                    yield event
        finally:
            self._open_streams -= 1
            log_deliveries(deliveries)

    async def Prefetch(self, request: encoder_pb2.PrefetchRequest, context: Context) -> encoder_pb2.PrefetchResponse:
        """Encodes into the store in the background; answers when the headers are known."""
        served = self._ready()
        convert.check_items(request.items, served.config)
        answer = encoder_pb2.PrefetchResponse()
        items = convert.read_items(
            request.items, request.cache_salt, request.priority, served.modalities, context.peer()
        )
        del request
        found = await asyncio.gather(*(self._prefetch(served, index, item) for index, item in enumerate(items)))
        for each in found:
            if isinstance(each, encoder_pb2.EncodeHeader):
                answer.headers.append(each)
            else:
                answer.errors.append(each)
        return answer

    async def Probe(self, request: encoder_pb2.ProbeRequest, context: Context) -> encoder_pb2.ProbeResponse:
        """Answers which keys are here."""
        encoder = self._ready().encoder
        return encoder_pb2.ProbeResponse(present=await encoder.has(convert.read_keys(request), request.cache_salt))

    async def Release(self, request: encoder_pb2.ReleaseRequest, context: Context) -> encoder_pb2.ReleaseResponse:
        """Gives leases back."""
        return encoder_pb2.ReleaseResponse(released=self._ready().transports.release(convert.read_leases(request)))

    async def GetInfo(
        self, request: encoder_pb2.EncoderServiceGetInfoRequest, context: Context
    ) -> encoder_pb2.EncoderServiceGetInfoResponse:
        """Describes the model."""
        served = self._ready()
        encoder, layout = served.encoder, served.encoder.layout
        return encoder_pb2.EncoderServiceGetInfoResponse(
            version=__version__,
            model=served.name,
            architecture=served.model.architecture,
            digest=encoder.digest,
            width=layout.width,
            levels=layout.levels,
            dtype=media_convert.DTYPES[layout.dtype],
            modalities=[media_convert.MODALITIES[each] for each in served.modalities],
            transports=served.transports.numbers,
            local_socket=served.transports.local_socket,
            device_pools=[
                encoder_pb2.DevicePool(region=pool.name, gpu_uuid=pool.device, bytes=pool.capacity)
                for pool in served.transports.pools
            ],
            nixl_agent=convert.write_nixl_agent(served.transports.nixl_memory),
            devices=encoder.devices,
            max_image_bytes=served.config.max_image_bytes,
            max_video_bytes=served.config.max_video_bytes,
        )

    async def GetLoad(
        self, request: encoder_pb2.EncoderServiceGetLoadRequest, context: Context
    ) -> encoder_pb2.EncoderServiceGetLoadResponse:
        """Reports queues and totals."""
        load, transports = self._ready().encoder.load(), self._ready().transports
        return encoder_pb2.EncoderServiceGetLoadResponse(
            queued_items=load.queued_items,
            running_items=load.running_items,
            queued_patches=load.queued_patches,
            running_patches=load.running_patches,
            vit_calls=load.batches.vit_calls,
            vit_patches=load.batches.vit_patches,
            store_hits=load.items.hits,
            store_misses=load.items.misses,
            store_bytes=load.store_bytes,
            store_capacity_bytes=load.store_capacity_bytes,
            store_entries=load.store_entries,
            estimated_milliseconds=convert.milliseconds(load.estimated_seconds),
            encoded_items=load.items.encoded,
            failed_items=load.items.failed,
            open_streams=self._open_streams,
            leases=transports.leases,
            device_pool_bytes=sum(pool.used for pool in transports.pools),
            device_pool_capacity_bytes=sum(pool.capacity for pool in transports.pools),
            rows_sent=[
                encoder_pb2.RowsSent(transport=number, rows=rows, bytes=transports.sent.bytes[number])
                for number, rows in transports.sent.rows.items()
            ],
            shared=convert.write_shared_load(load.shared_store),
            stage_totals=convert.write_timings(
                {
                    **load.stage_seconds,
                    "worker_preprocess": load.batches.preprocess_seconds,
                    "worker_vit": load.batches.vit_seconds,
                }
            ),
        )

    async def FlushCache(
        self, request: encoder_pb2.EncoderServiceFlushCacheRequest, context: Context
    ) -> encoder_pb2.EncoderServiceFlushCacheResponse:
        """Drops all entries that nobody reads."""
        entries, size = await self._ready().encoder.flush()
        return encoder_pb2.EncoderServiceFlushCacheResponse(entries=entries, bytes=size)

    def _ready(self) -> Components:
        if self.served is None:
            raise Unavailable("the encoder is starting", reason="STARTING")
        return self.served

    async def _prefetch(
        self, served: Components, index: int, item: convert.ItemOrError
    ) -> encoder_pb2.EncodeHeader | encoder_pb2.EncodeError:
        try:
            if isinstance(item, TwinlensError):
                raise item
            header, cached = await served.encoder.prefetch(item)
        except TwinlensError as failure:
            without_traces(failure)  # its frames lead to the item's content, and back to it
            served.meters.failed(failure.reason)
            return convert.write_error(index, failure)
        return media_convert.write_header(index, header, served.encoder.layout, cached=cached)
