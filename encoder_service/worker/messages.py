"""Messages between the service and a device worker. Pixels and rows travel in shared arenas."""

from __future__ import annotations

import msgspec

from common.hf.description import HfModel


class WorkerSettings(msgspec.Struct, tag=True):
    """First message to a worker: the checkpoint, the device, and the sizes of the two arenas it inherited.

    `device` is "cpu", "cuda" or "cuda:N"; `dtype` of rows is "float32", "bfloat16" or "float16", as is `tower_dtype` of
    weights, empty: the same; `threads` is the number of CPU threads, 0 for torch's default. `attention` names a back
    end, or "auto"; `kernels` is "auto", "wait" or "torch". `graphs` are the patch budgets to capture, of at most
    `graph_bytes` together; None: the worker's default. A batch has at most `batch_patches`. `pool_bytes` of the
    device's memory are reserved for rows that others read there; 0: none. `hf` describes a model that transformers
    computes; None for a family of ours. With `core_share` a worker with all cores shares them with other processes.
    """

    folder: str
    device: str
    dtype: str
    threads: int
    staging_bytes: int
    store_bytes: int
    attention: str = "auto"
    kernels: str = "auto"
    graphs: list[int] | None = None
    graph_bytes: int = 0
    batch_patches: int = 0
    pool_bytes: int = 0
    log_level: str = "info"
    hf: HfModel | None = None
    core_share: bool = False
    tower_dtype: str = ""


class Piece(msgspec.Struct):
    """One item, or some frame groups of a video.

    Pixels [frames, height, width, depth] uint8 lie at `pixels` in the staging arena; they become the grid (t, h, w) of
    patches at `resized` (height, width), and their rows [tokens, levels, width] go to `rows` in the store arena, and to
    `pool` in the worker's pool, unless that is negative. Of a video with its sound, `samples` of that, float32, lie at
    `sound`, and rows are of both in `turns`, as in `Plan`.
    """

    modality: str
    pixels: int
    frames: int
    height: int
    width: int
    resized: tuple[int, int]
    grid: tuple[int, int, int]
    tokens: int
    rows: int
    pool: int = -1
    depth: int = 3
    sound: int = 0
    samples: int = 0
    turns: list[int] = []


class Batch(msgspec.Struct, tag=True):
    """Pieces to compute in one pass."""

    pieces: list[Piece]


class PoolMade(msgspec.Struct, frozen=True):
    """`size` bytes of the worker's device memory, which others open by `handle`; `device` is the device's UUID."""

    device: str
    handle: bytes
    size: int


class WorkerReady(msgspec.Struct, tag=True):
    """The tower is loaded: with this attention, and graphs for these patch budgets."""

    attention: str = ""
    graphs: list[int] = []
    pool: PoolMade | None = None


class StartFailed(msgspec.Struct, tag=True):
    """The worker cannot start; it ends. `why` is for the operator."""

    why: str


class BatchDone(msgspec.Struct, tag=True):
    """The rows of some `pieces` (by index) of a batch are written, of all if none are named: a batch ends with its last
    piece. Times are in seconds.

    `not_finite` are those of these pieces, by their order here, whose rows are not finite and not written. `replayed`:
    the tower ran as a graph. `row_sums` has a sum of each piece's rows in the pool, 0 if they are not there.
    `late_compiles` are kernels that passes have waited for since the last answer.
    """

    not_finite: list[int]
    preprocess_seconds: float
    vit_seconds: float
    replayed: bool = False
    row_sums: list[int] = []
    pieces: list[int] = []
    late_compiles: int = 0


class BatchFailed(msgspec.Struct, tag=True):
    """Nothing of some `pieces` of a batch is usable, or, if none are named, of all that were not answered; the worker
    goes on. `why` is for the log."""

    why: str
    pieces: list[int] = []


ToWorker = WorkerSettings | Batch
FromWorker = WorkerReady | StartFailed | BatchDone | BatchFailed
