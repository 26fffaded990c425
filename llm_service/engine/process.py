"""What an engine process does, whoever computes in it: reads its settings, has the model loaded, runs the loop.

Its main thread computes, a second one decides (see `step_queue`), and a third says every second that the process runs.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from common.aio import tasks
from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from common.process import stacks
from common.process.parent_link import ParentLink, die_with_parent, leave_signals_to_parent
from common.telemetry import log
from llm_service.engine.block_events import BlockEvents
from llm_service.engine.block_exchange import BlockExchange
from llm_service.engine.block_manager import BlockManager
from llm_service.engine.core import EngineCore, ReadAdapter, Wake
from llm_service.engine.limits import SchedulerLimits
from llm_service.engine.matchers import Matchers
from llm_service.engine.messages import Beat, Defect, Ready, ToEngine, Unable
from llm_service.engine.scheduler import Scheduler
from llm_service.engine.step_queue import Executor, StepQueue
from llm_service.engine.structure import Structures
from llm_service.families.chunk_rule import ANYWHERE, ChunkRule
from llm_service.model_config.served import ServedModel, Weights
from llm_service.prompt.tokens import end_tokens
from llm_service.settings import DRAFT_HEADS, EngineSettings

_BEAT_SECONDS = 1.0
"""The front hears this often that the process runs."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What computes the steps, and what loading it has found out."""

    executor: Executor
    blocks: int
    """KV blocks."""
    row_bytes: int
    """Of one embedding row in the arena."""
    devices: list[str]
    """The ranks'."""
    reachable: list[str]
    """UUIDs of the devices whose memory every rank can read."""
    block_bytes: int = 0
    compiling: Callable[[], bool] = lambda: False
    """Whether kernels are still being compiled; for any thread."""
    late_compiles: Callable[[], int] = lambda: 0
    """How many kernels steps have had to wait for; for any thread."""
    state_slots: int = 0
    """State slots for running sequences; 0 if no layer has states."""
    snapshot_slots: int = 0
    """Further state slots, for snapshots."""
    state_chunk: int = 1
    """A sequence may be cut at multiples of this many tokens without changing a bit."""
    chunk_rule: ChunkRule = ANYWHERE
    forgets_answers: bool = False
    """Cached blocks of an answer must not be used for a prompt that continues it."""
    read_adapter: ReadAdapter | None = None
    """For any thread."""
    weights: Weights = field(default_factory=Weights)
    """Of rank 0."""
    max_step_tokens: int = 0
    """0: as the settings say."""
    waits: int = 0
    """How often a step of one token synchronises with the GPU without need."""
    host_blocks: int = 0
    """Number of blocks that host memory has room for."""
    place_bytes: int = 0
    """Bytes of each of these in a rank's memory if the front reads it as well, else 0."""


Load = Callable[[EngineSettings, int], Loaded]
"""Loads a model, given settings and the descriptor of the row arena. Raises CheckpointError if that fails."""


def serve(load: Load) -> None:
    """Serves the front that started this process, as `python -m MODULE SOCKET_FD ROW_ARENA_FD`, until it is gone."""
    die_with_parent()
    leave_signals_to_parent()
    stacks.write_when_asked()
    link: ParentLink[ToEngine] = ParentLink(int(sys.argv[1]), ToEngine)
    gc.disable()  # objects of imports and loading stay; each collection would visit them again
    try:
        settings = link.receive()
        assert isinstance(settings, EngineSettings)
        log.configure(settings.log_level, service="llm-engine")
        loaded = load(settings, int(sys.argv[2]))
        gc.collect()  # before it reports that it serves: it sends nothing meanwhile
        gc.freeze()
        core, steps = _build(settings, loaded, link)
    except CheckpointError as error:
        link.send(Unable(str(error)))
    except EOFError:
        _log_end()
    else:
        gc.enable()
        _run(core, steps, link)


