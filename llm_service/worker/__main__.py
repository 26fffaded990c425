"""A rank beside rank 0, started by it: `python -m llm_service.worker RANK SIZE PORT TIMEOUT DEVICE ARENA_FD`."""

from __future__ import annotations

import signal
import sys

import msgspec

from common import log
from common.checkpoint import CheckpointError
from common.processes import die_with_parent
from llm_service.settings import EngineSettings
from llm_service.worker.executor import follow
from llm_service.worker.load import load_runner
from llm_service.worker.ranks import device_of, join


def main() -> None:
    """Follows rank 0 until it is gone."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    rank, size, port = (int(word) for word in sys.argv[1:4])
    timeout, device, arena_fd = float(sys.argv[4]), sys.argv[5], int(sys.argv[6])
    ranks = join(rank, size, port, device, timeout)
    settings = msgspec.msgpack.decode(ranks.hear(), type=EngineSettings)
    log.configure(settings.log_level, service=f"llm-rank-{rank}")
    try:
        runner = load_runner(settings, device_of(rank, device), ranks.group, arena_fd)
    except CheckpointError:
        return  # rank 0 meets the same, and says so
    ranks.wait_for_all()
    try:
        follow(runner, ranks)
    except RuntimeError as error:
        log.get("rank").info("the group has ended", cause=str(error))


if __name__ == "__main__":
    main()
