"""KV blocks: which sequences hold them, and which computed ones can be reused.

A block gets its identity (`block_identity`) when its KV has been computed. Blocks in use are never evicted. Free blocks
with an identity are evicted least recently freed first, a sequence's tail before its head, and those of a live session
(`RetainedBlocks`) last. Evicted blocks may still be in host memory (`HostBlocks`).
"""

from __future__ import annotations

import math
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from llm_service.engine.block_events import BlockObserver, Describe
from llm_service.engine.host_blocks import HostBlocks
from llm_service.engine.retained_blocks import RetainedBlocks
from llm_service.engine.state_slots import SnapshotPlace, StateSlots
from llm_service.plan import Appended


@dataclass(slots=True)
class Block:
    """One KV block. `refs` counts the sequences that hold it; `identity` is None until it is full and computed."""

    number: int
    refs: int = 0
    identity: bytes | None = None


@dataclass(slots=True)
class BlockTable:
    """The blocks of one sequence and its state slot (-1: none), which it owns until `BlockManager.free`. `session` is
    the tenant's session whose next turn will need the blocks (0: none). `row` is the row of the workers' block tables
    (-1: none), which know the first `num_sent` blocks. `identities` are those of the full blocks. `source` is the slot
    of the snapshot that the next step begins with (-1: none); `spare` is the slot that keeps the state from before the
    drafts (-1: none). `reserved` are snapshots whose blocks have no identity yet; `rolling` is the identity of the
    answer's snapshot that its next one replaces."""

    session: int = 0
    tenant: bytes = b""
    blocks: list[int] = field(default_factory=list)
    identities: list[bytes] = field(default_factory=list)
    slot: int = -1
    row: int = -1
    num_sent: int = 0
    source: int = -1
    spare: int = -1
    reserved: deque[Reserved] = field(default_factory=deque)
    rolling: bytes = b""


@dataclass(frozen=True, slots=True)
class Reserved:
    """A snapshot whose block, number `index` of its table, has no identity yet."""

    index: int
    ticket: int
    place: SnapshotPlace


