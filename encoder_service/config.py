"""The encoder service's options."""

from __future__ import annotations

from dataclasses import dataclass

from common.config import option, size, words
from common.hardware import check_device, memory_limit, usable_cores
from common.nixl.agent import BACKENDS
from common.rpc.server import LISTEN, ServerConfig
from encoder_service.media.fetch import FetchConfig
from encoder_service.media.limits import MediaLimits

PREFIX = "TWINLENS_ENCODER"
_FEWEST_DECODERS, _MOST_DECODERS = 2, 8
"""One of them is reserved for pictures. This many keep up with a GPU, and each has its own memory."""
_LEAST_DECODER_BYTES, _MOST_DECODER_BYTES = 1 << 30, 4 << 30
"""A third of a GiB is mapped before any file is read; a 4K video takes 1.6 GiB, with eight threads 2 GiB."""


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(ServerConfig, MediaLimits, FetchConfig):
    """Options of `python -m encoder_service`."""

    model: str = option(
        "", "checkpoint folder, or a name on the Hugging Face hub", required=True, group="what is served, and where"
    )
    revision: str = option("", "branch, tag or commit of a model on the hub; empty is the newest")
    listen: str = option("127.0.0.1:7001", LISTEN)
    workers: int = option(1, "device workers, each with the whole tower", minimum=1, maximum=64, group="devices")
    device: str = option(
        "auto", "where the vision tower runs: auto, cpu, cuda (each worker on the next GPU), or cuda:N for all workers"
    )
    dtype: str = option(
        "auto",
        "element type of rows, the same as the LLM services'; auto is bfloat16 on GPUs, and on CPUs with AVX512-BF16 if"
        " the checkpoint is stored in it; else float32",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    tower_dtype: str = option(
        "auto",
        "element type of weights, in which rows are computed; auto is --dtype, but float32 on CPUs that cannot multiply"
        " in it",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    threads: int = option(0, "CPU threads of one worker; 0 shares the cores among the workers", minimum=0)
    core_share: bool = option(
        True, "on a CPU, share the cores with other services that compute on all of them at the same time"
    )
    attention: str = option(
        "auto",
        "back end of the vision tower's attention; auto: the first that works here, in graphs the fastest",
        choices=("auto", "flash3", "flash", "triton", "numba", "sdpa"),
        group="how rows are computed",
    )
    kernels: str = option(
        "auto",
        "our own kernels for CPUs, compiled at the first start and kept; auto: torch computes until they are ready;"
        " wait: the service is not ready before they are; torch: never use them",
        choices=("auto", "wait", "torch"),
    )
    graphs: str = option(
        "auto", "CUDA graphs of the vision tower: auto, off, or the numbers of patches to capture, such as 512,1024"
    )
    graph_bytes: int = option(4 << 30, "GPU memory for CUDA graphs in one worker", parse=size, minimum=0)
    start_seconds: float = option(
        600.0,
        "longest that a worker may take to load the vision tower, or a decode process to start, before it is killed",
        minimum=0.1,
        group="workers that fail",
    )
    worker_patience_seconds: float = option(
        15.0,
        "a batch may take this long, or 20 times what such batches took recently, before its worker counts as hung",
        minimum=1,
    )
    worker_seconds: float = option(300.0, "longest that one batch may take before its worker is replaced", minimum=1)
    store_bytes: int = option(
        1 << 30, "memory for computed rows", parse=size, minimum=1 << 16, group="rows that are kept"
    )
    shared_store: str = option(
        "",
        "Redis or Valkey server that replicas share rows through, as redis://, rediss:// (TLS), valkey(s):// or unix://",
        secret=True,
    )
    shared_store_seconds: float = option(
        0.5,
        "longest that one answer of the shared store may take, or the next MiB of rows; anything slower is a miss",
        minimum=0.01,
    )
    shared_store_ttl_seconds: float = option(3600.0, "how long that store keeps rows after their last use", minimum=1)
    shared_wait_seconds: float = option(
        5.0, "longest wait for rows that another replica is computing, before they are computed here too", minimum=0.1
    )
    decode_processes: int = option(
        0,
        "processes that decode media; 0: one for each core except one for each of --workers, 2 to 8",
        minimum=0,
        maximum=64,
        group="decoding",
    )
    decode_seconds: float = option(
        60.0,
        "longest that decode processes may work on one media file, to read its header and to decode it",
        minimum=0.1,
    )
    decode_memory_bytes: int = option(
        0,
        "memory that one decode process may map besides staging memory; 0: half of the container's limit, 1 to 4 GiB",
        parse=size,
        minimum=0,
    )
    staging_bytes: int = option(1 << 30, "memory for media on the way to a worker", parse=size, minimum=1 << 16)
    batch_patches: int = option(16_384, "most patches in one pass", minimum=4, group="passes")
    batch_items: int = option(64, "most items in one pass", minimum=1)
    max_patches_per_call: int = option(
        65_536, "most patches of one picture or frame group; bounds a worker's memory", minimum=4
    )
    pass_seconds: float = option(
        0.25,
        "longest that a pass of several items or frame groups should take, by the recent pace; 0: unbounded",
        minimum=0.0,
    )
    device_pool_bytes: int = option(
        0,
        "each worker's GPU memory for rows that LLM services with --row-mirror copy by CUDA IPC; 0: none",
        parse=size,
        minimum=0,
        group="rows on their way",
    )
    shared_memory: bool = option(True, "hand rows to LLM services of the same user on the same host by shared memory")
    local_dir: str = option(
        "", "folder of the socket for shared memory, which containers can share; by default an abstract socket"
    )
    lease_seconds: float = option(10.0, "longest that a reader may take to copy rows from our memory", minimum=0.1)
    nixl: str = option(
        "",
        "let LLM services with the same option read rows by NIXL, by RDMA if the network has it: UCX for InfiniBand and"
        " RoCE, LIBFABRIC for EFA; anyone who reaches its ports can read and write the store",
        choices=BACKENDS,
    )
    stall_seconds: float = option(60.0, "longest that a caller may take to accept one message", minimum=0.1)
    max_queued_items: int = option(
        1024, "items held at once; further ones are refused", minimum=1, group="what may wait"
    )
    max_queued_bytes: int = option(
        1 << 30, "bytes of media held at once, including downloads in progress", parse=size, minimum=1
    )

    def validate(self) -> None:
        """Raises ValueError if options contradict each other."""
        if not self.model:
            raise ValueError("--model is needed: a checkpoint's folder, or its name on the Hugging Face hub")
        if self.device != "auto":
            check_device(self.device)
        if self.shared_store:
            self._check_shared_store()
        if self.kernels == "torch" and self.attention == "numba":
            raise ValueError("--attention numba is one of the kernels that --kernels torch does without")
        if self.batch_patches > self.max_patches_per_call:
            raise ValueError("--batch-patches must not be above --max-patches-per-call")
        if 0 < self.decode_memory_bytes < _LEAST_DECODER_BYTES:
            raise ValueError("--decode-memory-bytes must be at least 1 GiB, or 0")
        if self.device_pool_bytes and not self.shared_memory:
            raise ValueError("--device-pool-bytes needs --shared-memory, which proves that both are on one host")
        self.graph_budgets()
        self.check_server()
        self.check_fetch()

    def _check_shared_store(self) -> None:
        from encoder_service.engine.shared_store_client import check_url  # its library takes its time to import

        try:
            check_url(self.shared_store)
        except ValueError as error:
            raise ValueError(f"--shared-store: {error}") from None

    def decoders(self) -> int:
        """The number of decode processes."""
        return self.decode_processes or min(max(_FEWEST_DECODERS, usable_cores() - self.workers), _MOST_DECODERS)

    def decoder_bytes(self) -> int:
        """Memory that a decode process may map: a file that takes too much should end it, and not the container."""
        limit = memory_limit()
        share = _MOST_DECODER_BYTES if limit is None else max(_LEAST_DECODER_BYTES, limit // 2)
        return self.decode_memory_bytes or min(share, _MOST_DECODER_BYTES)

    def graph_budgets(self) -> list[int] | None:
        """The patch budgets of `graphs`: empty if they are off, None for auto. Raises ValueError."""
        if self.graphs in ("auto", "off"):
            return None if self.graphs == "auto" else []
        numbers = words(self.graphs)
        if not numbers or not all(number.isdecimal() and int(number) for number in numbers):
            raise ValueError("--graphs must be auto, off, or numbers of patches such as 512,1024")
        return [int(number) for number in numbers]
