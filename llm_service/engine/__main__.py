"""The engine process with a model in it: `python -m llm_service.engine SOCKET_FD ROW_ARENA_FD`, started by the front,
never by hand. With `--tp` it is rank 0, and starts the other ranks of its host."""

from __future__ import annotations

import msgspec

from common.gpu.late_compiles import LateCompiles
from llm_service.engine.process import Loaded, serve
from llm_service.settings import EngineSettings


def load(settings: EngineSettings, arena_fd: int) -> Loaded:
    """Loads the model on every rank and allocates the KV cache. Raises CheckpointError if that fails."""
    from llm_service.layers.tensor_parallel import ALONE  # torch takes a second to import
    from llm_service.worker.executor import GroupExecutor, LoneExecutor
    from llm_service.worker.load import load_rank
    from llm_service.worker.load_adapters import adapter_reader
    from llm_service.worker.mirror import reachable
    from llm_service.worker.ranks import device_of, lead, rank_place

    size = settings.tensor_parallel
    ranks = lead(settings, arena_fd) if size > 1 else None
    if ranks is not None:
        ranks.tell(msgspec.msgpack.encode(settings))
    group = ranks.group if ranks is not None else ALONE
    places = [rank_place(number, settings, "", 0) for number in range(size)]
    rank = load_rank(settings, device_of(places[0]), group, arena_fd)
    runner, changeover, host_cache = rank.runner, rank.changeover, rank.runner.host_cache
    late_compiles = LateCompiles()
    if settings.device != "cpu":
        late_compiles.watch()  # the other ranks compile the same kernels
    if ranks is not None:
        ranks.wait_for_all()
    return Loaded(
        executor=LoneExecutor(runner, changeover) if ranks is None else GroupExecutor(runner, ranks, changeover),
        blocks=runner.caches.blocks,
        block_bytes=rank.block_bytes,
        state_slots=runner.caches.state_slots,
        snapshot_slots=runner.caches.snapshot_slots,
        host_blocks=0 if host_cache is None else host_cache.count,
        place_bytes=0 if host_cache is None or not settings.kv_host_fd else host_cache.place_bytes,
        state_chunk=runner.caches.state_chunk,
        chunk_rule=runner.chunk_rule,
        forgets_answers=runner.forgets_answers,
        read_adapter=adapter_reader(settings),
        row_bytes=runner.row_bytes,
        max_step_tokens=rank.max_step_tokens,
        weights=rank.weights,
        waits=rank.waits,
        devices=[place.device_name for place in places],
        reachable=reachable(settings, [device_of(place) for place in places]),
        compiling=lambda: changeover is not None and changeover.waits,
        late_compiles=lambda: late_compiles.count,
    )


if __name__ == "__main__":
    serve(load)
