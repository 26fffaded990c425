"""Runs batches: pixels from the staging arena, patches, the tower, rows into the store arena."""

from __future__ import annotations

import importlib
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from common import log
from common.arena import SharedBuffer
from common.checkpoint import Checkpoint
from common.device_memory import Pool, as_unsigned, check_row_bytes, driver, row_sum
from common.gpu import CudaCapture, use_gpu
from common.media.item import Grid, Modality, Options
from encoder_service.families import config
from encoder_service.item import Inspection
from encoder_service.models.tower import PackedTower, load_tower
from encoder_service.worker.graphs import GraphedTower, budgets_for
from encoder_service.worker.messages import Batch, BatchDone, Piece, PoolMade, WorkerReady, WorkerSettings
from encoder_service.worker.patches import Preprocess

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_log = log.get("runner")


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """A batch whose patches [N, dim] are on the device, and how long that took."""

    batch: Batch
    patches: Tensor
    seconds: float


class Runner:
    """One tower on one device. `prepare` may be called by one thread while another is in `compute`.

    Raises CheckpointError where the checkpoint cannot be served, AttentionUnavailable, GraphsUnavailable and
    DeviceMemoryError where the device cannot do what was asked for.
    """

    def __init__(self, settings: WorkerSettings, staging: SharedBuffer, store: SharedBuffer) -> None:
        if settings.threads:
            torch.set_num_threads(settings.threads)
        self.device = torch.device(settings.device)
        if self.device.type == "cuda":
            use_gpu(self.device)
        self.dtype = DTYPES[settings.dtype]
        checkpoint = Checkpoint(Path(settings.folder))
        self._config = config.read(checkpoint)
        self._preprocess = {each: _function(by.preprocess) for each, by in self._config.processors.items()}
        self._pool = self._make_pool(settings.pool_bytes) if settings.pool_bytes else None
        self._tower = load_tower(checkpoint, self._config, self.device, self.dtype, settings.attention)
        self._graphed = self._graphs(settings)
        self._side = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._staging = torch.frombuffer(staging.view, dtype=torch.uint8)
        self._store = torch.frombuffer(store.view, dtype=torch.uint8)

    @torch.inference_mode()
    def warm_up(self) -> WorkerReady:
        """Runs a small picture through everything once, since the first pass of a process is slow.

        On a GPU a larger one as well: kernels are compiled for short segments and for long ones.
        """
        modality, processor = next(iter(self._config.processors.items()))
        for side in (64, 320) if self.device.type == "cuda" else (64,):
            plan = processor.plan(Inspection(side, side), Options(min_pixels=side * side, max_pixels=side * side))
            shape = (len(plan.frames), plan.height, plan.width, 3)
            pixels = torch.zeros(shape, dtype=torch.uint8, device=self.device)
            inputs = self._preprocess[modality](pixels, plan.resized, processor).to(self.dtype)
            self._tower(inputs, [plan.grid]).isfinite().all().item()
        attention = self._tower.backend.name if isinstance(self._tower, PackedTower) else "its own"
        made = PoolMade(self._pool.device, self._pool.handle, self._pool.size) if self._pool else None
        return WorkerReady(attention, self._graphed.budgets if self._graphed else [], made)

    def run(self, batch: Batch) -> BatchDone:
        """Computes a batch and writes its rows, row-major, one piece after the other."""
        return self.compute(self.prepare(batch))

    @torch.inference_mode()
    def prepare(self, batch: Batch) -> PreparedBatch:
        """Makes patches of a batch's pixels. On a GPU that has a stream of its own, which is waited for here, so that
        whoever computes with the patches need not know of it."""
        started = time.perf_counter()
        with self._beside():
            patches = torch.cat([self._patches(piece) for piece in batch.pieces])
            if self._side is not None:
                self._side.synchronize()
        return PreparedBatch(batch, patches, time.perf_counter() - started)

    @torch.inference_mode()
    def compute(self, prepared: PreparedBatch) -> BatchDone:
        """Runs the tower and writes the rows of a batch; they are there, and its patches no longer read, on return."""
        started, pieces = time.perf_counter(), prepared.batch.pieces
        replays = self._graphed.replays if self._graphed else 0
        rows = (self._graphed or self._tower)(prepared.patches, [Grid(*piece.grid) for piece in pieces])
        bad, sums = self._write(rows, pieces)
        return BatchDone(
            not_finite=bad,
            preprocess_seconds=prepared.seconds,
            vit_seconds=time.perf_counter() - started,
            replayed=self._graphed is not None and self._graphed.replays > replays,
            row_sums=sums,
        )

    def is_usable(self) -> bool:
        """Whether the device goes on computing. After some failures of a kernel, such as an access to memory that is
        not there, everything else that a process asks of its GPU fails as well."""
        if self.device.type == "cuda":
            try:
                torch.cuda.synchronize(self.device)
            except RuntimeError:
                return False
        return True

    def _make_pool(self, size: int) -> Pool:
        check_row_bytes(self._config.levels * self._config.width * self.dtype.itemsize)
        return driver(self.device).create(self.device, size)

    def _beside(self) -> AbstractContextManager[object]:
        """What is started inside does not wait for the tower. A thread has a current device of its own."""
        if self._side is None:
            return nullcontext()
        torch.cuda.set_device(self.device)
        return torch.cuda.stream(self._side)

    @torch.inference_mode()
    def _graphs(self, settings: WorkerSettings) -> GraphedTower | None:
        budgets = budgets_for(settings.graphs, self._tower, self.device, settings.batch_patches)
        if not budgets or not isinstance(self._tower, PackedTower):
            return None
        started = time.perf_counter()
        made = GraphedTower(
            self._tower,
            budgets,
            CudaCapture(self.device),
            max_bytes=settings.graph_bytes,
            device=self.device,
            dtype=self.dtype,
        )
        seconds = round(time.perf_counter() - started, 3)
        _log.info("graphs are captured", patches=made.budgets, attention=self._tower.captured.name, seconds=seconds)
        return made

    def _patches(self, piece: Piece) -> Tensor:
        """A piece's patches [t·h·w, dim] in the tower's dtype, on its device."""
        shape = (piece.frames, piece.height, piece.width, 3)
        count = piece.frames * piece.height * piece.width * 3
        pixels = self._staging[piece.pixels : piece.pixels + count].view(shape).to(self.device)
        modality = Modality(piece.modality)
        return self._preprocess[modality](pixels, piece.resized, self._config.processors[modality]).to(self.dtype)

    def _write(self, rows: Tensor, pieces: list[Piece]) -> tuple[list[int], list[int]]:
        """Copies rows [tokens, levels, width] to where each piece's belong; returns the pieces that are not finite, and
        the sums of those in the pool.

        Whether rows are finite is found out for all at once, and so are the sums: on a GPU each answer is a wait. The
        last one is also what makes sure that the pool is written when its rows are announced.
        """
        finite = rows.isfinite().flatten(1).all(dim=1).cpu()
        bad, sums, start = [], torch.zeros(len(pieces), dtype=torch.int64, device=rows.device), 0
        for index, piece in enumerate(pieces):
            end = start + piece.tokens
            if bool(finite[start:end].all()):
                data = rows[start:end].contiguous().view(-1).view(torch.uint8)
                if self._pool is not None and piece.pool >= 0:
                    self._pool.write(piece.pool, data)
                    sums[index] = row_sum(data, len(data) // piece.tokens)
                self._store[piece.rows : piece.rows + len(data)].copy_(data)
            else:
                bad.append(index)
            start = end
        return bad, [as_unsigned(each) for each in sums.tolist()] if self._pool is not None else []


def _function(name: str) -> Preprocess:
    """The function that "module:function" names."""
    module, _, attribute = name.partition(":")
    found: Preprocess = getattr(importlib.import_module(module), attribute)
    return found
