"""Rows on a rank's own device: a mirror of the row arena, filled from encoders' device memory. A row has the same
offset in both; pulled rows are in the mirror, all others in the arena. The front orders every copy (`PullRows`), ranks
carry out the same orders between the same steps, and a copy counts only if it succeeded on all of them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from common.checkpoints.checkpoint import CheckpointError
from common.gpu.device_memory import (
    DeviceMemory,
    DeviceMemoryError,
    Mapping,
    as_unsigned,
    check_row_bytes,
    driver,
    row_sum,
)
from common.telemetry import log
from llm_service.settings import EngineSettings
from llm_service.worker.messages import InvalidateRows, MirrorOrder, Pulled, PullRows, UnmapPool

_log = log.get("mirror")


@dataclass(slots=True)
class ByteRanges:
    """A set of byte offsets, as sorted runs [begin, end) that do not touch.

    >>> ranges = ByteRanges()
    >>> ranges.add(0, 8), ranges.add(8, 16), ranges.remove(4, 6)
    (None, None, None)
    >>> list(ranges.split(2, 20))
    [(2, 4, True), (4, 6, False), (6, 16, True), (16, 20, False)]
    """

    begins: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    def add(self, begin: int, end: int) -> None:
        """Puts [begin, end) in."""
        first, last = bisect_left(self.ends, begin), bisect_right(self.begins, end)
        if first < last:
            begin, end = min(begin, self.begins[first]), max(end, self.ends[last - 1])
        self.begins[first:last], self.ends[first:last] = [begin], [end]

    def remove(self, begin: int, end: int) -> None:
        """Takes [begin, end) out."""
        first, last = bisect_right(self.ends, begin), bisect_left(self.begins, end)
        if first >= last:
            return
        low, high = self.begins[first], self.ends[last - 1]
        left = [(low, begin)] if low < begin else []
        right = [(end, high)] if end < high else []
        self.begins[first:last] = [run[0] for run in left + right]
        self.ends[first:last] = [run[1] for run in left + right]

    def split(self, begin: int, end: int) -> Iterator[tuple[int, int, bool]]:
        """[begin, end) in pieces, in order, each with whether it is in the set."""
        for index in range(bisect_right(self.ends, begin), len(self.begins)):
            low, high = max(begin, self.begins[index]), min(end, self.ends[index])
            if low >= high:
                break
            if begin < low:
                yield begin, low, False
            yield low, high, True
            begin = high
        if begin < end:
            yield begin, end, False


class Mirror:
    """`size` bytes on `device`, for rows of `row_bytes` bytes in `dtype`. Pools are opened once and stay open. Work
    within `beside` waits for no step, and no running step reads where rows are pulled to.

    Raises DeviceMemoryError for rows that cannot be checked.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        device: torch.device,
        size: int,
        row_bytes: int,
        dtype: torch.dtype,
        beside: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        check_row_bytes(row_bytes)
        self._memory = memory
        self._device = device
        self._bytes = torch.empty(size, dtype=torch.uint8, device=device)
        self._row_bytes = row_bytes
        self._dtype = dtype
        self._beside = beside
        self._here = ByteRanges()
        self._open: dict[str, Mapping] = {}

    def split(self, offset: int, size: int) -> Iterator[tuple[int, int, bool]]:
        """Bytes of the arena in pieces (begin, end, whether the mirror has them)."""
        return self._here.split(offset, offset + size)

    def bytes_of(self, begin: int, end: int) -> Tensor:
        """A view uint8 of bytes that are here."""
        return self._bytes[begin:end]

    @torch.inference_mode()
    def obey(self, order: MirrorOrder, agree: Callable[[int], int]) -> Pulled:
        """Carries out an order; `agree` returns the minimum over all ranks. LANDED for orders other than pulls."""
        match order:
            case PullRows():
                with self._beside():
                    here = self._pull(order)
                end = Pulled(agree(here))
                if end is Pulled.LANDED:
                    self._here.add(order.target, order.target + order.size)
                return end
            case InvalidateRows(offset, size):
                self._here.remove(offset, offset + size)
            case UnmapPool(region):
                if (mapping := self._open.pop(region, None)) is not None:
                    _close(region, mapping)
        return Pulled.LANDED

    def _pull(self, pull: PullRows) -> Pulled:
        """Copies, waits, and then checks the rows: writes to the pool after that do not matter."""
        target = self._bytes[pull.target : pull.target + pull.size]
        if len(target) != pull.size or pull.target < 0 or not pull.size or pull.size % self._row_bytes:
            return Pulled.DAMAGED
        try:
            self._mapping(pull).read(pull.source, target)
        except DeviceMemoryError as error:
            _log.warning("an encoder's device memory cannot be read", region=pull.region, cause=str(error))
            return Pulled.UNREACHABLE
        ends = torch.stack(target.view(self._dtype).aminmax())  # neither is finite if any number is not
        whole = row_sum(target, self._row_bytes)
        found, is_finite = torch.stack([whole, ends.isfinite().all().to(torch.int64)]).tolist()
        return Pulled.LANDED if as_unsigned(found) == pull.row_sum and is_finite else Pulled.DAMAGED

    def _mapping(self, pull: PullRows) -> Mapping:
        if pull.region not in self._open:
            self._open[pull.region] = self._memory.open(self._device, pull.handle)
        return self._open[pull.region]


def _close(region: str, mapping: Mapping) -> None:
    """The driver may refuse if the owner is gone; nothing more can be read there in any case."""
    try:
        mapping.close()
    except DeviceMemoryError as error:
        _log.warning("an encoder's device memory cannot be released", region=region, cause=str(error))


def reachable(settings: EngineSettings, devices: Sequence[torch.device]) -> list[str]:
    """UUIDs of the devices whose memory every rank can read; empty if ranks keep no mirrors."""
    return _memory(devices[0]).reachable(devices) if settings.row_mirror else []


def row_mirror(settings: EngineSettings, device: torch.device, width: int, dtype: torch.dtype) -> Mirror:
    """A mirror of the row arena on this device. Raises CheckpointError if its memory cannot be shared."""
    row_bytes = settings.row_levels * width * dtype.itemsize
    try:
        return Mirror(_memory(device), device, settings.row_arena_bytes, row_bytes, dtype, _beside_steps(device))
    except DeviceMemoryError as error:
        raise CheckpointError(f"--row-mirror: {error}") from error


def _beside_steps(device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """A context whose work runs on a stream of its own, so that its end can be waited for while steps run. The thread
    that launches steps waits for it, so this stream has priority."""
    return partial(torch.cuda.stream, torch.cuda.Stream(device, priority=-1)) if device.type == "cuda" else nullcontext


def _memory(device: torch.device) -> DeviceMemory:
    """Raises CheckpointError if this device's memory cannot be shared."""
    try:
        return driver(device)
    except DeviceMemoryError as error:
        raise CheckpointError(f"--row-mirror: {error}") from error