def _build(settings: EngineSettings, loaded: Loaded, link: ParentLink[ToEngine]) -> tuple[EngineCore, StepQueue]:
    """Builds the loop and tells the front what it has room for."""
    checkpoint = Checkpoint.resolve(settings.model)
    model = ServedModel.of(checkpoint, settings.hf)
    if settings.speculative_tokens and loaded.state_slots and not loaded.snapshot_slots:
        raise CheckpointError(
            "--speculative-tokens: there is no memory for the states to return to after a wrong draft"
        )
    if settings.kv_events and loaded.state_slots:
        raise CheckpointError(
            "--kv-events is not for models whose layers keep states: cached blocks do not suffice there"
        )
    stop_ids, wake = end_tokens(checkpoint, model.vocab_size), Wake()
    structures = Structures(checkpoint, model.vocab_size, stop_ids, cache_bytes=settings.structure_cache_bytes)
    block_events = BlockEvents() if settings.kv_events else None
    blocks = _blocks(settings, loaded, block_events)
    limits = _limits(settings, loaded, model.max_context(settings.max_context))
    _log_room(settings, loaded, limits)
    scheduler = Scheduler(blocks, limits, stop_ids, loaded.row_bytes, Matchers(structures.matcher, wake.set))
    link.send(
        Ready(
            max_context=limits.max_context,
            kv_blocks=loaded.blocks,
            step_tokens=limits.max_step_tokens,
            prefix_caching=_goes_by_blocks(blocks, loaded),
            devices=loaded.devices,
            reachable=loaded.reachable,
            weights=loaded.weights,
            waits=loaded.waits,
            place_bytes=loaded.place_bytes,
        )
    )
    steps = StepQueue(loaded.executor)
    threading.Thread(target=_beat, args=(link, scheduler, steps, loaded), daemon=True).start()
    core = EngineCore(
        link,
        scheduler,
        steps,
        wake,
        overlap=settings.overlap,
        read_adapter=loaded.read_adapter,
        block_events=block_events,
        exchange=BlockExchange(blocks, steps.order, link.send),
    )
    return core, steps


def _log_room(settings: EngineSettings, loaded: Loaded, limits: SchedulerLimits) -> None:
    """Logs how much this engine can hold at once; bytes are those of one rank."""
    tokens = loaded.blocks * settings.block_size
    host = {"host_kv_tokens": loaded.host_blocks * settings.block_size} if loaded.host_blocks else {}
    states = {"states": loaded.state_slots, "snapshots": loaded.snapshot_slots} if loaded.state_slots else {}
    log.get("engine").info(
        "room for sequences",
        kv_tokens=tokens,
        context=limits.max_context,
        full_contexts=round(tokens / limits.max_context, 2),
        max_running=limits.max_running,
        step_tokens=limits.max_step_tokens,
        kv_bytes=loaded.blocks * loaded.block_bytes,
        weight_bytes=loaded.weights.bytes,
        **host,
        **states,
    )


def _blocks(settings: EngineSettings, loaded: Loaded, observer: BlockEvents | None) -> BlockManager:
    return BlockManager(
        loaded.blocks,
        settings.block_size,
        prefix_cache=settings.prefix_cache,
        session_share=settings.session_share,
        state_slots=loaded.state_slots + loaded.snapshot_slots,
        state_chunk=loaded.state_chunk,
        host_blocks=loaded.host_blocks,
        observer=observer,
    )


def _limits(settings: EngineSettings, loaded: Loaded, max_context: int) -> SchedulerLimits:
    """The limits of an engine whose model has a context of `max_context` tokens."""
    return SchedulerLimits(
        min(settings.max_running, loaded.state_slots or settings.max_running),
        loaded.max_step_tokens or settings.max_step_tokens,
        min(max_context, loaded.blocks * settings.block_size),
        settings.keep_media_whole,
        settings.early_prefill_tokens,
        chunk_rule=loaded.chunk_rule,
        forgets_answers=loaded.forgets_answers,
        speculative_tokens=settings.speculative_tokens,
        draft_rows=settings.draft_rows,
        proposes=settings.speculative_method in ("draft_model", *DRAFT_HEADS),
        decode_slowdown=settings.decode_slowdown,
        max_loras=settings.max_loras,
    )


def _goes_by_blocks(blocks: BlockManager, loaded: Loaded) -> bool:
    """Whether any prompt can continue from an earlier one's blocks: not if layers have states, or if the start of a
    prompt depends on its end."""
    return blocks.prefix_cache and not blocks.state_slots and not loaded.chunk_rule.of_prompts


def _run(core: EngineCore, steps: StepQueue, link: ParentLink[ToEngine]) -> None:
    """Computes what another thread schedules until the front goes away; an error in either thread ends the process."""
    decided = tasks.in_daemon_thread(core.run)
    decided.add_done_callback(lambda _: steps.close())
    try:
        steps.work()
        decided.result()
    except EOFError:
        _log_end()
    except Exception as error:
        with contextlib.suppress(EOFError):
            link.send(Defect(stacks.place(error)))
        raise


def _log_end() -> None:
    log.get("engine").info("the front has ended")


def _beat(link: ParentLink[ToEngine], scheduler: Scheduler, steps: StepQueue, loaded: Loaded) -> None:
    """Says every second that this process runs, from a thread of its own, since a step may take longer."""
    with contextlib.suppress(EOFError):
        while True:
            link.send(Beat(scheduler.state(), steps.busy_seconds, loaded.compiling(), loaded.late_compiles()))
            time.sleep(_BEAT_SECONDS)
