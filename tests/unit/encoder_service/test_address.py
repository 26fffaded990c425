"""Which addresses make sense, whose hosts are allowed, and what may be connected to."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import Forbidden, InvalidInput
from common.media import data_url
from encoder_service.media.address import HostRules, is_reachable, parse


@pytest.mark.parametrize(
    "url",
    [
        "",
        "x.png",
        "//host/x.png",
        "ftp://host/x.png",
        "gopher://host:80/",
        "javascript:alert(1)",
        "http://",
        "http:///x.png",
        "http://user@host/",
        "http://user:word@host/",
        "http://host\\@other/",
        "http:\\\\host\\x.png",
        "http://host/a\tb",
        "http://host/\r\nHost: other",
        "http://host/\x00",
        "http://host/\x7f",
        " http://host/",
        "http://ho st/",
        "http://ho%20st/",
        "http://ho%2fst/",
        "http://[::1/",
        "http://[fe80::1%25eth0]/",
        "http://host:99999/",
        "http://host:0/",
        "http://host:eighty/",
        "http://host/" + "x" * 9000,
    ],
)
def test_an_address_that_makes_no_sense_is_invalid(url):
    with pytest.raises(InvalidInput) as refused:
        parse(url, "items[0].url")
    assert (refused.value.reason, refused.value.field) == ("BAD_URL", "items[0].url")


@pytest.mark.parametrize("url", ["file:///etc/passwd", "file://host/x", "http://0177.0.0.1/", "http://１２７.0.0.1/"])
def test_a_file_or_an_oddly_spelt_number_is_a_place_that_is_not_allowed(url):
    with pytest.raises(Forbidden):
        parse(url, "url")


def test_what_is_sent_is_what_was_checked():
    read = parse("HTTPS://Exämple.ORG:8443/a/../b c".replace(" ", "%20") + "?q=ü#part", "url")
    assert (read.scheme, read.host, read.port) == ("https", "xn--exmple-cua.org", 8443)
    assert (read.target, read.authority) == (b"/b%20c?q=%C3%BC", b"xn--exmple-cua.org:8443")
    assert parse("http://[::1]:81/", "url").host == "::1"


@pytest.mark.parametrize(
    ("entry", "allowed", "refused"),
    [
        ("example.org", ["http://example.org/", "https://EXAMPLE.org:80/"], ["http://www.example.org/"]),
        ("example.org", ["https://example.org/"], ["http://example.org:8080/", "http://example.org:22/"]),
        ("example.org:8443", ["https://example.org:8443/"], ["https://example.org/", "http://example.org/"]),
        ("*.example.org", ["http://a.b.example.org/"], ["http://example.org/", "http://badexample.org/"]),
        ("*", ["http://example.org/"], ["http://example.org:8080/"]),
        ("exämple.org", ["http://xn--exmple-cua.org/"], ["http://example.org/"]),
        ("[::1]:8080", ["http://[::1]:8080/"], ["http://[::2]:8080/", "http://[::1]/"]),
    ],
)
def test_an_entry_allows_its_hosts_and_ports_alone(entry, allowed, refused):
    rules = HostRules([entry], [])
    for url in allowed:
        assert not rules.find(parse(url, "url"), "url").private
    for url in refused:
        with pytest.raises(Forbidden):
            rules.find(parse(url, "url"), "url")


@pytest.mark.parametrize("entry", ["", "a/b", "http://a", "u@a", "a*b", "*a", "a:port", "*.*.a", "a b", "a:0x1"])
def test_an_entry_that_is_no_host_is_refused_at_the_start(entry):
    with pytest.raises(ValueError, match=r"is not a host|allows too much"):
        HostRules([entry], [])


def test_every_private_host_at_once_cannot_be_allowed():
    with pytest.raises(ValueError, match="allows too much"):
        HostRules([], ["*"])


def test_nothing_is_allowed_unless_it_is_listed():
    rules = HostRules([], [])
    assert not rules
    with pytest.raises(Forbidden):
        rules.find(parse("http://example.org/", "url"), "url")


PUBLIC = ["93.184.216.34", "1.1.1.1", "2606:4700::1111", "::ffff:1.1.1.1", "64:ff9b::101:101"]
PRIVATE = ["127.0.0.1", "127.8.9.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "100.64.0.1", "::1", "fd00::1"]
PRIVATE += ["::ffff:127.0.0.1", "64:ff9b::7f00:1", "::ffff:c0a8:101"]
NOWHERE = ["0.0.0.0", "169.254.169.254", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe", "fe80::1", "fe80::1%eth0"]
NOWHERE += ["224.0.0.1", "255.255.255.255", "240.0.0.1", "192.0.2.1", "198.18.0.1", "192.0.0.8", "::", "::7f00:1"]
NOWHERE += ["2002:7f00:1::", "2001:0:7f00:1::", "64:ff9b:1::7f00:1", "::ffff:0:127.0.0.1", "ff02::1", "fec0::1"]
NOWHERE += ["2001:db8::1", "3fff::1", "100.100.100.200", "168.63.129.16", "fd00:ec2::254", "fd20:ce::254", "", "host"]


@pytest.mark.parametrize("answer", PUBLIC)
def test_public_addresses_can_be_reached(answer):
    assert is_reachable(answer, private=False)
    assert is_reachable(answer, private=True)


@pytest.mark.parametrize("answer", PRIVATE)
def test_private_addresses_can_be_reached_for_hosts_that_may_be_private(answer):
    assert not is_reachable(answer, private=False)
    assert is_reachable(answer, private=True)


@pytest.mark.parametrize("answer", NOWHERE)
def test_link_local_metadata_and_special_addresses_can_never_be_reached(answer):
    assert not is_reachable(answer, private=False)
    assert not is_reachable(answer, private=True)


@given(st.ip_addresses(v=4))
def test_an_ipv4_address_fares_alike_however_ipv6_spells_it(address: ipaddress.IPv4Address):
    for prefix in (0xFFFF << 32, 0x64FF9B << 96):
        spelt = str(ipaddress.IPv6Address(prefix | int(address)))
        assert is_reachable(spelt, private=False) == is_reachable(str(address), private=False)
    tunnelled = ipaddress.IPv6Address((0x2002 << 112) | (int(address) << 80))
    assert not is_reachable(str(tunnelled), private=True)


@pytest.mark.parametrize(
    "url",
    [
        "data:,plain",
        "data:image/png",
        "data:image/png;base64,@@",
        "data:image/png;base64,AAA",
        "data:image/png;base64,é-AA",
        "data:",
        "data:image/png;" + "a;" * 1000 + "base64,AAAA",
    ],
)
def test_a_data_address_that_is_not_base64_is_invalid(url):
    with pytest.raises(InvalidInput) as refused:
        data_url.decode(url, "url")
    assert refused.value.reason == "BAD_BASE64"


@given(st.binary(max_size=64))
def test_a_data_address_gives_back_its_bytes(content):
    import base64
    from urllib.parse import quote

    body = base64.b64encode(content).decode()
    for text in (body, quote(body, safe="")):
        assert data_url.decode(f"data:image/png;charset=x;base64,{text}", "url") == (content, "image/png")


@given(st.binary(max_size=200))
def test_a_data_address_may_have_line_ends_and_the_alphabet_of_addresses(content):
    import base64

    lines = base64.encodebytes(content).decode()
    url_safe = base64.urlsafe_b64encode(content).decode()
    escaped = lines.replace("\n", "%0D%0a")
    for text in (lines, lines.replace("\n", "\r\n\t "), url_safe, escaped):
        assert data_url.decode(f"data:image/png;base64,{text}", "url") == (content, "image/png")
