"""What the host's memory keeps of KV blocks: whatever is found is what was computed, and goes in order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_service.engine.block_manager import BlockManager, BlockTable
from llm_service.engine.host_blocks import HostBlocks
from tests.unit.llm_service.test_block_manager import chain, named

STEP, START, END, FLUSH = "step", "start", "end", "flush"
LEND, READ, AWAIT, ARRIVE = "lend", "read", "await", "arrive"
ACTS = st.one_of(
    st.tuples(st.sampled_from([START, START, LEND, AWAIT]), st.sampled_from("abcde"), st.integers(1, 5)),
    st.tuples(st.sampled_from([STEP, END, END, FLUSH, READ]), st.just(""), st.just(0)),
    st.tuples(st.just(ARRIVE), st.just(""), st.integers(0, 5)),
)


class Device:
    """What is in each block, and in each place of the host, by name."""

    def __init__(self, blocks: int, host_blocks: int) -> None:
        self.manager = BlockManager(blocks, 4, host_blocks=host_blocks)
        self.blocks: dict[int, bytes] = {}
        self.host: dict[int, bytes] = {}
        self.tables: list[BlockTable] = []
        self.pending: list[tuple[BlockTable, list[bytes]]] = []
        self.loaded = 0
        self.lent: list[tuple[list[bytes], list[int]]] = []
        self.awaited: list[tuple[list[bytes], list[int]]] = []

    def start(self, name: str, count: int) -> None:
        """A prompt of so many blocks begins on those that are found, and computes the rest with the next step."""
        wanted = chain(name, count)
        hits = wanted[: self.manager.match(wanted)]
        if not self.manager.can_hold(hits, count * 4):
            return
        table = BlockTable()
        self.manager.adopt(table, hits)
        assert self.manager.grow(table, count * 4), "what could be held is not"
        self.tables.append(table)
        self.pending.append((table, wanted))

    def step(self) -> None:
        offloads, loads = self.manager.host.take_copies()
        for block, place in offloads:
            self.host[place] = self.blocks[block]
        for place, block in loads:
            self.blocks[block] = self.host[place]
        self.loaded += len(loads)
        for table, wanted in self.pending:
            for block, identity in zip(table.blocks, table.identities, strict=False):
                assert self.blocks[block] == identity, "another block's keys and values"
            for block, identity in list(zip(table.blocks, wanted, strict=True))[len(table.identities) :]:
                self.blocks[block] = identity
                self.commit(table, identity)
        self.pending.clear()

    def commit(self, table: BlockTable, identity: bytes) -> None:
        self.manager.commit(table, identity)

    def copy_out(self) -> None:
        """What an order between two steps does."""
        for block, place in self.manager.host.take_offloads():
            self.host[place] = self.blocks[block]

    def lend(self, name: str, count: int) -> None:
        """The front begins to read the first blocks of a prompt, as many as are there."""
        places = self.manager.lend(chain(name, count))
        self.lent.append((chain(name, count)[: len(places)], places))
        self.copy_out()

    def read(self) -> None:
        """It reads the oldest of what it was lent, and gives it back."""
        if self.lent:
            identities, places = self.lent.pop(0)
            assert [self.host[place] for place in places] == identities, "another block's keys and values"
            self.manager.host.give_back(identities)

    def expect(self, name: str, count: int) -> None:
        """The front begins to write blocks of a prompt."""
        places = self.manager.host.reserve(count)
        self.awaited.append((chain(name, count), places))
        self.copy_out()
        for identity, place in zip(chain(name, count), places, strict=False):
            self.host[place] = identity

    def arrive(self, count: int) -> None:
        """So many of the oldest have come."""
        if self.awaited:
            identities, places = self.awaited.pop(0)
            self.manager.host.commit(identities[: min(count, len(places))], places)

    def end(self) -> None:
        if self.tables:
            table = self.tables.pop(0)
            self.pending = [each for each in self.pending if each[0] is not table]
            self.manager.free(table)


@given(st.lists(ACTS, max_size=80), st.integers(0, 9))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_blocks_hold_what_they_are_named_after_whatever_comes_and_goes(
    acts: list[tuple[str, str, int]], host_blocks: int
) -> None:
    device = Device(8, host_blocks)
    for act, name, count in acts:
        match act:
            case "start":
                device.start(name, count)
            case "step":
                device.step()
            case "end":
                device.end()
            case "lend":
                device.lend(name, count)
            case "read":
                device.read()
            case "await":
                device.expect(name, count)
            case "arrive":
                device.arrive(count)
            case _:
                device.manager.flush()
        device.manager.check_integrity(device.tables)
    device.step()
    while device.lent or device.awaited:
        device.read()
        device.arrive(1)
    for table in device.tables:
        device.manager.free(table)
    device.manager.check_integrity()


def test_what_has_to_make_way_comes_back() -> None:
    device = Device(4, 12)
    for name in "abc":
        device.start(name, 4)
        device.step()
        device.end()
    for name in "ab":
        assert device.manager.match(chain(name, 4)) == 4
        device.start(name, 4)
        device.step()
        device.end()
    assert device.loaded == 8
    assert (device.manager.host.offloaded, device.manager.host.loaded) == (12, 8)


def test_what_the_host_has_already_is_not_copied_again() -> None:
    device = Device(4, 8)
    for name in "abab":
        device.start(name, 4)
        device.step()
        device.end()
    assert device.manager.host.offloaded == 8


def test_the_host_gives_up_what_was_longest_unused_but_nothing_that_is_needed() -> None:
    host = HostBlocks(2)
    host.offload(b"a", 0)
    host.offload(b"b", 1)
    host.offload(b"a", 2)
    host.offload(b"c", 3)
    assert [name in host for name in (b"a", b"b", b"c")] == [True, False, True]
    host.pin([b"a", b"c"])
    host.offload(b"d", 4)
    assert b"d" not in host
    assert host.flush() == []
    host.load(b"a", 5)
    host.check_integrity()
    assert host.take_copies() == ([(0, 1), (1, 0), (3, 0)], [(1, 5)])
    assert len(host.flush()) == 2
    host.check_integrity()


class LookedUp(bytes):
    """Counts how often one of these is looked up."""

    times = 0

    def __hash__(self) -> int:
        LookedUp.times += 1
        return bytes.__hash__(self)


@pytest.mark.parametrize("others", [0, 8])
def test_what_is_needed_is_not_looked_through_for_each_block_that_makes_way(others: int) -> None:
    """A long prompt comes back while another one's blocks make way for it."""
    count = 256
    host = HostBlocks(count + others)
    names = [LookedUp(b"%d" % n) for n in range(count + others)]
    for number, name in enumerate(names):
        host.offload(name, number)
    host.pin(names[:count])
    LookedUp.times = 0
    for number, name in enumerate(names[:count]):
        host.offload(b"another %d" % number, number)
        host.load(name, number)
    assert LookedUp.times < 10 * count
    host.check_integrity()


def test_what_is_forgotten_is_counted_once_wherever_it_is() -> None:
    device = Device(4, 8)
    for name in "aba":
        device.start(name, 4)
        device.step()
        device.end()
    assert len(device.manager.host) == 8
    assert device.manager.flush() == 8
    assert device.manager.flush() == 0


def test_without_a_prefix_cache_nothing_is_kept() -> None:
    manager = BlockManager(4, 4, prefix_cache=False, host_blocks=8)
    manager.free(named(manager, 4, "a"))
    table = BlockTable()
    assert manager.grow(table, 16)
    assert manager.host.take_copies() == ([], [])
