"""Puts the encoder service together, runs it until a signal comes, and takes it apart in the opposite order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass

import msgspec

from common.aio import tasks
from common.checkpoints.checkpoint import Checkpoint
from common.hardware import computed_in, cuda_device_count, default_device, default_dtype, usable_cores
from common.hf.description import HfModel
from common.media.encoder_digest import encoder_digest
from common.nixl.agent import NixlAgent
from common.process.children import ChildDied
from common.process.malloc import freeze_objects
from common.rows.wire import DType, RowLayout
from common.rpc.server import GrpcServer
from common.shm.arena import SharedBuffer
from common.telemetry import log, stderr_capture, tracing
from common.telemetry.metrics import Metrics
from encoder_service.config import EncoderConfig
from encoder_service.engine.admission import Admission
from encoder_service.engine.content import Contents
from encoder_service.engine.device_pool import DevicePools
from encoder_service.engine.dispatch import BatchLimits, Dispatcher
from encoder_service.engine.embedding_store import EmbeddingStore
from encoder_service.engine.encode import EncoderEngine
from encoder_service.engine.item_plans import FamilyPlans, HfPlans, ItemPlans
from encoder_service.engine.media_loader import MediaLoader
from encoder_service.engine.pipeline import Pipeline
from encoder_service.engine.shared_store import SharedStore
from encoder_service.engine.staging import Staging
from encoder_service.engine.workers import MODULE, WorkerError, WorkerTimes
from encoder_service.families import config as model_config
from encoder_service.families.family import ModelConfig, ServedConfig
from encoder_service.media.decoder import DecoderPool
from encoder_service.media.fetch import Fetcher
from encoder_service.media.hf_planner import HfPlanner, PlannerTimes
from encoder_service.media.messages import Bounds
from encoder_service.meters import Meters
from encoder_service.servicer import Components, EncoderServicer
from encoder_service.transports.transports import Transports
from encoder_service.worker.messages import WorkerSettings
from twinlens import __version__
from twinlens.v1.encoder_pb2_grpc import add_EncoderServiceServicer_to_server

SERVICE = "twinlens.v1.EncoderService"

_MAX_DECODE_THREADS = 8
LAST_SECONDS = 6.0
"""Time that handlers cancelled at the end of the grace period have to give back what they hold."""

_log = log.get("server")


@dataclass(frozen=True, slots=True)
class _Model:
    """A model as known before anything is opened. A model without a family is computed by transformers (`hf`)."""

    checkpoint: Checkpoint
    config: ServedConfig
    hf: HfModel | None
    device: str
    layout: RowLayout
    tower_dtype: str

    @classmethod
    async def read(cls, config: EncoderConfig) -> _Model:
        """Reads the checkpoint. Raises CheckpointError if it cannot be served."""
        checkpoint, served = await tasks.to_thread(model_config.resolve, config.model, config.revision)
        hf = None if isinstance(served, ModelConfig) else served.hf
        device = default_device() if config.device == "auto" else config.device
        dtype = DType(default_dtype(device, checkpoint) if config.dtype == "auto" else config.dtype)
        tower = computed_in(dtype.value, device) if config.tower_dtype == "auto" else config.tower_dtype
        return cls(checkpoint, served, hf, device, RowLayout(served.levels, served.width, dtype), tower)


async def serve(config: EncoderConfig, *, worker: str = MODULE) -> None:
    """Serves until SIGTERM or SIGINT; device workers run the module `worker`.

    Raises CheckpointError, WorkerError or OSError if it cannot start.
    """
    log.configure(config.log_level, service="encoder")
    stderr_capture.start()
    tracing.start("twinlens-encoder")
    tasks.start_threads()
    model = await _Model.read(config)

    async with AsyncExitStack() as running:
        running.push_async_callback(tasks.to_thread, tracing.stop)
        staging = SharedBuffer.create("twinlens-staging", config.staging_bytes)
        running.callback(staging.close)
        store = SharedBuffer.create("twinlens-store", config.store_bytes)
        running.callback(store.close)
        grpc_server = GrpcServer(config, [SERVICE])
        servicer = EncoderServicer()
        add_EncoderServiceServicer_to_server(servicer, grpc_server.server)
        running.push_async_callback(grpc_server.server.stop, None)  # if it ends before draining
        await grpc_server.bind()
        nixl = await _nixl(config, store, running)  # fails before anybody waits for a model
        metrics = Metrics("twinlens_encoder")
        meters = Meters(metrics)
        grpc_server.watch(meters.failed)
        meters.watch_requests(lambda: grpc_server.inflight_bytes)
        metrics_address = await running.enter_async_context(metrics.serve(config.metrics_listen))

        def report() -> None:
            grpc_server.report(dispatcher.alive > 0 and decoders.processes.able)

        decoders = _decoders(config, model, staging, report)
        dispatcher = _dispatcher(config, model, (staging.fd, store.fd), worker, report, meters)
        running.push_async_callback(decoders.processes.stop)
        running.push_async_callback(dispatcher.stop)
        planner = _planner(config, model)
        if planner is not None:
            running.push_async_callback(planner.stop)
        starting = asyncio.create_task(_start(decoders, dispatcher, planner))
        if not await _started(grpc_server, starting):
            await grpc_server.drain()
            return
        digest = await tasks.to_thread(encoder_digest, model.checkpoint, model.layout.dtype, model.config.parts)
        rows = EmbeddingStore(store, model.layout.row_bytes, registered=bool(config.nixl))
        shared_store = _shared_store(config, rows, model.layout)
        media = MediaLoader(_item_plans(config, model, planner), Staging(staging), rows, decoders)
        admission = Admission(config.max_queued_items, config.max_queued_bytes)
        contents = Contents(Fetcher(config), config, digest, admission)
        pipeline = Pipeline(media, rows, dispatcher, contents, model.layout, shared_store)
        encoder = EncoderEngine(pipeline, digest, admission)
        transports = await running.enter_async_context(_transports(config, model, rows, dispatcher.pools, nixl))
        _describe(meters, model, digest)
        meters.watch(encoder, transports)
        servicer.served = Components(config, model.checkpoint.name, model.config, encoder, transports, meters)
        _log_room(config, model.layout)
        freeze_objects()
        await grpc_server.announce(metrics_address)
        await grpc_server.wait()
        await grpc_server.drain()
        await _end(dispatcher, encoder, shared_store)


def _decoders(config: EncoderConfig, model: _Model, staging: SharedBuffer, report: Callable[[], None]) -> DecoderPool:
    processes = config.decoders()
    return DecoderPool(
        staging,
        processes=processes,
        threads=max(1, min(_MAX_DECODE_THREADS, usable_cores() // processes)),
        seconds=config.decode_seconds,
        start_seconds=config.start_seconds,
        memory_bytes=config.decoder_bytes(),
        bounds=_bounds(config, model.hf),
        on_change=report,
    )


def _dispatcher(
    config: EncoderConfig,
    model: _Model,
    fds: tuple[int, int],
    worker: str,
    report: Callable[[], None],
    meters: Meters,
) -> Dispatcher:
    """The dispatcher over the staging and store arenas, whose descriptors are given in this order."""
    return Dispatcher(
        _worker_settings(config, model),
        fds,
        BatchLimits(
            budget=config.batch_patches,
            max_units=config.batch_items,
            pass_seconds=config.pass_seconds,
            seconds=config.worker_seconds,
            patience=config.worker_patience_seconds,
        ),
        WorkerTimes(config.start_seconds),
        module=worker,
        on_change=lambda _: report(),
        on_batch=meters.computed,
        pools=DevicePools(model.layout.row_bytes),
    )


def _planner(config: EncoderConfig, model: _Model) -> HfPlanner | None:
    """Plans items of models that transformers computes."""
    if model.hf is None:
        return None
    times = PlannerTimes(start=config.start_seconds, answer=config.decode_seconds)
    return HfPlanner(str(model.checkpoint.folder), times, video_sound=model.hf.video_sound)


def _item_plans(config: EncoderConfig, model: _Model, planner: HfPlanner | None) -> ItemPlans:
    most = config.max_patches_per_call
    if isinstance(model.config, ModelConfig):
        return FamilyPlans(model.config, model.layout, config, max_patches=most)
    assert planner is not None, "it is made where transformers computes"
    return HfPlans(planner, config, max_patches=most)


async def _nixl(config: EncoderConfig, store: SharedBuffer, running: AsyncExitStack) -> NixlAgent | None:
    """The NIXL agent over the store's memory, if configured, until `running` ends. Raises NixlError."""
    if not config.nixl:
        return None
    agent = NixlAgent(store, config.nixl)
    running.push_async_callback(agent.stop)
    await agent.start()
    return agent


