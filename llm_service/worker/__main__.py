"""A rank beside rank 0, started by it or by `worker/node`: `python -m llm_service.worker SOCKET_FD ARENA_FD`."""

from __future__ import annotations

import gc
import os
import sys

import msgspec

from common.checkpoints.checkpoint import CheckpointError
from common.process.parent_link import ParentLink, die_with_parent, leave_signals_to_parent
from common.telemetry import log
from llm_service.settings import EngineSettings, Joined, RankPlace

_log = log.get("rank")


def main() -> None:
    """Follows rank 0 until it is gone."""
    die_with_parent()
    leave_signals_to_parent()
    link: ParentLink[RankPlace] = ParentLink(int(sys.argv[1]), RankPlace)
    place, arena_fd = link.receive(), int(sys.argv[2])
    gc.disable()  # objects of imports and loading stay, and each collection would visit them again
    from llm_service.worker.executor import follow  # torch takes a second to import
    from llm_service.worker.heartbeat import PlaceTakenError
    from llm_service.worker.load import load_rank
    from llm_service.worker.ranks import device_of, join

    log.configure("info", service=f"llm-rank-{place.rank}")
    try:
        ranks = join(place)
    except PlaceTakenError as error:
        _log.info("the group before has not ended yet", cause=str(error))
        return  # its parent starts another one
    told = msgspec.msgpack.decode(ranks.hear(), type=EngineSettings)
    settings = msgspec.structs.replace(told, model=place.model, device=place.device, threads=place.threads)
    log.configure(settings.log_level, service=f"llm-rank-{place.rank}")
    if not place.is_on_first_host:  # this host has an arena of its own, as large as the first one's
        os.ftruncate(arena_fd, settings.row_arena_bytes)
    try:
        rank = load_rank(settings, device_of(place), ranks.group, arena_fd)
    except CheckpointError as error:
        _log.error("this rank cannot serve the checkpoint", cause=str(error))
        return  # rank 0 of the same host meets the same, and says so
    gc.freeze()
    gc.enable()
    ranks.wait_for_all()
    link.send(Joined())
    try:
        follow(rank.runner, ranks, rank.changeover)
    except RuntimeError as error:
        _log.info("the group has ended", cause=str(error))


if __name__ == "__main__":
    main()
