"""Shared memory without names: a memfd that child processes inherit, and a range allocator over it.

The kernel frees a memfd when the last process that has it mapped is gone, so a crash leaves no segment behind. The
allocator does not know what ranges contain; their owner decides what is kept and evicted.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import fcntl
import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ALIGNMENT = 64
"""Ranges start on a cache line."""

_FIXED_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_libc = ctypes.CDLL(None, use_errno=True)
_MADV_POPULATE_WRITE = 23
_PART = 16 << 20


@dataclass(frozen=True, slots=True)
class Range:
    """`size` bytes from `offset` in an arena."""

    offset: int
    size: int

    @property
    def end(self) -> int:
        return self.offset + self.size


class SharedBuffer:
    """`size` bytes of memory that this process and its children map.

    The creator holds the file descriptor until `close`; a child maps the same memory with `attach`. If it is
    `reserved`, all of its memory was allocated at once, and is kept.
    """

    def __init__(self, fd: int, size: int, *, reserved: bool = False) -> None:
        self.fd = fd
        self.size = size
        self.reserved = reserved
        self._map = mmap.mmap(fd, size)
        self.view = memoryview(self._map)

    @classmethod
    def create(cls, label: str, size: int, *, reserve: bool | None = None) -> SharedBuffer:
        """A new buffer of `size` zero bytes, whose size never changes; pages take memory when first written, or at once
        if it is to `reserve` it. Unless told, it does so where the system may refuse a page later, which would end the
        process that writes there by SIGBUS.

        Raises OSError, which names its purpose, if there is no address space, or no memory to reserve.
        """
        reserve = _is_overcommit_strict() if reserve is None else reserve
        fd = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _FIXED_SIZE)
            if reserve:
                os.posix_fallocate(fd, 0, size)
            return cls(fd, size, reserved=reserve)
        except OSError as error:
            os.close(fd)
            why = error.strerror or type(error).__name__
            raise OSError(f"{size} bytes of shared memory cannot be had for {label}: {why}") from error

    @classmethod
    def attach(cls, fd: int, size: int) -> SharedBuffer:
        """Maps a buffer whose descriptor was inherited."""
        return cls(fd, size)

    def slice(self, span: Range) -> memoryview:
        """The bytes of a range, without a copy."""
        return self.view[span.offset : span.end]

    def open_reader(self) -> int:
        """A descriptor that maps the buffer for reading alone; the caller closes it."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def discard(self, span: Range) -> None:
        """Gives the memory of a range back to the system, unless it is reserved; it then reads as zeros.

        Takes some 0.15 s for a gigabyte: a thread may do it, and other threads run meanwhile (`mmap.madvise` would keep
        the interpreter's lock).
        """
        first = -(-span.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        length = span.end // mmap.PAGESIZE * mmap.PAGESIZE - first
        if length <= 0:
            return
        pages = (ctypes.c_char * length).from_buffer(self._map, first)  # mapped for as long as this lives
        if self.reserved:
            ctypes.memset(ctypes.byref(pages), 0, length)
            return
        if _libc.madvise(ctypes.byref(pages), ctypes.c_size_t(length), mmap.MADV_REMOVE):
            raise OSError(ctypes.get_errno(), "shared memory cannot be given back")

    def populate(self) -> None:
        """Allocates the memory of the whole buffer now, so that nobody waits for it page by page on first writes; its
        content stays. Ends early if the buffer is closed, the system does not support it (Linux before 5.14), or memory
        is short. May run in a thread beside others."""
        for first in range(0, self.size, _PART):
            length = min(_PART, self.size - first)
            try:
                pages = (ctypes.c_char * length).from_buffer(self._map, first)
            except ValueError:  # it was closed
                return
            if _libc.madvise(ctypes.byref(pages), ctypes.c_size_t(length), _MADV_POPULATE_WRITE):
                return

    def close(self) -> None:
        """Unmaps. Views that others still hold keep the memory until they are gone."""
        self.view.release()
        with contextlib.suppress(BufferError):  # a reader still holds a slice: the map goes when the slice does
            self._map.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _is_overcommit_strict() -> bool:
    """Whether the kernel counts each page against a limit (vm.overcommit_memory = 2): for memory without a name, when
    it is first written."""
    try:
        return Path("/proc/sys/vm/overcommit_memory").read_text("ascii").strip() == "2"
    except OSError:
        return False


class ReaderView:
    """Another process's buffer, mapped for reading from a descriptor of `SharedBuffer.open_reader`.

    Takes over the descriptor in any case. Raises ValueError for one whose size could change: its owner could truncate
    it under a reader, whom the kernel would then kill.
    """

    def __init__(self, fd: int) -> None:
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            if seals & _FIXED_SIZE != _FIXED_SIZE:
                raise ValueError("the size of the shared memory is not fixed")
            self.size = os.fstat(fd).st_size
            self._map = mmap.mmap(fd, self.size, prot=mmap.PROT_READ)
        except OSError as error:
            raise ValueError("this is not readable shared memory") from error
        finally:
            os.close(fd)
        self.view = memoryview(self._map)

    def close(self) -> None:
        """Unmaps. Slices that others still hold keep the memory until they are gone."""
        self.view.release()
        with contextlib.suppress(BufferError):
            self._map.close()


def aligned(size: int) -> int:
    """Bytes that a range of this size takes.

    >>> aligned(0), aligned(1), aligned(64)
    (0, 64, 64)
    """
    return -(-size // ALIGNMENT) * ALIGNMENT


class RangeAllocator:
    """First-fit ranges in [0, capacity), kept aligned; neighbours merge when they are freed.

    Whoever is given a range owns it until `free`. Freeing what was not allocated raises ValueError.

    >>> ranges = RangeAllocator(256)
    >>> first, second = ranges.allocate(100), ranges.allocate(100)
    >>> (first.offset, second.offset)
    (0, 128)
    >>> ranges.allocate(1) is None
    True
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity - capacity % ALIGNMENT
        self.starts: list[int] = []
        """The starts of allocated ranges, in order."""
        self._starts: list[int] = [0] if self.capacity else []
        self._sizes: dict[int, int] = {0: self.capacity} if self.capacity else {}
        self._owned: dict[int, int] = {}

    @property
    def used(self) -> int:
        """Bytes given out, alignment included."""
        return sum(self._owned.values())

    @property
    def gaps(self) -> list[Range]:
        """Free ranges, in order."""
        return [Range(start, self._sizes[start]) for start in self._starts]

    def end(self, start: int) -> int:
        """Where an allocated range ends, alignment included."""
        return start + self._owned[start]

    def ends(self, starts: Iterable[int]) -> list[int]:
        """The same of many."""
        return [start + self._owned[start] for start in starts]

    def allocate(self, size: int) -> Range | None:
        """A range of at least `size` bytes, or None if no gap is large enough. `size` must be above 0."""
        if size <= 0:
            raise ValueError("a range needs a size above 0")
        need = aligned(size)
        for index, start in enumerate(self._starts):
            gap = self._sizes[start]
            if gap < need:
                continue
            self._give(index, start, need)
            return Range(start, size)
        return None

    def take(self, span: Range) -> None:
        """Allocates this very range, of which all must be free: raises ValueError where it is not.

        >>> ranges = RangeAllocator(256)
        >>> ranges.take(Range(64, 100))
        >>> (ranges.starts, ranges.gaps)
        ([64], [Range(offset=0, size=64), Range(offset=192, size=64)])
        """
        index, need = bisect.bisect_right(self._starts, span.offset) - 1, aligned(span.size)
        start = self._starts[index] if index >= 0 else self.capacity
        if not start <= span.offset < span.offset + need <= start + self._sizes.get(start, 0):
            raise ValueError("this range is not free")
        self._give(index, span.offset, need)

    def _give(self, index: int, start: int, need: int) -> None:
        """Allocates `need` bytes of a gap; the rest of it stays free."""
        gap = self._starts[index]
        end = gap + self._sizes.pop(gap)
        left = [(at, size) for at, size in ((gap, start - gap), (start + need, end - start - need)) if size]
        self._starts[index : index + 1] = [at for at, _ in left]
        self._sizes.update(left)
        self._owned[start] = need
        bisect.insort(self.starts, start)

    def free(self, span: Range) -> None:
        """Frees a range and merges it with adjacent gaps."""
        size = self._owned.pop(span.offset, None)
        if size is None:
            raise ValueError("this range is not allocated")
        del self.starts[bisect.bisect_left(self.starts, span.offset)]
        start, index = span.offset, bisect.bisect_left(self._starts, span.offset)
        if index < len(self._starts) and start + size == self._starts[index]:
            size += self._sizes.pop(self._starts.pop(index))
        if index > 0 and (before := self._starts[index - 1]) + self._sizes[before] == start:
            self._sizes[before] += size
        else:
            self._starts.insert(index, start)
            self._sizes[start] = size

    def trim(self, span: Range, size: int) -> Range:
        """The first `size` bytes of a range, above 0, which go on belonging to its owner; takes back the rest.

        >>> ranges = RangeAllocator(256)
        >>> span = ranges.trim(ranges.allocate(200), 60)
        >>> (span, ranges.used, ranges.gaps)
        (Range(offset=0, size=60), 64, [Range(offset=64, size=192)])
        """
        need = aligned(size)
        rest = self._owned[span.offset] - need
        if rest:
            self._owned[span.offset] = need
            self._owned[span.offset + need] = rest
            bisect.insort(self.starts, span.offset + need)
            self.free(Range(span.offset + need, rest))
        return Range(span.offset, size)

    def check_integrity(self) -> None:
        """Raises AssertionError unless gaps and owned ranges tile the arena exactly, with no two gaps side by side."""
        pieces = sorted(
            [(start, size, "gap") for start, size in self._sizes.items()]
            + [(start, size, "owned") for start, size in self._owned.items()]
        )
        at, previous = 0, ""
        for start, size, kind in pieces:
            assert start == at, f"a hole or an overlap at {at}"
            assert size > 0, f"nothing at {at}"
            assert not (kind == previous == "gap"), f"two gaps side by side at {at}"
            at, previous = start + size, kind
        assert at == self.capacity, "the pieces do not fill the arena"
        assert self._starts == sorted(self._sizes)
        assert self.starts == sorted(self._owned)