class BlockManager:
    """All KV blocks of one engine, `block_size` tokens each. For a model with recurrent layers also the slots of their
    states: one for each sequence that may run at once, the rest for snapshots, `state_slots` in all.

    Such a model can resume from cached blocks only where there is also a snapshot of its states, at a multiple of
    `state_chunk` tokens. For other models host memory holds up to `host_blocks` more. `observer` is told which blocks
    can be found.
    """

    def __init__(
        self,
        count: int,
        block_size: int,
        *,
        prefix_cache: bool = True,
        session_share: float = 0.25,
        state_slots: int = 0,
        state_chunk: int = 1,
        host_blocks: int = 0,
        observer: BlockObserver | None = None,
    ) -> None:
        assert not (host_blocks and state_slots), "states are not copied to the host"
        self._observer = observer or BlockObserver()
        self.host = HostBlocks(host_blocks if prefix_cache else 0, self._observer)
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.state_chunk = state_chunk
        self._states = StateSlots(state_slots, session_share, self._kept_for)
        self._blocks = [Block(number) for number in range(count)]
        # Free blocks in the order in which they are taken: empty ones first, then the least recently used.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(count))
        self._retained = RetainedBlocks(int(count * session_share))
        self._by_identity: dict[bytes, int] = {}
        self._idle_named = 0
        self._rows = 0
        self._spares = 0
        self._free_rows: list[int] = []

    @property
    def total(self) -> int:
        """Total number of blocks."""
        return len(self._blocks)

    @property
    def free_blocks(self) -> int:
        """Blocks that can be taken, cached ones included."""
        return len(self._free) + len(self._retained)

    @property
    def used(self) -> int:
        """Blocks that sequences hold."""
        return self.total - self.free_blocks

    @property
    def cached(self) -> int:
        """Blocks that no sequence holds and that `match` can find."""
        return self._idle_named

    @property
    def state_slots(self) -> int:
        """Number of state slots; 0 if no layer has states."""
        return self._states.total

    @property
    def state_slots_used(self) -> int:
        """Slots that sequences have."""
        return self._states.used

    @property
    def snapshots(self) -> int:
        """Snapshots of states that `match` can find."""
        return self._states.kept

    @property
    def keeps_snapshots(self) -> bool:
        """Whether layers have states, and prompts may go on from them."""
        return self.prefix_cache and self._states.total > 0

    @property
    def snapshot_multiple(self) -> int:
        """Snapshots are taken at multiples of this many tokens, where a block ends and chunks of states end."""
        return math.lcm(self.block_size, self.state_chunk)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` tokens need."""
        return -(-tokens // self.block_size)

    def match(self, identities: Seq[bytes]) -> int:
        """How many of the leading identities are cached; if layers have states, only up to the last one with a
        snapshot."""
        count = self.match_blocks(identities)
        while self.state_slots and count and identities[count - 1] not in self._states:
            count -= 1
        return count

    def match_blocks(self, identities: Seq[bytes]) -> int:
        """How many of the leading identities are cached, regardless of states."""
        if not self.prefix_cache:
            return 0
        known, host = self._by_identity, self.host
        return next((n for n, each in enumerate(identities) if each not in known and each not in host), len(identities))

    def adopt(self, table: BlockTable, identities: Seq[bytes], describe: Describe | None = None) -> None:
        """Gives an empty table the cached blocks of these identities, all found by `match`, a row, and a state slot if
        layers have states; there is a slot for every sequence that may run. Blocks that only the host has are loaded
        into free blocks, for which there must be room (`can_hold`). `describe` tells the content of the blocks."""
        if self._free_rows:
            table.row = self._free_rows.pop()
        else:
            table.row, self._rows = self._rows, self._rows + 1
        if self.state_slots:
            # The slot taken may be the snapshot's own. Any other snapshot is copied before steps overwrite it.
            source = self._states.find(identities[-1]) if identities else -1
            table.slot = self._states.take()
            table.source = -1 if source == table.slot else source
        on_host = {identity: at for at, identity in enumerate(identities) if identity not in self._by_identity}
        self.host.pin(on_host)
        for identity in identities:  # so that loading below does not evict them
            if identity in self._by_identity:
                self._hold(self._blocks[self._by_identity[identity]])
        for identity, index in on_host.items():
            block = self._take()
            block.identity, self._by_identity[identity] = identity, block.number
            self.host.load(identity, block.number)
            self._observer.loaded(identity, index, describe)
        table.blocks.extend(self._by_identity[identity] for identity in identities)
        table.identities.extend(identities)
        for identity in identities:
            self._retain(table, identity)

    def _retain(self, table: BlockTable, identity: bytes) -> None:
        """Keeps the block that is found by this identity, which may be another sequence's, for the table's session."""
        if not table.session or (number := self._by_identity.get(identity)) is None:
            return
        self._retained.want(number, table.session, table.tenant)
        if number in self._free:
            del self._free[number]
            self._idle(number)

    def _idle(self, number: int) -> None:
        """A findable block that nobody holds is evicted last if a session wants it, within the tenant's share."""
        evicted = self._retained.add(number)
        if evicted is not None:
            self._free[evicted] = None

    def _hold(self, block: Block) -> None:
        if block.refs == 0:
            if block.number in self._retained:
                self._retained.discard(block.number)
            else:
                del self._free[block.number]
            self._idle_named -= 1
        block.refs += 1

    def can_hold(self, identities: Seq[bytes], tokens: int, without: Seq[BlockTable] = ()) -> bool:
        """Whether an empty table that adopts these identities could then grow to `tokens` tokens, once the tables of
        `without` are given back."""
        given = Counter(number for table in without for number in table.blocks)
        free = self.free_blocks + sum(self._blocks[number].refs == count for number, count in given.items())
        hits = [self._by_identity[identity] for identity in identities if identity in self._by_identity]
        idle = sum(self._blocks[number].refs == given[number] for number in hits)
        return self.blocks_for(tokens) - len(hits) + idle <= free

    def grow(self, table: BlockTable, tokens: int) -> bool:
        """Takes blocks until the table has room for `tokens` tokens. If there are too few, takes none and returns
        False."""
        missing = self.blocks_for(tokens) - len(table.blocks)
        if missing <= 0:
            return True
        if missing > self.free_blocks:
            return False
        table.blocks.extend(self._take().number for _ in range(missing))
        return True

    def _take(self) -> Block:
        """A block for new or loaded tokens; the host keeps what it still held. A block must be free."""
        block = self._blocks[self._free.popitem(last=False)[0] if self._free else self._retained.pop()]
        if block.identity is not None:
            self._idle_named -= 1
            self.host.offload(block.identity, block.number)
            self._forget(block)
        block.refs = 1
        return block

    def commit(self, table: BlockTable, identity: bytes, describe: Describe | None = None) -> None:
        """Gives the table's next unnamed block, which is full and computed, its identity; `describe` gives its
        contents.

        If another block already has that identity, lookups go on finding the other one.
        """
        block = self._blocks[table.blocks[len(table.identities)]]
        table.identities.append(identity)
        if self.prefix_cache and identity not in self._by_identity and block.identity is None:
            block.identity = identity
            self._by_identity[identity] = block.number
            self._observer.computed(identity, len(table.identities) - 1, describe)
        self._retain(table, identity)
        while table.reserved and table.reserved[0].index < len(table.identities):
            self._keep(table, table.reserved.popleft())

    def _keep(self, table: BlockTable, reserved: Reserved) -> None:
        """Makes a snapshot findable. An answer's snapshot replaces the one before it, unless that one was used."""
        index, identity = reserved.index, table.identities[reserved.index]
        if identity not in self._by_identity:
            self._states.cancel(reserved.ticket)
            return
        earlier = (table.identities[n] for n in range(index - 1, -1, -1))
        tokens = (index + 1) * self.block_size
        kept = self._states.keep(reserved.ticket, identity, tokens, reserved.place, earlier)
        if kept and reserved.place is SnapshotPlace.ANSWER:
            self._states.forget(table.rolling, unless_used=True)
            table.rolling = identity

    def free(self, table: BlockTable) -> None:
        """Gives back the state slot and all blocks of a table, the tail first, so that the head is evicted last."""
        for number in reversed(table.blocks):
            block = self._blocks[number]
            block.refs -= 1
            if block.refs:
                continue
            if block.identity is None:
                self._free[number] = None
                self._free.move_to_end(number, last=False)
                continue
            self._idle_named += 1
            self._idle(number)
        table.blocks.clear()
        table.identities.clear()
        if table.row >= 0:
            # Steps run in order: what one of them reads in this row is read before another table's blocks are written
            # there.
            self._free_rows.append(table.row)
            table.row, table.num_sent = -1, 0
        if table.slot >= 0:
            self._states.give_back(table.slot)
            self._give_up_spare(table)
            table.slot = table.source = -1
        for reserved in table.reserved:
            self._states.cancel(reserved.ticket)
        table.reserved.clear()
        table.rolling = b""

    def take_appended(self, tables: Seq[BlockTable]) -> list[Appended]:
        """The blocks of these tables that workers do not know yet; the next step's plan tells them."""
        found: list[Appended] = []
        for table in tables:
            if table.num_sent < len(table.blocks):
                found.append(Appended(table.row, table.num_sent, array("i", table.blocks[table.num_sent :]).tobytes()))
                table.num_sent = len(table.blocks)
        return found

    def take_sources(self, tables: Seq[BlockTable]) -> list[tuple[int, int]]:
        """(snapshot's slot, sequence's slot) of sequences that begin with a snapshot: copied in this order before the
        next step."""
        pairs = [(table.source, table.slot) for table in tables if table.source >= 0]
        for table in tables:
            table.source = -1
        self._states.release()
        return pairs

    def take_spare(self, table: BlockTable, most: int) -> bool:
        """Has the next step keep a table's state from before its drafts, and continue in another slot, which may be a
        snapshot's. Returns False if `most` tables do so already, or there is no slot. Does nothing if layers have no
        states."""
        if not self.state_slots:
            return True
        slot = self._states.take_spare() if self._spares < most else None
        if slot is None:
            return False
        table.slot, table.spare = slot, table.slot
        self._spares += 1
        return True

    def drafts_verified(self, table: BlockTable, *, right: bool) -> None:
        """Keeps the state behind the drafts if all were right; otherwise the next step begins with the state from
        before them."""
        if not right:
            table.slot, table.spare = table.spare, table.slot
        self._give_up_spare(table)

    def _give_up_spare(self, table: BlockTable) -> None:
        if table.spare >= 0:
            self._states.give_back(table.spare)
            self._spares -= 1
            table.spare = -1

    def snapshot(self, table: BlockTable, index: int, identity: bytes | None, place: SnapshotPlace) -> int | None:
        """Reserves a slot for a snapshot of the state behind block number `index`, which the next step computes. None
        if that snapshot exists or there is no room. An answer's snapshot has no identity yet, and is replaced by the
        next one of the sequence."""
        if not self.keeps_snapshots or identity in self._states:
            return None
        if place is SnapshotPlace.ANSWER:
            self._states.forget(table.rolling, unless_used=True)
        before = self._states.tokens(self._states.last_of(reversed(table.identities[:index])))
        if table.reserved:
            before = max(before, (table.reserved[-1].index + 1) * self.block_size)
        if (found := self._states.reserve(place, (index + 1) * self.block_size - before)) is None:
            return None
        ticket, slot = found
        table.reserved.append(Reserved(index, ticket, place))
        return slot

    def flush(self) -> int:
        """Drops all cached blocks that no sequence holds, on the host too. Returns their number."""
        self._free.update(dict.fromkeys(self._retained.clear()))
        on_host_alone = sum(identity not in self._by_identity for identity in self.host.flush())
        cached = [number for number in self._free if self._blocks[number].identity is not None]
        for number in cached:
            self._forget(self._blocks[number])
        self._idle_named = 0
        if not self._by_identity and not len(self.host):
            self._observer.cleared()
        return len(cached) + on_host_alone

    def lend(self, identities: Seq[bytes]) -> list[int]:
        """The host's places of the leading identities, as many as are cached and find room there. They stay until they
        are given back (`HostBlocks.give_back`). `take_offloads` copies those that only the device has."""
        places: list[int] = []
        for identity in identities:
            if identity not in self.host and (number := self._by_identity.get(identity)) is not None:
                self.host.offload(identity, number)
            if (place := self.host.lend(identity)) is None:
                break
            places.append(place)
        return places

    def end_session(self, session: int) -> None:
        """Ends a session, which no table has any more: its blocks are evicted like others."""
        self._free.update(dict.fromkeys(self._retained.release(session)))

    def _kept_for(self, identity: bytes) -> bytes | None:
        """The tenant whose sessions want a block, in use or not; None if none does."""
        number = self._by_identity.get(identity)
        return None if number is None else self._retained.tenant(number)

    def _forget(self, block: Block) -> None:
        if block.identity is not None:
            del self._by_identity[block.identity]
            self._states.forget(block.identity)
            self._retained.forget(block.number)
            self._observer.evicted(block.identity)
            block.identity = None

    def check_integrity(self, tables: Seq[BlockTable] = ()) -> None:
        """Raises AssertionError unless reference counts equal what `tables` hold and every block is either free or
        held."""
        held: dict[int, int] = {}
        for table in tables:
            assert len(table.identities) <= len(table.blocks)
            for number in table.blocks:
                held[number] = held.get(number, 0) + 1
        for block in self._blocks:
            assert block.refs == held.get(block.number, 0), f"block {block.number} has a wrong count"
            places = (block.number in self._free) + (block.number in self._retained)
            assert places == (block.refs == 0), f"block {block.number} is lost"
        named = sum(block.refs == 0 and block.identity is not None for block in self._blocks)
        assert named == self._idle_named, "the count of cached blocks is wrong"
        rows = sorted([*self._free_rows, *(table.row for table in tables if table.row >= 0)])
        assert rows == list(range(self._rows)), "a row of a table is lost, or has two owners"
        assert all(table.num_sent <= len(table.blocks) for table in tables), "workers know blocks that are not held"
        tickets = [each.ticket for table in tables for each in table.reserved]
        slots = [slot for table in tables for slot in (table.slot, table.spare) if slot >= 0]
        self._states.check_integrity(slots, tickets)
        assert self._spares == sum(table.spare >= 0 for table in tables), "the count of spare slots is wrong"
        for identity, number in self._by_identity.items():
            assert self._blocks[number].identity == identity
        assert all(self._blocks[number].identity for number in self._retained.wanted), "an empty block is kept"
        self._retained.check_integrity()
        self.host.check_integrity()
