"""A device worker without a tower: `python -m testkit.light.worker LINK_FD STAGING_FD STORE_FD`. Its rows are
hashes."""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path

import numpy as np

from common.checkpoints.checkpoint import Checkpoint
from common.process import stacks
from common.process.parent_link import ParentLink, die_with_parent, leave_signals_to_parent
from common.rows.wire import DType, RowLayout
from common.shm.arena import SharedBuffer
from common.telemetry import log
from encoder_service.families import config
from encoder_service.worker.messages import Batch, BatchDone, Piece, ToWorker, WorkerReady, WorkerSettings


def main(link_fd: int, staging_fd: int, store_fd: int) -> None:
    """Serves batches until the parent is gone."""
    die_with_parent()
    leave_signals_to_parent()
    stacks.write_when_asked()
    link: ParentLink[WorkerSettings | Batch] = ParentLink(link_fd, ToWorker)
    settings = link.receive()
    assert isinstance(settings, WorkerSettings)
    log.configure(settings.log_level, service="encoder")
    model = config.read(Checkpoint(Path(settings.folder)))
    layout = RowLayout(model.levels, model.width, DType(settings.dtype))
    staging = SharedBuffer.attach(staging_fd, settings.staging_bytes)
    store = SharedBuffer.attach(store_fd, settings.store_bytes)
    link.send(WorkerReady(attention="light"))
    while True:
        try:
            batch = link.receive()
        except EOFError:
            return
        assert isinstance(batch, Batch)
        started = time.perf_counter()
        for piece in batch.pieces:
            data = rows(np.asarray(staging.view), piece, layout)
            store.view[piece.rows : piece.rows + len(data)] = data
        link.send(BatchDone(not_finite=[], preprocess_seconds=0.0, vit_seconds=time.perf_counter() - started))


def rows(staging: np.ndarray, piece: Piece, layout: RowLayout) -> bytes:
    """Row-major [tokens, levels, width]. Each frame group has rows of its own, whichever piece it comes in."""
    groups = piece.grid[0]
    each = piece.tokens // groups
    size = piece.frames * piece.height * piece.width * piece.depth
    pixels = staging[piece.pixels : piece.pixels + size].reshape(piece.frames, -1)
    frames = -(-piece.frames // groups)
    out = []
    for group in range(groups):
        seen = hashlib.blake2b(repr((piece.modality, piece.resized, piece.grid[1:])).encode(), digest_size=16)
        seen.update(np.ascontiguousarray(pixels[group * frames : (group + 1) * frames]))
        draws = np.random.Generator(np.random.Philox(key=int.from_bytes(seen.digest(), "little")))
        numbers = draws.standard_normal(each * layout.levels * layout.width, np.float32)
        out.append(_bytes(numbers, layout.dtype))
    return b"".join(out)


def _bytes(numbers: np.ndarray, dtype: DType) -> bytes:
    match dtype:
        case DType.FLOAT32:
            return numbers.tobytes()
        case DType.FLOAT16:
            return numbers.astype(np.float16).tobytes()
        case DType.BFLOAT16:
            return (numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