def _transports(
    config: EncoderConfig, model: _Model, rows: EmbeddingStore, pools: DevicePools, nixl: NixlAgent | None
) -> AbstractAsyncContextManager[Transports]:
    return Transports.open(
        rows,
        model.layout,
        shared_memory=config.shared_memory,
        folder=config.local_dir,
        lease_seconds=config.lease_seconds,
        pools=pools if config.device_pool_bytes else None,
        nixl=nixl,
    )


def _log_room(config: EncoderConfig, layout: RowLayout) -> None:
    """Logs how much it can hold at once."""
    _log.info(
        "room for rows",
        row_bytes=layout.row_bytes,
        store_rows=config.store_bytes // layout.row_bytes,
        store_bytes=config.store_bytes,
        device_pool_bytes=config.device_pool_bytes,
        staging_bytes=config.staging_bytes,
        batch_patches=config.batch_patches,
        workers=config.workers,
    )


def _describe(meters: Meters, model: _Model, digest: str) -> None:
    meters.describe(
        version=__version__,
        model=model.checkpoint.name,
        architecture=model.config.architecture,
        digest=digest,
        device=model.device,
        dtype=model.layout.dtype.value,
    )


async def _end(dispatcher: Dispatcher, encoder: EncoderEngine, shared_store: SharedStore | None) -> None:
    """Stops what is still running. Logs a defect if something is still held afterwards; the service ends anyway."""
    try:
        async with asyncio.timeout(LAST_SECONDS):
            await dispatcher.stop()
            await encoder.stop()
            if shared_store is not None:
                await shared_store.stop()
        encoder.check_idle()
    except (TimeoutError, AssertionError) as error:
        _log.error("something is still held at the end", cause=str(error) or "it takes too long")


