"""Host names that a gateway accepts. A web page can point its own name to the client's machine, where a gateway without
tokens would answer it, since the browser sees one origin."""

from __future__ import annotations

import ipaddress

from gateway.config import GatewayConfig


class Hosts:
    """Of a gateway that listens on loopback without a token: localhost, addresses, and names that options give. Of
    others: all."""

    def __init__(self, config: GatewayConfig) -> None:
        listens = config.listen.rpartition(":")[0].strip("[]")
        alone = listens == "localhost" or (_is_address(listens) and ipaddress.ip_address(listens).is_loopback)
        self._named = {_name(origin.rpartition("//")[2]) for origin in config.allow_origins}
        self._named |= {_name(host) for host in config.allow_hosts}
        self._all = not alone or bool(config.auth_token_file) or "*" in self._named

    def allow(self, host: str) -> bool:
        """Whether a request with this `Host` may come in; one without is no browser's."""
        if self._all or not host:
            return True
        name = _name(host)
        return name in self._named or name == "localhost" or name.endswith(".localhost") or _is_address(name)


def _name(host: str) -> str:
    """Without its port.

    >>> _name("Example.org.:8000"), _name("[::1]:80"), _name("10.0.0.1")
    ('example.org', '::1', '10.0.0.1')
    """
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
