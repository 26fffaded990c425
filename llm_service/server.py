"""Puts the LLM service together, runs it until a signal comes, and takes it apart in the opposite order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from common.aio import tasks
from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from common.errors import TwinlensError
from common.media.encoder_digest import encoder_digest
from common.process.malloc import freeze_objects
from common.requirements import install
from common.rows.wire import DType, RowLayout
from common.rpc.server import GrpcServer
from common.shm.arena import SharedBuffer
from common.telemetry import log, stderr_capture, tracing
from common.telemetry.metrics import Metrics
from llm_service import generation_config
from llm_service.components import Components
from llm_service.config import LlmConfig
from llm_service.convert.requests import RequestReader
from llm_service.embedder import Embedder
from llm_service.encoders.encoder_cache import EncoderCache
from llm_service.encoders.pool import EncoderPool
from llm_service.encoders.receiver import RowReceiver
from llm_service.encoders.settings import EncoderSettings
from llm_service.encoders.transports.nixl_reader import NixlReader
from llm_service.engine_client.client import EngineClient
from llm_service.engine_client.mirrors import Mirrors
from llm_service.engine_client.processes import MODULE
from llm_service.engine_settings import engine_settings
from llm_service.generation.adapters import Adapters
from llm_service.generation.admission import Admission
from llm_service.generation.generator import Generator
from llm_service.generation.sessions import SessionLimits, Sessions
from llm_service.grammar.compiler import Compiler
from llm_service.grammar.messages import StructureLimits, Vocabulary
from llm_service.meters import Meters
from llm_service.model_config.served import ServedModel
from llm_service.prefill.layout import kv_layout
from llm_service.prefill.services import PrefillServices
from llm_service.prompt.builder import PromptBuilder
from llm_service.prompt.mrope import MediaLayout
from llm_service.prompt.output_marks import OutputMarks
from llm_service.prompt.tokens import check_same_tokens, end_tokens
from llm_service.reranker import Reranker
from llm_service.servicer import LlmServicer
from llm_service.settings import EngineSettings
from llm_service.transcriber import Transcriber
from twinlens import __version__
from twinlens.v1.llm_pb2_grpc import add_LlmServiceServicer_to_server

SERVICE = "twinlens.v1.LlmService"
_log = log.get("server")
_COMPILE_SECONDS = 0.7
"""The longest that a structure may take to compile: its caller has an answer within a second."""


@dataclass(frozen=True, slots=True)
class _Model:
    """A model as known before anything is opened. `names` are the names that requests may use, its own first;
    `own_adapters` are the checkpoint's own adapters, folders by modality. `kv_layout` is empty if no KV blocks are
    exchanged."""

    checkpoint: Checkpoint
    served: ServedModel
    settings: EngineSettings
    layout: RowLayout
    digest: str
    kv_layout: bytes
    prompts: PromptBuilder
    names: tuple[str, ...]

    @classmethod
    async def read(cls, config: LlmConfig) -> _Model:
        """Reads the checkpoint. Raises CheckpointError if it cannot be served as configured."""
        checkpoint = Checkpoint.resolve(config.model, config.revision)
        served = await tasks.to_thread(ServedModel.of, checkpoint)
        settings = engine_settings(config, checkpoint, served)
        layout = RowLayout(served.levels, served.hidden_size, DType(settings.dtype))
        digest = await tasks.to_thread(encoder_digest, checkpoint, layout.dtype, served.family.encoder)
        kv = await tasks.to_thread(kv_layout, settings, checkpoint) if config.exchanges_blocks else b""
        if settings.draft_model and config.method == "draft_model":
            await tasks.to_thread(check_same_tokens, checkpoint, Checkpoint(Path(settings.draft_model)))
        prompts = await tasks.to_thread(_prompts, config, checkpoint, served)
        names = tuple(dict.fromkeys(config.served_model_name)) or (checkpoint.name,)
        return cls(checkpoint, served, settings, layout, digest, kv, prompts, names)

    @property
    def name(self) -> str:
        """The model's name in answers and metrics."""
        return self.names[0]

    @property
    def own_adapters(self) -> Mapping[str, str]:
        return self.served.hf.adapters if self.served.hf is not None else {}

    @property
    def vocabulary(self) -> Vocabulary:
        size = self.prompts.vocab_size
        return Vocabulary(str(self.checkpoint.folder), size, sorted(end_tokens(self.checkpoint, size)))


