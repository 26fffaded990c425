"""Addresses of media: read once, by one parser, and held to the hosts and networks that the operator allowed.

`parse` says whether an address makes sense, `HostRules` whether its host is on a list, `is_reachable` the rest.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import httpx2

from common.errors import Forbidden, InvalidInput

_LONGEST = 8192
"""Characters of the longest address; signed ones of object stores are the longest in use."""

_NUMBERS: Final = re.compile(r"https?://[0-9.]+([:/?#]|$)", re.IGNORECASE)
"""An IP address in digits that the parser does not know, such as octal ones: still an address."""

_PORTS: Final = {"http": 80, "https": 443}
_EMBEDDED: Final = ipaddress.ip_network("64:ff9b::/96")
"""How an IPv6-only network reaches IPv4 hosts (NAT64, RFC 6052): the last 32 bits are the real destination."""

_UNICAST: Final = ipaddress.ip_network("2000::/3")
_SPECIAL: Final = tuple(
    map(ipaddress.ip_network, ("192.0.0.0/24", "192.88.99.0/24", "2001::/23", "2002::/16", "3fff::/20"))
)
"""Protocol assignments, Teredo and 6to4 (which carry an IPv4 destination), documentation: no media host is there."""

_PRIVATE: Final = tuple(
    map(
        ipaddress.ip_network,
        ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "127.0.0.0/8", "fc00::/7", "::1/128"),
    )
)
_METADATA: Final = frozenset(
    map(ipaddress.ip_address, ("100.100.100.200", "168.63.129.16", "fd00:ec2::254", "fd20:ce::254"))
)
"""Addresses where clouds hand out credentials, besides the link-local 169.254.169.254."""


@dataclass(frozen=True, slots=True)
class Address:
    """An http or https address as a request needs it: ASCII all through, `host` without the brackets of IPv6."""

    scheme: str
    host: str
    port: int
    target: bytes
    authority: bytes

    def joined(self, location: str, field: str) -> Address:
        """The address that a redirect from here leads to. Raises as `parse`."""
        here = f"{self.scheme}://{self.authority.decode()}{self.target.decode()}"
        _check_text(location, field)
        try:
            return parse(str(httpx2.URL(here).join(location)), field)
        except (httpx2.InvalidURL, ValueError):  # the join is the standard library's, with errors of its own
            raise _bad("cannot be read", field) from None


def parse(url: str, field: str) -> Address:
    """Reads an address. Raises InvalidInput if it is malformed or neither http nor https, and Forbidden for a file."""
    _check_text(url, field)
    try:
        read = httpx2.URL(url)
        host = read.raw_host.decode("ascii")
    except (httpx2.InvalidURL, UnicodeError):
        if _NUMBERS.match(unicodedata.normalize("NFKC", url)):
            raise forbidden(field) from None
        raise _bad("cannot be read", field) from None
    if read.scheme == "file":
        raise forbidden(field)
    if read.scheme not in _PORTS:
        raise _bad("does not begin with http:, https: or data:", field)
    if read.userinfo:
        raise _bad("holds a user name", field)
    if not host or "%" in host or (read.port is not None and not 0 < read.port < 1 << 16):
        raise _bad("has no usable host", field)
    return Address(read.scheme, host, read.port or _PORTS[read.scheme], read.raw_path, read.netloc)


@dataclass(frozen=True, slots=True)
class HostRule:
    """An entry of a host list: `example.org`, `*.example.org` (its subdomains), `*` (any), each with `:port` or not.

    Without a port, 80 and 443 are meant. `private` says whether the host may be in a private network.
    """

    host: str
    port: int | None
    private: bool

    @classmethod
    def read(cls, entry: str, *, private: bool) -> HostRule:
        """Reads an entry; raises ValueError, which names it, if it is invalid."""
        try:
            read = httpx2.URL(f"rule://{entry.removeprefix('*.').replace('*', 'any')}")
            host = read.raw_host.decode("ascii")
        except (httpx2.InvalidURL, UnicodeError):
            raise ValueError(f"{entry!r} is not a host") from None
        if not host or "%" in host or read.raw_path not in (b"", b"/") or read.userinfo or "*" in entry[1:]:
            raise ValueError(f"{entry!r} is not a host")
        if entry.startswith("*."):
            host = f"*.{host}"
        elif entry.startswith("*"):
            if entry.partition(":")[0] != "*" or private:
                raise ValueError(f"{entry!r} allows too much")
            host = "*"
        return cls(host, read.port, private)

    def allows(self, address: Address) -> bool:
        """The entry names this host and port."""
        named = self.host in ("*", address.host) or (self.host[:2] == "*." and address.host.endswith(self.host[1:]))
        return named and (address.port == self.port if self.port else address.port in _PORTS.values())


class HostRules:
    """All that the operator allowed; nothing by default. Raises ValueError for an entry that makes no sense."""

    def __init__(self, public: Iterable[str], private: Iterable[str]) -> None:
        self._rules = [
            *(HostRule.read(entry.lower(), private=True) for entry in private),
            *(HostRule.read(entry.lower(), private=False) for entry in public),
        ]

    def __bool__(self) -> bool:
        return bool(self._rules)

    def find(self, address: Address, field: str) -> HostRule:
        """The entry that allows an address; raises Forbidden if there is none."""
        rule = next((rule for rule in self._rules if rule.allows(address)), None)
        if rule is None:
            raise forbidden(field)
        return rule


def literal(host: str) -> str:
    """The IP address that a host is, in the usual spelling; empty for a name.

    >>> [literal(host) for host in ("0x7f.1", "2130706433", "::1", "example.org")]
    ['127.0.0.1', '127.0.0.1', '::1', '']
    """
    try:
        return socket.inet_ntoa(socket.inet_aton(host))
    except OSError:
        pass
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return ""


def is_reachable(answer: str, *, private: bool) -> bool:
    """Whether an address that a name resolved to may be connected to. This is what keeps a caller out of the networks
    behind this service, however an address is spelt, since these are the numbers that a connection really goes to.

    Of IPv6 only what is given out to hosts (2000::/3) is, and what stands for a reachable IPv4 address; with `private`
    also the private networks and loopback, but never link-local or metadata addresses.

    >>> [is_reachable(each, private=False) for each in ("93.184.216.34", "::ffff:10.0.0.1", "64:ff9b::7f00:1")]
    [True, False, False]
    """
    try:
        ip = ipaddress.ip_address(answer)
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.scope_id is not None:
            return False
        if ip.ipv4_mapped is not None:
            return is_reachable(str(ip.ipv4_mapped), private=private)
        if ip in _EMBEDDED:
            return is_reachable(str(ipaddress.IPv4Address(int(ip) & 0xFFFF_FFFF)), private=private)
    if ip in _METADATA:
        return False
    if private and any(ip in network for network in _PRIVATE):
        return True
    if any(ip in network for network in _SPECIAL) or (ip.version == 6 and ip not in _UNICAST):
        return False
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_link_local or ip.is_unspecified)


def forbidden(field: str) -> Forbidden:
    """The single answer for every address that may not be fetched, so that it reveals nothing of what is there."""
    said = (
        "media may not be fetched from this address, only from hosts that the encoders' --allow-media-host names,"
        " by default none; bytes can be sent instead, or a data address"
    )
    return Forbidden(said, reason="FETCH_FORBIDDEN", field=field)


def _check_text(url: str, field: str) -> None:
    if len(url) > _LONGEST:
        raise _bad(f"has more than {_LONGEST} characters", field)
    if not url or any(sign <= " " or sign in "\\\x7f" for sign in url):
        raise _bad("is empty, or holds a space, a control character or a backslash", field)


def _bad(why: str, field: str) -> InvalidInput:
    return InvalidInput(f"the address {why}", reason="BAD_URL", field=field)
