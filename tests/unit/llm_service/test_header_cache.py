"""Headers that are remembered: under the tenant that they were seen for, the longest unused forgotten first."""

from __future__ import annotations

from common.media.item import Grid, Header, Modality, PromptPart
from llm_service.encoders.header_cache import HeaderCache


def header(name: bytes, *, cached: bool = False, text: str = "") -> Header:
    parts = (PromptPart(text, 1, 7),) if text else ()
    return Header(name, Modality.IMAGE, Grid(1, 2, 2), tokens=1, cached=cached, replacement=parts)


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


def test_headers_with_long_replacements_are_forgotten_by_their_bytes() -> None:
    known = HeaderCache(max_bytes=64 << 10)
    for name in (b"a", b"b", b"c"):
        known.remember({name}, header(name, text="x" * 6000), "", name)
    assert [known.find(name, "", Modality.IMAGE) is None for name in (b"a", b"b", b"c")] == [True, False, False]
    assert 2 * 24_000 < known.bytes <= 64 << 10
    known.remember({b"b"}, header(b"b"), "", b"b")  # in the place of the long one
    known.forget({b"c"}, header(b"c"), "")
    assert known.bytes < 24_000
    known.remember({b"d"}, header(b"d", text="x" * 20_000), "", b"d")
    assert (known.find(b"d", "", Modality.IMAGE), known.bytes) == (None, 0), "one that is too long is not kept"
