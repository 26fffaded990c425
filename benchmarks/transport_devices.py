"""Device memory of `benchmarks.transport_ends`: a pool with the sender's rows, a mirror of the reader's arena."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch

from common.gpu.device_memory import as_unsigned, driver, row_sum
from common.rows.wire import RowLayout
from encoder_service.engine.device_pool import DevicePools
from encoder_service.engine.embedding_store import EmbeddingStore, Entry
from encoder_service.worker.messages import PoolMade
from llm_service.engine.messages import PullEnded
from llm_service.engine_client.mirrors import Mirrors
from llm_service.worker.messages import MirrorOrder, PullRows
from llm_service.worker.mirror import Mirror


def fill(pools: DevicePools, device: str, store: EmbeddingStore, entries: Sequence[Entry]) -> None:
    """Writes the rows of all entries to a pool, as a device worker does."""
    at = torch.device(device)
    memory = driver(at).create(at, sum(entry.span.size for entry in entries))
    pool = pools.open(PoolMade(memory.device, memory.handle, memory.size))
    assert pool is not None
    for entry in entries:
        piece = pool.allocate(entry.header.tokens)
        assert piece is not None
        data = torch.from_numpy(np.array(store.buffer.slice(entry.span))).to(at)
        memory.write(piece.span.offset, data)
        piece.commit(as_unsigned(int(row_sum(data, pools.row_bytes))))
        entry.allocation.copies[0] = piece


class LocalMirrors(Mirrors):
    """A lone rank's mirror, in the process that gives the orders. `seconds` is how long the last copy took, with its
    checks."""

    def __init__(self, device: str, size: int, layout: RowLayout) -> None:
        super().__init__(self._obey)
        at = torch.device(device)
        self._mirror = Mirror(driver(at), at, size, layout.row_bytes, torch.bfloat16)
        self.seconds = 0.0
        self.opened(driver(at).reachable([at]))

    def _obey(self, order: MirrorOrder) -> None:
        started = time.perf_counter()
        end = self._mirror.obey(order, lambda own: own)
        if isinstance(order, PullRows):
            self.seconds = time.perf_counter() - started
            self.ended(PullEnded(order.id, end))