def _shared_store(config: EncoderConfig, store: EmbeddingStore, layout: RowLayout) -> SharedStore | None:
    """The shared store, started, if there is one. It may be unreachable, now or at any time."""
    if not config.shared_store:
        return None
    from encoder_service.engine.shared_store_client import SharedStoreClient  # its library takes its time to import

    client = SharedStoreClient(config.shared_store, seconds=config.shared_store_seconds)
    shared_store = SharedStore(
        client, store, layout, ttl=config.shared_store_ttl_seconds, wait=config.shared_wait_seconds
    )
    shared_store.start()
    return shared_store


async def _start(decoders: DecoderPool, dispatcher: Dispatcher, planner: HfPlanner | None) -> None:
    async with asyncio.TaskGroup() as group:
        if planner is not None:
            group.create_task(planner.start())
        group.create_task(decoders.processes.start())
        group.create_task(dispatcher.start())


async def _started(grpc_server: GrpcServer, starting: asyncio.Task[None]) -> bool:
    """Waits for everything to start; False if a signal came first."""
    stopped = asyncio.create_task(grpc_server.wait())
    await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not starting.done():
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return False
    try:
        starting.result()
    except ExceptionGroup as group:  # before Python 3.11.4, `except*` wraps what is raised there in a group
        if (expected := group.subgroup((WorkerError, ChildDied, OSError))) is None:
            raise
        raise expected.exceptions[0] from None
    return True


def _bounds(config: EncoderConfig, hf: HfModel | None) -> Bounds:
    """The limits of files, with the model's sample rate."""
    return config.bounds if hf is None else msgspec.structs.replace(config.bounds, sample_rate=hf.sound_rate)


def _worker_settings(config: EncoderConfig, model: _Model) -> list[WorkerSettings]:
    """The settings of each worker: GPUs are assigned in turn, unless one was named; cores are shared."""
    in_turn = model.device.startswith("cuda") and config.device in ("auto", "cuda")
    threads = config.threads or max(1, usable_cores() // config.workers)
    return [
        WorkerSettings(
            folder=str(model.checkpoint.folder),
            device=f"cuda:{index % max(1, cuda_device_count())}" if in_turn else model.device,
            dtype=model.layout.dtype.value,
            threads=threads,
            staging_bytes=config.staging_bytes,
            store_bytes=config.store_bytes,
            attention=config.attention,
            kernels=config.kernels,
            graphs=config.graph_budgets(),
            graph_bytes=config.graph_bytes,
            batch_patches=config.batch_patches,
            pool_bytes=config.device_pool_bytes,
            log_level=config.log_level,
            hf=model.hf,
            core_share=config.core_share,
            tower_dtype=model.tower_dtype,
        )
        for index in range(config.workers)
    ]