def _prompts(config: LlmConfig, checkpoint: Checkpoint, served: ServedModel) -> PromptBuilder:
    """Raises CheckpointError if there is no template, or not the configured one."""
    marks = OutputMarks.named(config.tool_call_parser, config.reasoning_parser)
    given: dict[str, Any] = {
        "template_variables": config.default_chat_template_kwargs,
        "output_marks": marks,
        "refuses_strict": config.strict_tools == "refuse",
    }
    if not config.chat_template:
        return PromptBuilder(checkpoint, served, **given)
    try:
        template = Path(config.chat_template).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"--chat-template cannot be read: {error}") from error
    return PromptBuilder(checkpoint, served, chat_template=template, **given)


async def serve(config: LlmConfig, *, engine_module: str = MODULE) -> None:
    """Serves until SIGTERM or SIGINT; the engine runs `engine_module`.

    Raises CheckpointError, OSError or Internal if it cannot start.
    """
    log.configure(config.log_level, service="llm")
    stderr_capture.start()
    tracing.start("twinlens-llm")
    tasks.start_threads()
    model = await _Model.read(config)
    adapters_loaded = asyncio.Event()

    async with AsyncExitStack() as running:
        running.push_async_callback(tasks.to_thread, tracing.stop)
        grpc_server = GrpcServer(config, [SERVICE])
        running.push_async_callback(grpc_server.server.stop, None)  # if it ends before draining
        sessions = Sessions(_session_limits(config))
        encoder_cache, engine = _cache_and_engine(
            config,
            model,
            sessions,
            engine_module,
            on_ready=lambda ready: grpc_server.report(ready and adapters_loaded.is_set()),
        )
        running.callback(encoder_cache.close)
        if engine.blocks is not None:
            running.callback(engine.blocks.buffer.close)
        nixl = await _nixl(config, model, running)
        metrics = Metrics("twinlens_llm")
        meters = _meters(metrics, model, grpc_server)
        compiler = Compiler(model.vocabulary, _structure_limits(config), seconds=_COMPILE_SECONDS)
        running.push_async_callback(compiler.stop)
        prefills = _prefill_services(config, model, engine)
        components = _components(config, model, encoder_cache, engine, sessions, compiler, meters, nixl, prefills)
        running.push_async_callback(_prove_idle, components)
        add_LlmServiceServicer_to_server(LlmServicer(components), grpc_server.server)
        await grpc_server.bind()
        meters.watch_kv_events(await _kv_events(config, components, running))
        metrics_address = await running.enter_async_context(metrics.serve(config.metrics_listen))
        running.push_async_callback(engine.stop)
        running.push_async_callback(components.pool.stop)
        if prefills is not None:
            running.push_async_callback(prefills.stop)
            await prefills.start()
        running.push_async_callback(grpc_server.drain)
        if not await _started(grpc_server, components):
            return
        await _load_adapters(config, model, components.adapters)
        adapters_loaded.set()
        grpc_server.report(engine.ready is not None)
        freeze_objects()
        await grpc_server.announce(metrics_address)
        await grpc_server.wait()


async def _load_adapters(config: LlmConfig, model: _Model, adapters: Adapters) -> None:
    """Those that are there from the start: the options' and the checkpoint's own. Raises CheckpointError for an option
    that names none, and TwinlensError."""
    for each in config.lora_modules:
        name, _, path = each.partition("=")
        try:
            await adapters.load(name, path)
        except TwinlensError as error:
            raise CheckpointError(f"--lora-modules {each}: {error}") from error
    for path in dict.fromkeys(model.own_adapters.values()):
        await adapters.load_own(path)


