"""The engine process: `python -m llm_service.engine SOCKET_FD ROW_ARENA_FD`, started by the front, never by hand."""

from __future__ import annotations

import signal
import sys

import torch

from common import log
from common.arena import SharedBuffer
from common.checkpoint import Checkpoint
from common.processes import ParentLink, die_with_parent
from llm_service.engine.blocks import BlockManager
from llm_service.engine.core import EngineCore
from llm_service.engine.messages import EngineSettings, Ready, ToEngine
from llm_service.engine.scheduler import Limits, Scheduler
from llm_service.models.config import TextConfig
from llm_service.models.loader import load_decoder
from llm_service.tokens import end_tokens
from llm_service.worker.fusion import RowArena
from llm_service.worker.runner import Runner, block_bytes


def main() -> None:
    """Serves one front until it goes away."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the front decides when the engine ends
    link: ParentLink[ToEngine] = ParentLink(int(sys.argv[1]), ToEngine)
    try:
        settings = link.receive()
        assert isinstance(settings, EngineSettings)
        log.configure(settings.log_level, service="llm-engine")
        build(settings, int(sys.argv[2]), link).run()
    except EOFError:
        log.get("engine").info("the front has ended")


def build(settings: EngineSettings, arena_fd: int, link: ParentLink[ToEngine]) -> EngineCore:
    """Loads the model, makes the KV cache, and tells the front how much there is."""
    torch.set_num_threads(settings.threads or torch.get_num_threads())
    checkpoint = Checkpoint.resolve(settings.model)
    config = TextConfig.of(checkpoint.config)
    device, dtype = torch.device(settings.device), getattr(torch, settings.dtype)
    count = settings.kv_cache_bytes // block_bytes(config, settings.block_size, dtype.itemsize)
    context = min(settings.max_context or config.max_position, config.max_position, count * settings.block_size)
    arena = RowArena(
        SharedBuffer.attach(arena_fd, settings.row_bytes).view, settings.row_levels, config.hidden_size, dtype
    )
    runner = Runner(load_decoder(checkpoint, dtype, device), arena, count, settings.block_size)
    scheduler = Scheduler(
        BlockManager(count, settings.block_size, prefix_cache=settings.prefix_cache),
        Limits(settings.max_running, settings.max_step_tokens, context),
        end_tokens(checkpoint),
        arena.row_bytes,
    )
    link.send(Ready(context=context, kv_blocks=count, device=settings.device))
    return EngineCore(link, scheduler, runner)


if __name__ == "__main__":
    main()
