"""Headers that are remembered: under the tenant that they were seen for, the longest unused forgotten first."""

from __future__ import annotations

from common.media.item import Grid, Header, Modality
from llm_service.encoders.identity import HeaderCache


def header(name: bytes, *, cached: bool = False) -> Header:
    return Header(key=name, modality=Modality.IMAGE, grid=Grid(1, 2, 2), tokens=1, cached=cached)


def test_a_header_is_found_under_its_own_tenant_and_kind_alone() -> None:
    known = HeaderCache()
    known.remember({b"a", b"also a"}, header(b"a", cached=True), "tenant", b"affinity")
    for name in (b"a", b"also a"):
        found = known.find(name, "tenant", Modality.IMAGE)
        assert found is not None
        assert (found.header, found.affinity) == (header(b"a"), b"affinity"), "what was cached then need not be now"
    assert known.find(b"a", "another", Modality.IMAGE) is None
    assert known.find(b"a", "tenant", Modality.VIDEO) is None
    assert known.find(None, "tenant", Modality.IMAGE) is None
    known.forget({b"a"}, header(b"a"), "tenant")
    assert known.find(b"a", "tenant", Modality.IMAGE) is None


def test_the_longest_unused_header_is_forgotten_and_being_seen_again_is_use() -> None:
    known = HeaderCache(max_entries=3)
    for name in (b"a", b"b", b"c"):
        known.remember({name}, header(name), "", name)
    known.find(b"a", "", Modality.IMAGE)
    known.remember({b"b"}, header(b"b"), "", b"b")
    known.remember({b"d"}, header(b"d"), "", b"d")
    assert [bool(known.find(name, "", Modality.IMAGE)) for name in (b"a", b"b", b"c", b"d")] == [
        True,
        True,
        False,
        True,
    ]
