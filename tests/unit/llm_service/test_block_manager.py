"""KV blocks: counts, identities, and which are evicted first."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from llm_service.engine.block_identity import KeyedRun, block_identity, root_identity
from llm_service.engine.block_manager import BlockManager, BlockTable
from llm_service.request import MediaRun


def named(manager: BlockManager, count: int, name: str) -> BlockTable:
    """A table of `count` full, computed blocks of one text."""
    table = BlockTable()
    assert manager.grow(table, count * manager.block_size)
    for identity in chain(name, count):
        manager.commit(table, identity)
    return table


def chain(name: str, count: int) -> list[bytes]:
    out: list[bytes] = []
    for index in range(count):
        out.append(block_identity(out[-1] if out else root_identity(name), b"%d" % index, ()))
    return out


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 5), st.booleans()), max_size=60))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_blocks_are_free_or_held_whatever_is_taken_and_given_back(acts: list[tuple[str, int, bool]]) -> None:
    manager = BlockManager(12, 4)
    tables: list[BlockTable] = []
    for name, count, drop in acts:
        if drop and tables:
            manager.free(tables.pop(0))
        else:
            wanted = chain(name, count)
            table = BlockTable()
            hits = manager.match(wanted)
            manager.adopt(table, wanted[:hits])
            could = count - len(table.blocks) <= manager.free_blocks
            before = manager.free_blocks
            assert manager.grow(table, count * 4) == could
            if could:
                for identity in wanted[hits:]:
                    manager.commit(table, identity)
                tables.append(table)
            else:
                assert manager.free_blocks == before, "a failed grow took blocks"
                manager.free(table)
        manager.check_integrity(tables)
        assert manager.used + manager.free_blocks == manager.total
    for table in tables:
        manager.free(table)
    manager.check_integrity()
    assert manager.used == 0


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 5)), max_size=4), st.data())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_what_could_be_held_once_others_give_back_can_be_held_when_they_have(
    wants: list[tuple[str, int]], data: st.DataObject
) -> None:
    manager = BlockManager(12, 4)
    tables: list[BlockTable] = []
    for name, count in wants:
        table, wanted = BlockTable(), chain(name, count)
        hits = manager.match(wanted)
        manager.adopt(table, wanted[:hits])
        if manager.grow(table, count * 4):
            for identity in wanted[hits:]:
                manager.commit(table, identity)
        tables.append(table)
    name, count = data.draw(st.sampled_from("abc")), data.draw(st.integers(1, 12))
    hits = chain(name, count)[: manager.match(chain(name, count))]
    given_back = [table for table in tables if data.draw(st.booleans())]
    could = manager.can_hold(hits, count * 4, without=given_back)
    for table in given_back:
        manager.free(table)
    assert manager.can_hold(hits, count * 4) == could
    new = BlockTable()
    manager.adopt(new, hits)
    assert manager.grow(new, count * 4) == could


def test_the_longest_unused_goes_first_and_a_tail_before_its_head() -> None:
    manager = BlockManager(6, 4)
    for name in ("old", "new"):
        manager.free(named(manager, 3, name))
    left = []
    for tokens in (4, 8, 12, 16):
        table = BlockTable()
        assert manager.grow(table, tokens)
        left.append((manager.match(chain("old", 3)), manager.match(chain("new", 3))))
        manager.free(table)
        manager.check_integrity()
    assert left == [(2, 3), (1, 3), (0, 3), (0, 2)]


def test_blocks_in_use_are_never_evicted() -> None:
    manager = BlockManager(4, 4)
    held = named(manager, 3, "held")
    assert not manager.grow(BlockTable(), 8)
    table = BlockTable()
    assert manager.grow(table, 4)
    assert manager.match(chain("held", 3)) == 3
    manager.check_integrity([held, table])


def test_empty_blocks_are_taken_before_cached_ones() -> None:
    manager = BlockManager(4, 4)
    manager.free(named(manager, 2, "kept"))
    half = BlockTable()
    assert manager.grow(half, 8)
    manager.free(half)
    again = BlockTable()
    assert manager.grow(again, 8)
    assert manager.match(chain("kept", 2)) == 2


def test_two_that_compute_the_same_block_at_once_do_not_lose_it() -> None:
    manager = BlockManager(4, 4)
    first, second = named(manager, 1, "same"), named(manager, 1, "same")
    manager.free(first)
    manager.check_integrity([second])
    assert manager.match(chain("same", 1)) == 1
    manager.free(second)
    manager.check_integrity()


def test_flush_forgets_what_no_one_holds() -> None:
    manager = BlockManager(6, 4)
    held = named(manager, 2, "held")
    manager.free(named(manager, 3, "idle"))
    assert manager.flush() == 3
    assert manager.match(chain("idle", 3)) == 0
    assert manager.match(chain("held", 2)) == 2
    manager.check_integrity([held])


def test_without_a_prefix_cache_nothing_is_found() -> None:
    manager = BlockManager(4, 4, prefix_cache=False)
    manager.free(named(manager, 2, "text"))
    assert manager.match(chain("text", 2)) == 0


def test_identities_differ_in_parent_tokens_key_row_place_and_salt() -> None:
    def keyed(first: int = 0, begin: int = 2, count: int = 4, key: bytes = b"k" * 32) -> KeyedRun:
        return KeyedRun(MediaRun(begin, first, count), key)

    base = (root_identity(""), b"tokens", [keyed()])
    others = [
        (root_identity("tenant"), b"tokens", [keyed()]),
        (root_identity(""), b"Tokens", [keyed()]),
        (root_identity(""), b"tokens", [keyed(key=b"K" * 32)]),
        (root_identity(""), b"tokens", [keyed(first=1)]),
        (root_identity(""), b"tokens", [keyed(begin=3)]),
        (root_identity(""), b"tokens", [keyed(count=3)]),
        (root_identity(""), b"tokens", []),
        (root_identity(""), b"tokens", [keyed(count=2), keyed(begin=4, count=2)]),
    ]
    identities = {block_identity(*each) for each in (base, *others)}
    assert len(identities) == 1 + len(others)
    assert {len(identity) for identity in identities} == {32}


def cached(manager: BlockManager, names: list[bytes]) -> list[bool]:
    return [manager.match([name]) == 1 for name in names]


def filled(manager: BlockManager, names: list[bytes], session: int = 0, tenant: bytes = b"") -> None:
    """Computes blocks of these identities and lets go of them."""
    table = BlockTable(session, tenant)
    assert manager.grow(table, len(names) * manager.block_size)
    for name in names:
        manager.commit(table, name)
    manager.free(table)


def test_a_sessions_blocks_are_the_last_to_go() -> None:
    manager = BlockManager(8, 4, session_share=0.5)
    warm, cold = [b"w1", b"w2"], [b"c1", b"c2", b"c3"]
    filled(manager, warm, session=7, tenant=b"t")
    filled(manager, cold)
    table = BlockTable()
    assert manager.grow(table, 6 * 4)
    assert cached(manager, [*warm, *cold]) == [True, True, False, False, False]
    assert manager.grow(table, 7 * 4), "but they go"
    assert cached(manager, warm) == [True, False], "the tail before the head"
    manager.check_integrity([table])


def test_a_session_that_is_over_keeps_nothing() -> None:
    manager = BlockManager(6, 4, session_share=0.5)
    filled(manager, [b"w1", b"w2"], session=7, tenant=b"t")
    manager.end_session(7)
    manager.end_session(8)
    filled(manager, [b"c1"])
    table = BlockTable()
    assert manager.grow(table, 4 * 4)
    assert cached(manager, [b"w1", b"w2", b"c1"]) == [True, False, True]
    manager.check_integrity([table])


def test_a_tenants_sessions_keep_no_more_than_its_share() -> None:
    manager = BlockManager(8, 4, session_share=0.25)
    filled(manager, [b"o1"], session=1, tenant=b"other")
    filled(manager, [b"a1", b"a2", b"a3", b"a4"], session=2, tenant=b"t")
    table = BlockTable()
    assert manager.grow(table, 5 * 4)
    assert cached(manager, [b"o1", b"a1", b"a2", b"a3", b"a4"]) == [True, True, True, False, False]
    manager.check_integrity([table])


def used(manager: BlockManager, names: list[bytes], session: int = 0, tenant: bytes = b"t") -> None:
    """Has a sequence begin with these blocks, and lets go of them."""
    table = BlockTable(session, tenant)
    assert manager.match(names) == len(names)
    manager.adopt(table, names)
    manager.free(table)
    manager.check_integrity()


def test_a_session_keeps_its_blocks_whoever_else_begins_with_them() -> None:
    manager = BlockManager(8, 4, session_share=0.5)
    warm, cold = [b"w1", b"w2"], [b"c1", b"c2", b"c3"]
    filled(manager, warm, session=7, tenant=b"t")
    used(manager, warm[:1])
    filled(manager, cold)
    table = BlockTable()
    assert manager.grow(table, 6 * 4)
    assert cached(manager, [*warm, *cold]) == [True, True, False, False, False]
    manager.check_integrity([table])


def test_blocks_that_two_sessions_use_are_kept_until_both_are_over() -> None:
    manager = BlockManager(6, 4, session_share=0.5)
    filled(manager, [b"w1", b"w2"], session=7, tenant=b"t")
    used(manager, [b"w1"], session=8)
    for session, kept in ((8, True), (7, False)):
        manager.end_session(session)
        filled(manager, [b"c1", b"c2"])
        table = BlockTable()
        assert manager.grow(table, 4 * 4)
        manager.check_integrity([table])
        manager.free(table)
        assert cached(manager, [b"w1", b"w2"]) == [kept, kept]
        manager.check_integrity()


def test_a_session_that_ends_while_its_blocks_are_in_use_keeps_nothing() -> None:
    manager = BlockManager(6, 4, session_share=0.5)
    filled(manager, [b"w1", b"w2"], session=7, tenant=b"t")
    table = BlockTable()
    manager.adopt(table, [b"w1", b"w2"])
    manager.end_session(7)
    manager.free(table)
    filled(manager, [b"c1", b"c2"])
    assert manager.grow(table, 4 * 4)
    assert cached(manager, [b"w1", b"w2", b"c1", b"c2"]) == [False, False, True, True]
    manager.check_integrity([table])


def test_a_block_with_other_content_is_kept_for_nobody() -> None:
    manager = BlockManager(2, 4, session_share=0.5)
    filled(manager, [b"w1"], session=7, tenant=b"t")
    filled(manager, [b"c1", b"c2"])
    used(manager, [b"c1", b"c2"])
    manager.end_session(7)
    manager.check_integrity()
    filled(manager, [b"d1"], session=8, tenant=b"t")
    assert manager.flush() == 2
    manager.end_session(8)
    manager.check_integrity()


def test_a_session_keeps_blocks_that_another_sequence_computed_at_the_same_time() -> None:
    """Only one of two equal blocks is found: it is kept, whoever has computed it, and whoever lets go first."""
    warm, cold = [b"w1", b"w2"], [b"c1", b"c2", b"c3"]
    for other_ends_first in (False, True):
        manager = BlockManager(8, 4, session_share=0.5)
        other, own = BlockTable(), BlockTable(7, b"t")
        assert manager.grow(other, 8)
        assert manager.grow(own, 8)
        for identity in warm:
            manager.commit(other, identity)
        if other_ends_first:
            manager.free(other)
        for identity in warm:
            manager.commit(own, identity)
        manager.check_integrity([own] if other_ends_first else [own, other])
        manager.free(own)
        if not other_ends_first:
            manager.free(other)
        filled(manager, cold)
        table = BlockTable()
        assert manager.grow(table, 6 * 4)
        assert cached(manager, [*warm, *cold]) == [True, True, False, False, False]
        manager.check_integrity([table])
