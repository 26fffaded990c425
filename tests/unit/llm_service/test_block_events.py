"""An index that is made of events alone has what prompts find, whatever comes and goes."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("zmq")

from llm_service.engine.block_events import BlockEvents
from llm_service.engine.block_identity import BlockContent, BlockIdentities, KeyedRun
from llm_service.engine.block_manager import BlockManager
from llm_service.engine.messages import Add, BlockEvent, BlocksCleared, BlocksRemoved, BlocksStored, ItemRows
from llm_service.engine.prompt import Prompt
from llm_service.families.chunk_rule import ANYWHERE, ChunkRule
from llm_service.families.sight import SpanRule
from llm_service.kv_events import Batch, encode
from llm_service.request import MediaRun, SamplingParams
from tests.kv_index import Index
from tests.unit.llm_service.test_block_manager import chain
from tests.unit.llm_service.test_host_blocks import ACTS, Device


def content(name: str, index: int) -> BlockContent:
    parent = chain(name, index)[-1] if index else None
    return BlockContent(parent, array("i", [ord(name), index, 0, 0]).tobytes(), 0, ())


class Told(Device):
    """Blocks whose events go to an index."""

    def __init__(self, blocks: int, host_blocks: int) -> None:
        super().__init__(blocks, host_blocks)
        self.events = BlockEvents()
        self.manager = BlockManager(blocks, 4, host_blocks=host_blocks, observer=self.events)
        self.index = Index()
        self.number = 0

    def describe(self, identity: bytes) -> BlockContent:
        name, index = next((n, chain(n, 5).index(identity)) for n in "abcde" if identity in chain(n, 5))
        return content(name, index)

    def commit(self, table: Any, identity: bytes) -> None:
        self.manager.commit(table, identity, lambda _: self.describe(identity))

    def check(self) -> None:
        if events := self.events.take():
            self.index.take(encode(Batch(self.number, 2e9, events, {}), 4))
            self.number += 1
        every = [identity for name in "abcde" for identity in chain(name, 5)]
        there = {int.from_bytes(each[-8:], "big"): each for each in every}
        found = {there[each] for each in self.index.media}
        assert found == {each for each in every if self.manager.match_blocks([each])}
        assert {there[each] for each in self.index.on("CPU")} == {each for each in every if each in self.manager.host}
        for name in "abcde":
            tokens = [token for index in range(5) for token in (ord(name), index, 0, 0)]
            assert self.index.match(tokens, 4) == 4 * self.manager.match(chain(name, 5))


@given(st.lists(ACTS, max_size=80), st.integers(0, 4))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_an_index_made_of_events_has_what_prompts_find(acts: list[tuple[str, str, int]], host_blocks: int) -> None:
    told = Told(5, host_blocks)
    for act, name, count in acts:
        match act:
            case "start":
                told.start(name, count)
            case "step":
                told.step()
            case "end":
                told.end()
            case _:
                told.manager.flush()
        told.check()


def test_what_makes_way_on_the_host_is_told_of() -> None:
    told = Told(4, 2)
    for name in "abcde":
        after(told, name, check=True)
    assert told.manager.host.offloaded == 16
    assert len(told.index.on("CPU")) == 2


def after(told: Told, names: str, *, check: bool = False) -> list[BlockEvent]:
    for name in names:
        told.start(name, 4)
        told.step()
        told.end()
        if check:
            told.check()
    return told.events.take()


def test_blocks_that_follow_on_each_other_are_told_of_at_once_and_the_host_before_the_device_lets_go() -> None:
    stored, *rest = after(Told(4, 8), "ab")
    assert isinstance(stored, BlocksStored)
    assert (stored.parent, stored.medium, len(stored.hashes), len(stored.token_ids)) == (None, "GPU", 4, 4)
    on_host, removed, *_ = rest
    assert isinstance(on_host, BlocksStored)
    assert isinstance(removed, BlocksRemoved)
    assert (on_host.medium, removed.medium) == ("CPU", "GPU")
    assert on_host.hashes == removed.hashes == stored.hashes[-1:], "the tail goes first"
    assert on_host.token_ids == stored.token_ids[-1:]


def test_what_comes_back_from_the_host_is_told_of_with_its_tokens() -> None:
    told = Told(4, 8)
    after(told, "ab")
    assert told.manager.match(chain("a", 4)) == 4
    back = [each for each in after(told, "a") if isinstance(each, BlocksStored) and each.medium == "GPU"]
    assert [number for each in back for number in each.hashes] == [_number(each) for each in chain("a", 4)]
    assert b"".join(token for each in back for token in each.token_ids) == b"".join(
        content("a", index).token_ids for index in range(4)
    )


def test_what_came_to_the_host_from_elsewhere_is_told_of_when_a_sequence_has_it() -> None:
    events, names = BlockEvents(), chain("a", 3)
    events.dropped(names[0])
    assert events.take() == [], "nobody was told that it was there"
    for index, identity in enumerate(names):
        events.loaded(identity, index, lambda index: content("a", index))
    told = [each for each in events.take() if isinstance(each, BlocksStored)]
    for medium in ("GPU", "CPU"):
        assert [number for each in told if each.medium == medium for number in each.hashes] == list(map(_number, names))
    events.computed(other := chain("b", 1)[0], 0, lambda index: content("b", index))
    events.offloaded(other)
    events.offloaded(other)
    assert [each.medium for each in events.take() if isinstance(each, BlocksStored)] == ["GPU", "CPU"]


def test_a_flush_of_all_is_one_event_and_one_beside_a_sequence_names_what_is_gone() -> None:
    told = Told(8, 8)
    after(told, "ab")
    told.manager.flush()
    assert told.events.take() == [BlocksCleared()]
    after(told, "a")
    told.start("b", 2)
    told.step()
    told.events.take()
    told.manager.flush()
    (removed,) = told.events.take()
    assert isinstance(removed, BlocksRemoved)
    assert set(removed.hashes) == {_number(each) for each in chain("a", 4)}


def test_a_cache_without_prefixes_says_nothing() -> None:
    events = BlockEvents()
    manager = BlockManager(4, 4, prefix_cache=False, observer=events)
    device = Device(4, 0)
    device.manager = manager
    device.start("a", 4)
    device.step()
    device.end()
    assert events.take() == []


def _number(identity: bytes) -> int:
    return int.from_bytes(identity[-8:], "big")


TOKENS = array("i", [1, 2, 3, 4, 9, 9, 9, 9, 9, 9, 5, 6, 7, 8, 1, 1])


def contents(
    *shown: bytes, salt: str = "", adapter: bytes = b"", rule: ChunkRule = ANYWHERE, positions: Any = None
) -> list[BlockContent]:
    """Of a prompt of four blocks, the middle two of which are a picture's, or two pictures'."""
    count = 6 // max(1, len(shown))
    items = [
        ItemRows(key=key, offset=0, runs=(MediaRun(4 + n * count, 0, count),), landed=count)
        for n, key in enumerate(shown)
    ]
    places = np.tile(np.arange(16, dtype=np.int32), (3, 1)) if positions is None else positions
    add = Add(
        id=1,
        token_ids=TOKENS.tobytes(),
        positions=places.tobytes(),
        mrope_delta=0,
        items=items,
        sampling=SamplingParams(max_tokens=4),
        salt=salt,
        priority=0,
        deadline=None,
        adapter=3 if adapter else 0,
        adapter_digest=adapter,
    )
    prompt = Prompt.of(add, rule)
    identities = BlockIdentities(prompt.root, prompt.keyed_runs)
    identities.first(4, prompt.tokens, 4)
    return [identities.content(n, prompt.tokens, 4, add.adapter, prompt.plain_root) for n in range(4)]


CAT, DOG = b"c" * 32, b"d" * 32


def test_blocks_with_rows_name_their_items_and_others_nothing() -> None:
    assert [each.keys for each in contents(CAT)] == [(), (CAT.hex(),), (CAT.hex(),), ()]
    assert [each.keys for each in contents(CAT, DOG)] == [(), (CAT.hex(), DOG.hex()), (DOG.hex(),), ()]
    assert [each.keys for each in contents()] == [()] * 4
    assert [each.token_ids for each in contents(CAT)] == [each.token_ids for each in contents(DOG)]


def test_of_other_tenants_and_of_prompts_that_are_computed_at_once_the_first_block_says_so() -> None:
    salted, other = contents(salt="one"), contents(salt="two")
    assert salted[0].keys != other[0].keys
    assert all(len(each[0].keys) == 1 and not each[1].keys for each in (salted, other))
    assert len(contents(CAT, rule=ChunkRule(SpanRule.WHOLE_PROMPTS))[0].keys) == 1
    assert not contents(adapter=b"a" * 32)[0].keys, "that is said by its name"
    assert contents(adapter=b"a" * 32)[0].adapter == 3


def test_a_mark_that_stands_elsewhere_than_in_a_text_is_named() -> None:
    beside = np.tile(np.arange(16, dtype=np.int32), (3, 1))
    beside[1:, 3] = 1
    (plain, *_), (marked, *_) = contents(CAT), contents(CAT, positions=beside)
    assert not plain.keys
    assert len(marked.keys[0]) == 64


def test_keys_are_the_same_in_whichever_order_blocks_are_asked_for() -> None:
    prompt = contents(CAT, DOG)
    runs = [KeyedRun(MediaRun(4, 0, 3), CAT), KeyedRun(MediaRun(7, 0, 3), DOG)]
    identities = BlockIdentities(b"root", runs)
    identities.first(4, TOKENS, 4)
    backwards = [identities.content(n, TOKENS, 4, 0, b"root") for n in reversed(range(4))]
    assert [each.keys for each in reversed(backwards)] == [each.keys for each in prompt]
