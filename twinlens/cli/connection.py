"""The flags that say how to reach a service; every command has them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from twinlens.channel import Endpoint, Tls


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the token and TLS flags."""
    group = parser.add_argument_group("connection")
    group.add_argument("--token-file", metavar="FILE", help="file with the bearer token (or set TWINLENS_TOKEN)")
    group.add_argument(
        "--plaintext-token",
        action="store_true",
        help="send the token without TLS, over a network that you trust",
    )
    group.add_argument("--tls", action="store_true", help="use TLS, trusting the public roots")
    group.add_argument("--ca-file", metavar="PEM", help="use TLS, trusting these roots alone")
    group.add_argument("--cert-file", metavar="PEM", help="client certificate, with --key-file")
    group.add_argument("--key-file", metavar="PEM", help="private key of --cert-file")
    group.add_argument("--server-name", metavar="NAME", help="name expected in the service's certificate")


def endpoint(address: str, arguments: argparse.Namespace) -> Endpoint:
    """An address with the flags' token and TLS. Raises ValueError or OSError for unusable flags."""
    return Endpoint(address, _token(arguments), _tls(arguments), arguments.plaintext_token)


def bounded(kind: Callable[[str], float], low: float = 0, high: float = float("inf")) -> Callable[[str], float]:
    """A number from `low` to `high`, for argparse; NaN is refused."""

    def read(text: str) -> float:
        value = kind(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is outside {low:g} to {high:g}")
        return value

    read.__name__ = "number"
    return read


def _token(arguments: argparse.Namespace) -> str | None:
    if arguments.token_file is None:
        return os.environ.get("TWINLENS_TOKEN", "").strip() or None
    if not (token := Path(arguments.token_file).read_text("utf-8").strip()):
        raise ValueError(f"{arguments.token_file} holds no token")
    return token


def _tls(arguments: argparse.Namespace) -> Tls | None:
    files = (arguments.ca_file, arguments.cert_file, arguments.key_file, arguments.server_name)
    return Tls(*files) if arguments.tls or any(files) else None