def _cache_and_engine(
    config: LlmConfig, model: _Model, sessions: Sessions, module: str, on_ready: Callable[[bool], None]
) -> tuple[EncoderCache, EngineClient]:
    """The encoder cache, and the engine that reads its rows."""
    encoder_cache = EncoderCache(
        config.row_cache_bytes,
        model.layout,
        retained=sessions.is_retained,
        on_place=lambda place: engine.mirrors.invalidate(place.offset, place.size),
    )
    kv_host = _kv_host(config) if config.exchanges_blocks else None
    engine = EngineClient(
        model.settings if kv_host is None else msgspec.structs.replace(model.settings, kv_host_fd=kv_host.fd),
        encoder_cache.buffer.fd,
        on_ready,
        start_seconds=config.start_seconds,
        step_seconds=config.step_seconds,
        handover_seconds=config.handover_seconds,
        spare_engine=config.spare_engine,
        stream_interval=config.stream_interval,
        module=module,
        kv_host=kv_host,
    )
    engine.mirrors.on_lost = encoder_cache.lose_mirrors
    return encoder_cache, engine


def _kv_host(config: LlmConfig) -> SharedBuffer:
    """The memory of all ranks for KV blocks on the host, if the front shares it. It is allocated while the model is
    loaded: page by page that takes longer than copying blocks there."""
    memory = SharedBuffer.create("kv blocks", config.tp * config.kv_host_bytes)
    tasks.in_daemon_thread(memory.populate)
    return memory


def _prefill_services(config: LlmConfig, model: _Model, engine: EngineClient) -> PrefillServices | None:
    """The services that compute prompts for this one, if configured; not started yet."""
    if not config.prefill_services:
        return None
    assert engine.blocks is not None, "blocks are exchanged"
    return PrefillServices(
        config.prefill_services,
        config.prefill_security(),
        engine.blocks,
        model.kv_layout,
        block_size=config.block_size,
        tokens=config.prefill_tokens,
        seconds=config.prefill_seconds,
    )


def _meters(metrics: Metrics, model: _Model, grpc_server: GrpcServer) -> Meters:
    meters = Meters(metrics)
    meters.describe(
        version=__version__,
        model=model.name,
        architecture=model.checkpoint.architecture,
        digest=model.digest,
        device=model.settings.device,
        dtype=model.settings.dtype,
    )
    grpc_server.watch(meters.failed)
    meters.watch_requests(lambda: grpc_server.inflight_bytes)
    return meters


def _components(
    config: LlmConfig,
    model: _Model,
    encoder_cache: EncoderCache,
    engine: EngineClient,
    sessions: Sessions,
    compiler: Compiler,
    meters: Meters,
    nixl: NixlReader | None,
    prefills: PrefillServices | None,
) -> Components:
    """The parts that answer requests; not started yet."""
    prompts, checkpoint = model.prompts, model.checkpoint
    media = MediaLayout.of(checkpoint.config, model.served.family)
    mirrors = engine.mirrors if config.row_mirror else None
    pool = EncoderPool(config.encoders, _encoder_settings(config, model, media, mirrors, nixl))
    receiver = RowReceiver(pool, encoder_cache, config.encoder_wait_seconds)
    admission = Admission(
        max_requests=config.request_limit(),
        max_waiting=config.max_waiting,
        max_waiting_media=config.max_waiting_media,
        max_waiting_tokens=config.max_waiting_tokens,
    )
    enabled = bool(config.lora_dir)
    adapters = Adapters(engine, model.names, config.max_loaded_loras, enabled=enabled, of_media=model.own_adapters)
    generator = Generator(
        prompts=prompts,
        compiler=compiler,
        receiver=receiver,
        engine=engine,
        admission=admission,
        sessions=sessions,
        meters=meters,
        adapters=adapters,
        prefills=prefills,
    )
    meters.watch(admission, engine, encoder_cache, receiver, pool)
    meters.watch_prefills(prefills)
    meters.watch_adapters(adapters, engine)
    defaults = generation_config.read(checkpoint, config.generation_config, config.override_generation_config)
    embedder = Embedder.of(checkpoint, model.served.hidden_size)
    requests = RequestReader(
        config,
        model.names,
        prompts.vocab_size,
        defaults,
        prompts.modalities,
        adapter=adapters.find,
        own_adapter=adapters.of_media,
        transcriber=Transcriber.of(checkpoint, prompts),
        embedder=embedder,
    )
    return Components(
        config=config,
        names=model.names,
        architecture=checkpoint.architecture,
        digest=model.digest,
        kv_layout=model.kv_layout,
        max_context=model.served.max_context(config.max_context),
        requests=requests,
        prompts=prompts,
        embedder=embedder,
        reranker=Reranker.of(checkpoint, prompts),
        generator=generator,
        adapters=adapters,
        engine=engine,
        encoder_cache=encoder_cache,
        receiver=receiver,
        pool=pool,
    )


