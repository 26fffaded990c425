"""Validation of the options by which services call others: `--NAME-ca`, `--NAME-cert` and so on."""

from __future__ import annotations

from collections.abc import Sequence

from common.config import is_port
from common.rpc.bearer_tokens import TokenFile, of_option, read_tokens
from common.rpc.channel import ChannelSecurity
from twinlens import credentials


def check_addresses(option: str, addresses: Sequence[str]) -> None:
    """Raises ValueError for what is no address of a service.

    >>> check_addresses("--llm", ["127.0.0.1:7002", "dns:///llm:7002", "file:///run/llms"])
    >>> check_addresses("--llm", ["llm"])
    Traceback (most recent call last):
    ValueError: --llm: llm is not host:port, dns:///name:port or file:///path
    """
    for address in addresses:
        if address.startswith("file:///"):
            continue
        host, _, port = address.removeprefix("dns:///").rpartition(":")
        if not host or "/" in host or not is_port(port):
            raise ValueError(f"{option}: {address} is not host:port, dns:///name:port or file:///path")


def security(
    prefix: str, *, ca: str = "", cert: str = "", key: str = "", token: str = "", token_file: str = ""
) -> ChannelSecurity:
    """The channel security for options with this `prefix`. Raises ValueError if they contradict each other, if one of
    their files cannot be used, and for a token that a header cannot carry."""
    if bool(cert) != bool(key):
        raise ValueError(f"{prefix}-cert and {prefix}-key go together")
    if cert and not ca:
        raise ValueError(f"{prefix}-cert needs {prefix}-ca")
    if token and token_file:
        raise ValueError(f"give {prefix}-token or {prefix}-token-file, not both")
    credentials.check_files(ca=(f"{prefix}-ca", ca), cert=(f"{prefix}-cert", cert), key=(f"{prefix}-key", key))
    with of_option(f"{prefix}-token-file"):
        file = TokenFile(token_file) if token_file else None
    with of_option(f"{prefix}-token"):
        given = "".join(read_tokens(token, ""))
    return ChannelSecurity(ca, cert, key, given, file)
