"""The engine process: `python -m llm_service.engine SOCKET_FD ROW_ARENA_FD`, started by the front, never by hand.

Its main thread computes, a second one decides (see `pipeline`), and a third says every second that the process runs.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import time

import msgspec

from common import log
from common.checkpoint import Checkpoint, CheckpointError
from common.processes import ParentLink, die_with_parent, leave_signals_to_parent
from llm_service.engine.blocks import BlockManager
from llm_service.engine.core import EngineCore
from llm_service.engine.messages import Beat, PullEnded, Ready, ToEngine, Unable
from llm_service.engine.pipeline import Pipeline
from llm_service.engine.scheduler import Limits, Scheduler
from llm_service.engine.structure import Matchers, Structures
from llm_service.engine.wake import Wake
from llm_service.layers.group import ALONE
from llm_service.models.config import TextConfig
from llm_service.settings import EngineSettings
from llm_service.tokens import end_tokens
from llm_service.worker.executor import BEAT_SECONDS, GroupExecutor, LoneExecutor
from llm_service.worker.lead import lead, place_of
from llm_service.worker.load import load_runner, reachable
from llm_service.worker.ranks import device_of


def main() -> None:
    """Serves one front until it goes away."""
    die_with_parent()
    leave_signals_to_parent()
    link: ParentLink[ToEngine] = ParentLink(int(sys.argv[1]), ToEngine)
    try:
        settings = link.receive()
        assert isinstance(settings, EngineSettings)
        log.configure(settings.log_level, service="llm-engine")
        core, pipeline = build(settings, int(sys.argv[2]), link)
    except CheckpointError as error:
        link.send(Unable(str(error)))
    except EOFError:
        _log_end()
    else:
        gc.collect()
        gc.freeze()  # what is here now stays: collections need not look at it again
        threading.Thread(target=_decide, args=(core, pipeline), name="scheduler", daemon=True).start()
        pipeline.work()


def _decide(core: EngineCore, pipeline: Pipeline) -> None:
    """Runs the loop until the front goes away; whatever ends it ends the process."""
    try:
        core.run()
    except EOFError:
        _log_end()
    finally:
        pipeline.close()


def _log_end() -> None:
    log.get("engine").info("the front has ended")


def build(settings: EngineSettings, arena_fd: int, link: ParentLink[ToEngine]) -> tuple[EngineCore, Pipeline]:
    """Loads the model on every rank, makes the KV cache, and tells the front how much there is."""
    size = settings.tensor_parallel
    ranks = lead(settings, arena_fd) if size > 1 else None
    if ranks is not None:
        ranks.tell(msgspec.msgpack.encode(settings))
    group = ranks.group if ranks is not None else ALONE
    places = [place_of(rank, settings, "", 0) for rank in range(size)]
    runner = load_runner(settings, device_of(places[0]), group, arena_fd)
    if ranks is not None:
        ranks.wait_for_all()
    checkpoint = Checkpoint.resolve(settings.model)
    config = TextConfig.of(checkpoint.config)
    blocks, wake = runner.blocks, Wake()
    context = min(config.longest(settings.max_context), blocks * settings.block_size)
    scheduler = Scheduler(
        BlockManager(
            blocks,
            settings.block_size,
            prefix_cache=settings.prefix_cache,
            session_share=settings.session_share,
        ),
        Limits(
            settings.max_running,
            settings.max_step_tokens,
            context,
            settings.keep_media_whole,
            settings.early_prefill_tokens,
        ),
        end_tokens(checkpoint),
        runner.row_bytes,
        Matchers(Structures(checkpoint, config.vocab_size, end_tokens(checkpoint)), wake.set),
    )
    link.send(
        Ready(
            context=context,
            kv_blocks=blocks,
            devices=[place.device_name for place in places],
            reachable=reachable(settings, [device_of(place) for place in places]),
        )
    )
    executor = LoneExecutor(runner) if ranks is None else GroupExecutor(runner, ranks)
    pipeline = Pipeline(executor, lambda id, end: link.send(PullEnded(id, end)))
    threading.Thread(target=_beat, args=(link, scheduler, pipeline), daemon=True).start()
    return EngineCore(link, scheduler, pipeline, wake, overlap=settings.overlap), pipeline


def _beat(link: ParentLink[ToEngine], scheduler: Scheduler, pipeline: Pipeline) -> None:
    """Says every second that this process runs, from a thread of its own, since a step may take longer."""
    with contextlib.suppress(EOFError):
        while True:
            link.send(Beat(scheduler.state(), pipeline.busy_seconds))
            time.sleep(BEAT_SECONDS)


if __name__ == "__main__":
    main()