async def _started(grpc_server: GrpcServer, components: Components) -> bool:
    """Waits for the engine; False if a signal came first. Raises CheckpointError or Internal if it cannot serve."""
    starting = asyncio.create_task(components.engine.start())
    stopped = asyncio.create_task(grpc_server.wait())
    await components.pool.start()
    await asyncio.wait([starting, stopped], return_when=asyncio.FIRST_COMPLETED)
    if stopped.done():
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return False
    stopped.cancel()
    context, wanted = (await starting).max_context, components.config.max_context
    if context < wanted:
        why = (
            "the model supports no longer ones"
            if context == components.max_context
            else "--kv-cache-bytes: KV blocks hold no longer ones"
        )
        _log.warning("contexts are shorter than --max-context", tokens=context, cause=why)
    return True


async def _prove_idle(components: Components) -> None:
    """Logs a defect if something is still held when every request is over; the service ends anyway.

    Nothing is checked if the grace period ended before the last request.
    """
    if components.generator.open_requests:
        return
    await components.encoder_cache.drain()
    try:
        components.encoder_cache.check_idle()
        components.generator.sessions.check_integrity()
        components.adapters.check_idle()
    except AssertionError as error:
        _log.error("something is still held at the end", cause=str(error))


async def _nixl(config: LlmConfig, model: _Model, running: AsyncExitStack) -> NixlReader | None:
    """Reads encoders' memory by NIXL, if configured, until `running` ends. Raises NixlError."""
    if not config.nixl:
        return None
    reader = NixlReader(config.nixl, config.nixl_bytes, model.layout.dtype)
    running.push_async_callback(reader.stop)
    await reader.start()
    return reader


async def _kv_events(
    config: LlmConfig, components: Components, running: AsyncExitStack
) -> Callable[[], tuple[int, int]] | None:
    """Publishes KV events, if configured, until `running` ends. Returns how many batches were published and dropped.
    Raises OSError."""
    if not config.kv_events:
        return None
    try:
        from llm_service.kv_events import KvEventPublisher
    except ImportError as error:
        raise OSError(f"--kv-events needs the package pyzmq: {install('kv-events')}") from error
    publisher = KvEventPublisher(
        config.kv_events,
        block_size=config.block_size,
        topic=config.kv_events_topic,
        replay_endpoint=config.kv_events_replay,
        replay_bytes=config.kv_events_replay_bytes,
        adapter_name=components.adapters.name_of,
    )
    publisher.start()
    running.push_async_callback(publisher.stop)
    components.engine.on_blocks = publisher.publish
    return lambda: (publisher.published, publisher.dropped)


def _encoder_settings(
    config: LlmConfig, model: _Model, media: MediaLayout, mirrors: Mirrors | None, nixl: NixlReader | None
) -> EncoderSettings:
    return EncoderSettings(
        digest=model.digest,
        layout=model.layout,
        merge=media.merge,
        layout_from_encoder=media.layout_from_encoder,
        security=config.encoder_security(),
        timeout=config.encode_timeout_seconds,
        silence=config.encoder_silence_seconds,
        hedge=config.encoder_hedge_seconds,
        connections=config.encoder_connections,
        shared_memory=config.shared_memory,
        local_dir=config.local_dir,
        mirrors=mirrors,
        nixl=nixl,
    )


def _structure_limits(config: LlmConfig) -> StructureLimits:
    return StructureLimits(
        multiple=config.max_schema_multiple,
        repeats=config.max_structure_repeats,
        depth=config.max_structure_depth,
        compiled_bytes=config.max_compiled_bytes,
    )


def _session_limits(config: LlmConfig) -> SessionLimits:
    return SessionLimits(
        max_sessions=config.max_sessions,
        max_per_tenant=config.max_tenant_sessions,
        seconds=config.session_seconds,
        row_bytes_per_tenant=int(config.row_cache_bytes * config.session_share),
    )
