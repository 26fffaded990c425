"""Runs batches: pixels from the staging arena, patches, the tower, rows into the store arena."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from common.checkpoints.checkpoint import Checkpoint
from common.gpu.device import gpu_seconds, use_gpu
from common.gpu.device_memory import as_unsigned
from common.gpu.graphs import CudaCapture
from common.media.item import Grid, Modality, Options
from common.process.core_share import CoreShare
from common.shm.arena import SharedBuffer
from common.telemetry import log
from encoder_service.families import config
from encoder_service.item import SAMPLE_RATE, Inspection
from encoder_service.models.tower import AttendingTower, PackedTower, Tower, load_tower
from encoder_service.worker.graphs import Choice, GraphedTower, budgets_for
from encoder_service.worker.messages import Batch, BatchDone, Piece, WorkerReady, WorkerSettings
from encoder_service.worker.patches import PatchWriter, PicturePatches, Preprocess
from encoder_service.worker.piece_memory import RowWriter, StagedPieces, pool_for
from encoder_service.worker.pixel_ring import WayIn, way_into
from encoder_service.worker.row_ring import Event, Exit, exit_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_log = log.get("runner")


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """Pieces whose patches [N, dim], or other tower inputs, are on the device, with everything else that their pass
    needs, and how long that took. `places` as in `BatchDone.pieces`."""

    pieces: Sequence[Piece]
    patches: Any
    ready: Any
    seconds: float
    places: Sequence[int] = ()


class PassFailed(RuntimeError):
    """A pass failed of the pieces at these `places` of a batch, as in `BatchDone.pieces`."""

    def __init__(self, places: Sequence[int], cause: RuntimeError) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}")
        self.places = places


@dataclass(frozen=True, slots=True)
class BegunBatch:
    """Pieces that the device is computing, with what it reads and writes meanwhile.

    `rows` [tokens, levels, width]; `finite` [tokens] bool; `sums` [pieces] int64, of rows in the pool, else 0. They are
    valid once `computed` has happened.
    """

    prepared: PreparedBatch
    rows: Tensor
    finite: Tensor
    sums: Tensor
    computed: Event
    replayed: bool
    began: float


@runtime_checkable
class StagedTower(Protocol):
    """A tower that prepares everything besides patches in advance, so that the pass itself never waits for the host."""

    def prepare(self, grids: Sequence[Grid], device: torch.device) -> Any:
        """The second argument of `run`, on the device; on any stream."""
        ...

    def run(self, patches: Any, ready: Any) -> Tensor:
        """Patches [N, dim], or what the runner prepares → rows [tokens, levels, width], which no later pass changes."""
        ...


class Graphed(Protocol):
    """Graphs of a tower: how many passes were `replays`, and the `budgets` of patches with graphs."""

    replays: int

    @property
    def budgets(self) -> list[int]: ...


class _InOnePiece:
    """A tower that works nothing out beforehand."""

    def __init__(self, tower: Tower) -> None:
        self._tower = tower

    def prepare(self, grids: Sequence[Grid], device: torch.device) -> Sequence[Grid]:  # noqa: ARG002
        return grids

    def run(self, patches: Tensor, ready: Sequence[Grid]) -> Tensor:
        return self._tower(patches, ready)


class Runner:
    """One tower on one device, computing in `dtype`. One thread may prepare `parts` of batches while another is in
    `compute`, and a third in `finish`, in the same order.

    `way_in` and `way_out` None: the device's own. Raises CheckpointError if the checkpoint cannot be served, and
    AttentionUnavailable, GraphsUnavailable or DeviceMemoryError if the device does not support what is configured.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        staging: SharedBuffer,
        store: SharedBuffer,
        *,
        way_in: WayIn | None = None,
        way_out: Exit | None = None,
    ) -> None:
        self.device = _device_of(settings)
        self._row_dtype = DTYPES[settings.dtype]
        self.dtype = DTYPES[settings.tower_dtype or settings.dtype]
        row_bytes = self.read(settings) * self._row_dtype.itemsize
        pool = pool_for(self.device, settings.pool_bytes, row_bytes)  # before the tower measures free memory
        self._graphed: Graphed | None = None
        self._staged = self.load(settings)
        self._share_of_cores = self._divide_cores(settings)
        self._staged_pieces, self._way_in = StagedPieces(staging), way_in or way_into(self.device)
        self._row_writer = RowWriter(store, way_out or exit_of(self.device), pool)
        self._last_end = 0.0
        self._side = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def read(self, settings: WorkerSettings) -> int:
        """Reads the checkpoint's settings; returns the number of elements of a row."""
        self._config = config.read(Checkpoint(Path(settings.folder)))
        self._preprocess = {each: _function(by.preprocess) for each, by in self._config.processors.items()}
        self._writers = self._found_writers()
        return self._config.levels * self._config.width

    @torch.inference_mode()
    def _found_writers(self) -> dict[Modality, PatchWriter]:
        """By modality, what makes patches by kernels, if anything does."""
        return {
            modality: writer
            for modality, made in self._preprocess.items()
            if isinstance(made, PicturePatches)
            and (writer := made.writer(self._config.processors[modality], self.dtype, self.device)) is not None
        }

    def load(self, settings: WorkerSettings) -> StagedTower:
        """The tower, with graphs if there are any."""
        checkpoint = Checkpoint(Path(settings.folder))
        given = self.device, self.dtype, settings.attention, settings.kernels
        self._tower = load_tower(checkpoint, self._config, *given)
        self._graphed = graphed = self._graphs(settings)
        return graphed or (self._tower if isinstance(self._tower, StagedTower) else _InOnePiece(self._tower))

    @torch.inference_mode()
    def warm_up(self) -> WorkerReady:
        """Runs a small picture through everything once, since the first pass of a process is slow.

        On a GPU a larger one as well: kernels are compiled for short segments and for long ones.
        """
        modality, processor = next(iter(self._config.processors.items()))
        for side in (64, 320) if self.device.type == "cuda" else (64,):
            plan = processor.plan(*_example(modality, side))
            shape = (len(plan.frames), plan.height, plan.width, plan.depth)
            pixels = torch.zeros(shape, dtype=torch.uint8, device=self.device)
            inputs = self._preprocess[modality](pixels, plan.resized, processor).to(self.dtype)
            self._staged.run(inputs, self._staged.prepare([plan.grid], self.device)).isfinite().all().item()
        return WorkerReady(self.attention, self._graphed.budgets if self._graphed else [], self._row_writer.pool_made)

    @property
    def attention(self) -> str:
        """The name of the back end."""
        return self._tower.backend.name if isinstance(self._tower, AttendingTower) else "its own"

    def _divide_cores(self, settings: WorkerSettings) -> CoreShare | None:
        if self.device.type != "cpu" or not settings.core_share:
            return None
        share = CoreShare.of_this_host(torch.get_num_threads(), self._use_threads)
        if share is not None:
            share.between(self.blocks())
        return share

    def _use_threads(self, count: int) -> None:
        """Sets the number of threads of torch and of our kernels."""
        if self.attention == "numba":
            from common.cpu.jit import use_threads

            use_threads(count)
        else:
            torch.set_num_threads(count)

    def blocks(self) -> Iterable[torch.nn.Module]:
        """The tower's blocks, if it is built from blocks."""
        found: Iterable[torch.nn.Module] = getattr(self._tower, "blocks", ())
        return found

    def run(self, batch: Batch) -> list[BatchDone]:
        """Computes a batch and writes its rows, row-major, piece after piece; returns the outcome of each part."""
        return [self.finish(self.compute(part)) for part in self.parts(batch, lambda: False)]

    def parts(self, batch: Batch, hungry: Callable[[], bool]) -> Iterator[PreparedBatch]:  # noqa: ARG002
        """The parts that are computed in one pass each, as soon as they are prepared. While somebody is `hungry`,
        waiting for one, a part may be smaller. Raises RuntimeError if the rest of the batch cannot be prepared."""
        yield self.prepare(batch)

    @torch.inference_mode()
    def prepare(self, batch: Batch) -> PreparedBatch:
        """Makes patches of a batch's pixels, and the tables of its pass. A GPU does so on a stream of its own, which is
        waited for here, so that the pass need not know of it."""
        started = time.perf_counter()
        with self._beside():
            patches = self._batch_patches(batch.pieces)
            ready = self._staged.prepare([Grid(*piece.grid) for piece in batch.pieces], self.device)
            if self._side is not None:
                self._side.synchronize()
        return PreparedBatch(batch.pieces, patches, ready, time.perf_counter() - started)

    @torch.inference_mode()
    def compute(self, prepared: PreparedBatch) -> BegunBatch:
        """Launches the tower's pass and the checks of its rows; waits for neither. Raises PassFailed."""
        began, replays = time.perf_counter(), self._graphed.replays if self._graphed else 0
        self._use_device()
        with _failing(prepared):
            with self._share_of_cores.computing() if self._share_of_cores is not None else nullcontext():
                rows = self._staged.run(prepared.patches, prepared.ready).to(self._row_dtype).contiguous()
            finite = rows.isfinite().flatten(1).all(dim=1)
            sums = self._row_writer.write_to_pool(rows, prepared.pieces)
            replayed = self._graphed is not None and self._graphed.replays > replays
            return BegunBatch(prepared, rows, finite, sums, self._row_writer.mark(), replayed, began)

    @torch.inference_mode()
    def finish(self, begun: BegunBatch) -> BatchDone:
        """Writes a pass's rows into the store, except for pieces whose rows are not finite. On return all are there, in
        the pool as well, and the device needs nothing of the pass any more. Raises PassFailed."""
        pieces = begun.prepared.pieces
        with _failing(begun.prepared):
            finite, sums = self._row_writer.fetch((begun.finite, begun.sums), begun.computed)
            good = [bool(part.all()) for part in finite.split([piece.tokens for piece in pieces])]
            self._row_writer.write(begun.rows, pieces, good, begun.computed)
        began, self._last_end = max(begun.began, self._last_end), time.perf_counter()
        return BatchDone(
            not_finite=[index for index, fine in enumerate(good) if not fine],
            preprocess_seconds=begun.prepared.seconds,
            vit_seconds=self._last_end - began,
            replayed=begun.replayed,
            row_sums=[as_unsigned(each) for each in sums.tolist()] if self._row_writer.pool_made else [],
            pieces=list(begun.prepared.places),
        )

    def is_usable(self) -> bool:
        """Whether the device still works. After some failures of a kernel, such as an illegal memory access, everything
        else that the process asks of its GPU fails as well."""
        if self.device.type == "cuda":
            try:
                torch.cuda.synchronize(self.device)
            except RuntimeError:
                return False
        return True

    def _beside(self) -> AbstractContextManager[object]:
        """Work launched inside does not wait for the tower."""
        self._use_device()
        return nullcontext() if self._side is None else torch.cuda.stream(self._side)

    def _use_device(self) -> None:
        """A thread has a current device of its own."""
        if self._side is not None:
            torch.cuda.set_device(self.device)

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
            choice=Choice(gpu_seconds),
        )
        if settings.graphs is None:
            made.leave_out_slower(self.device)
        _log.info("graphs are captured", patches=made.budgets, seconds=round(time.perf_counter() - started, 3))
        return made

    def _batch_patches(self, pieces: Sequence[Piece]) -> Tensor:
        """The patches [N, dim] of all pieces, each written by kernels into its place if all have such."""
        writers = [writer for piece in pieces if (writer := self._writers.get(Modality(piece.modality))) is not None]
        if len(writers) < len(pieces):
            return torch.cat([self._patches(piece) for piece in pieces])
        counts = [Grid(*piece.grid).patches for piece in pieces]
        made = torch.empty(sum(counts), writers[0].numbers, dtype=self.dtype, device=self.device)
        for writer, piece, part in zip(writers, pieces, made.split(counts), strict=True):
            writer.write(self._way_in.bring(self._staged_pieces.pixels(piece)), piece.resized, part)
        return made

    def _patches(self, piece: Piece) -> Tensor:
        """A piece's patches [t·h·w, dim] in the tower's dtype, on its device."""
        pixels = self._way_in.bring(self._staged_pieces.pixels(piece))
        modality = Modality(piece.modality)
        return self._preprocess[modality](pixels, piece.resized, self._config.processors[modality]).to(self.dtype)


def _device_of(settings: WorkerSettings) -> torch.device:
    """The device, made ready, with as many threads as may compute."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    device = torch.device(settings.device)
    if device.type == "cuda":
        use_gpu(device)
    return device


@contextmanager
def _failing(prepared: PreparedBatch) -> Iterator[None]:
    """Errors inside are failures of these pieces."""
    try:
        yield
    except RuntimeError as error:  # out of memory, or a kernel that failed
        raise PassFailed(prepared.places, error) from error


def _example(modality: Modality, side: int) -> tuple[Inspection, Options]:
    """A picture of so many pixels a side, or a clip of as many hundredths of a second."""
    if modality is Modality.AUDIO:
        return Inspection(1, 1, frames=side * SAMPLE_RATE // 100), Options()
    return Inspection(side, side), Options(min_pixels=side * side, max_pixels=side * side)


def _function(name: str) -> Preprocess:
    """The function that "module:function" names."""
    module, _, attribute = name.partition(":")
    found: Preprocess = getattr(importlib.import_module(module), attribute)
    return found
