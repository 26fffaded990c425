"""Shared memory and the ranges in it."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.shm.arena import ALIGNMENT, Range, RangeAllocator, SharedBuffer, aligned


class AnyOrderOfRanges(RuleBasedStateMachine):
    """Ranges taken and freed in any order: aligned, apart, and merged when they come back."""

    def __init__(self) -> None:
        super().__init__()
        self.ranges = RangeAllocator(0)
        self.held: list[Range] = []

    @initialize(capacity=st.integers(0, 2000))
    def begin(self, capacity: int) -> None:
        self.ranges = RangeAllocator(capacity)

    @rule(size=st.integers(1, 700))
    def take(self, size: int) -> None:
        largest = max((gap.size for gap in self.ranges.gaps), default=0)
        got = self.ranges.allocate(size)
        assert (got is not None) == (size <= largest)
        if got is not None:
            assert got.offset % ALIGNMENT == 0
            assert got.size == size
            assert got.end <= self.ranges.capacity
            assert all(got.end <= other.offset or other.end <= got.offset for other in self.held)
            self.held.append(got)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        self.ranges.free(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @rule(cell=st.integers(0, 30), size=st.integers(1, 400))
    def take_this_one(self, cell: int, size: int) -> None:
        wanted = Range(cell * ALIGNMENT, size)
        end = wanted.offset + aligned(size)
        if any(gap.offset <= wanted.offset and end <= gap.end for gap in self.ranges.gaps):
            self.ranges.take(wanted)
            self.held.append(wanted)
        else:
            with pytest.raises(ValueError, match="not free"):
                self.ranges.take(wanted)

    @invariant()
    def pieces_tile_the_arena(self) -> None:
        self.ranges.check_integrity()
        assert self.ranges.starts == sorted(each.offset for each in self.held)
        assert self.ranges.used == sum(-(-each.size // ALIGNMENT) * ALIGNMENT for each in self.held)

    def teardown(self) -> None:
        for each in self.held:
            self.ranges.free(each)
        assert self.ranges.used == 0
        assert sum(gap.size for gap in self.ranges.gaps) == self.ranges.capacity
        assert len(self.ranges.gaps) <= 1


AnyOrderOfRanges.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
TestAnyOrderOfRanges = AnyOrderOfRanges.TestCase


def test_what_is_not_allocated_cannot_be_freed() -> None:
    ranges = RangeAllocator(256)
    span = ranges.allocate(10)
    assert span is not None
    ranges.free(span)
    with pytest.raises(ValueError, match="not allocated"):
        ranges.free(span)
    with pytest.raises(ValueError, match="not allocated"):
        ranges.free(Range(64, 10))


@pytest.mark.parametrize("size", [0, -1])
def test_a_range_has_a_size(size: int) -> None:
    with pytest.raises(ValueError, match="above 0"):
        RangeAllocator(256).allocate(size)


def test_what_one_mapping_writes_another_reads() -> None:
    ours = SharedBuffer.create("test-arena", 8192)
    theirs = SharedBuffer.attach(os.dup(ours.fd), 8192)
    ours.view[100:104] = b"rows"
    assert bytes(theirs.slice(Range(100, 4))) == b"rows"
    theirs.close()
    ours.close()


def test_discarded_memory_reads_as_zeros_and_its_neighbours_stay() -> None:
    buffer = SharedBuffer.create("test-arena", 4 * 4096)
    buffer.view[:] = b"\1" * len(buffer.view)
    buffer.discard(Range(100, 3 * 4096))
    page_by_page = [set(buffer.view[at : at + 4096]) for at in range(0, 4 * 4096, 4096)]
    assert page_by_page == [{1}, {0}, {0}, {1}]
    buffer.discard(Range(4096, 10))
    buffer.close()


def test_what_is_not_there_cannot_be_discarded() -> None:
    buffer = SharedBuffer.create("test-arena", 4096)
    for beyond in (Range(0, 8192), Range(8192, 4096)):
        with pytest.raises(ValueError, match="size"):
            buffer.discard(beyond)
    buffer.close()


def test_memory_that_cannot_be_had_is_named_and_leaves_no_descriptor() -> None:
    before = len([*Path("/proc/self/fd").iterdir()])
    with pytest.raises(OSError, match=f"{1 << 60} bytes of shared memory cannot be had for the rows: "):
        SharedBuffer.create("the rows", 1 << 60)
    assert len([*Path("/proc/self/fd").iterdir()]) == before


def test_memory_that_the_system_might_refuse_later_is_reserved_at_once_and_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def allocated(buffer: SharedBuffer) -> int:
        return os.fstat(buffer.fd).st_blocks * 512

    buffers = [SharedBuffer.create("test-arena", 8192, reserve=reserve) for reserve in (False, True)]
    assert [allocated(buffer) for buffer in buffers] == [0, 8192]
    for buffer in buffers:
        buffer.view[:] = b"x" * 8192
        buffer.discard(Range(0, 4096))
        assert bytes(buffer.view) == b"\0" * 4096 + b"x" * 4096
    assert allocated(buffers[1]) == 8192
    for buffer in buffers:
        buffer.close()

    def refuse(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    before = len([*Path("/proc/self/fd").iterdir()])
    with pytest.raises(OSError, match="8192 bytes of shared memory cannot be had for test-arena: No space left"):
        SharedBuffer.create("test-arena", 8192, reserve=True)
    assert len([*Path("/proc/self/fd").iterdir()]) == before


_WHERE_PAGES_ARE_REFUSED = """
import os, sys
from common.shm.arena import SharedBuffer
fd = os.open(sys.argv[1] + "/buffer", os.O_RDWR | os.O_CREAT)
os.ftruncate(fd, 4 << 20)
buffer = SharedBuffer(fd, 4 << 20)
buffer.populate()
buffer.view[:1 << 16] = bytes(1 << 16)
try:
    os.posix_fallocate(fd, 0, buffer.size)
except OSError as error:
    print(error.strerror, SharedBuffer.create("test", 4096).reserved, flush=True)
buffer.view[:] = bytes(buffer.size)
print("written")
"""


def test_a_page_that_the_system_refuses_ends_its_writer_unless_it_is_reserved_or_asked_for_before(
    tmp_path: Path,
) -> None:
    """By a file system with too few pages, and a kernel that says it counts them, as this process alone sees both."""
    counts = tmp_path / "counts"
    counts.write_text("2\n")
    folder = tmp_path / "folder"
    folder.mkdir()
    mounts = f"mount -t tmpfs -o size=1m none {folder}; mount --bind {counts} /proc/sys/vm/overcommit_memory"
    alone = ["unshare", "--map-root-user", "--mount", "sh", "-ec", f'{mounts}; exec "$@"', "sh"]
    if not shutil.which("unshare") or subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        pytest.skip("nothing may be mounted here")
    writer = [sys.executable, "-c", _WHERE_PAGES_ARE_REFUSED, str(folder)]
    ended = subprocess.run([*alone, *writer], capture_output=True, text=True, check=False)
    assert ended.stdout == "No space left on device True\n", ended.stderr
    assert ended.returncode == -signal.SIGBUS


def test_closing_twice_or_under_a_reader_is_safe() -> None:
    buffer = SharedBuffer.create("test-arena", 4096)
    reader = buffer.slice(Range(0, 4))
    buffer.close()
    assert bytes(reader) == bytes(4)
    buffer.close()


def test_memory_can_be_taken_before_it_is_written_and_keeps_what_is_in_it() -> None:
    buffer = SharedBuffer.create("test", (16 << 20) + 100)
    buffer.view[5:8] = b"abc"
    buffer.populate()
    assert os.fstat(buffer.fd).st_blocks * 512 >= buffer.size, "pages that nobody has"
    assert bytes(buffer.view[4:9]) == b"\0abc\0"
    buffer.close()
    buffer.populate()
