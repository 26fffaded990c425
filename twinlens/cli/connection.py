"""The flags that say how to reach a service; every command has them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
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
    group.add_argument("--ca-file", metavar="PEM", help="use TLS, trusting only these roots")
    group.add_argument("--cert-file", metavar="PEM", help="client certificate, with --key-file")
    group.add_argument("--key-file", metavar="PEM", help="private key of --cert-file")
    group.add_argument("--server-name", metavar="NAME", help="name expected in the service's certificate")


def add_encoder_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags for encoders that are reached in another way than the LLM service."""
    group = parser.add_argument_group(
        "connection to the encoders",
        "defaults: as for the LLM service; a certificate and its key go together",
    )
    group.add_argument("--encoder-token-file", metavar="FILE", help="file with their bearer token")
    how = group.add_mutually_exclusive_group()
    how.add_argument("--encoder-tls", action="store_true", default=None, help="use TLS, trusting the public roots")
    how.add_argument("--encoder-plaintext", action="store_true", help="use no TLS, although the LLM service does")
    group.add_argument("--encoder-ca-file", metavar="PEM", help="use TLS, trusting only these roots")
    group.add_argument("--encoder-cert-file", metavar="PEM", help="client certificate, with --encoder-key-file")
    group.add_argument("--encoder-key-file", metavar="PEM", help="private key of --encoder-cert-file")
    group.add_argument("--encoder-server-name", metavar="NAME", help="name expected in their certificates")


def endpoint(address: str, arguments: argparse.Namespace) -> Endpoint:
    """An address with the flags' token and TLS. Raises ValueError or OSError for unusable flags."""
    names = {name: name for name in _NAMES}
    return Endpoint(address, _token(arguments, names), _tls(arguments, names), arguments.plaintext_token)


def encoder_endpoint(address: str, arguments: argparse.Namespace) -> Endpoint:
    """An encoder's address: each flag of its own goes before the one for the LLM service. Raises as `endpoint`."""
    given = {name: f"encoder_{name}" for name in _NAMES if getattr(arguments, f"encoder_{name}") is not None}
    if "cert_file" in given or "key_file" in given:  # half of the LLM service's pair is of no use
        given |= {name: f"encoder_{name}" for name in ("cert_file", "key_file")}
    if arguments.encoder_tls:  # the public roots
        given["ca_file"] = "encoder_ca_file"
    names = {name: name for name in _NAMES} | given
    tls = None if arguments.encoder_plaintext else _tls(arguments, names)
    return Endpoint(address, _token(arguments, names), tls, arguments.plaintext_token)


_FILES = ("ca_file", "cert_file", "key_file", "server_name")
_NAMES = ("token_file", "tls", *_FILES)


def token_of(arguments: argparse.Namespace) -> str | None:
    """The token of --token-file, else of the environment. Raises ValueError or OSError for an unusable file."""
    return _token(arguments, {"token_file": "token_file"})


def bounded(kind: Callable[[str], float], low: float = 0, high: float = float("inf")) -> Callable[[str], float]:
    """A number from `low` to `high`, for argparse; NaN is refused."""

    def read(text: str) -> float:
        value = kind(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is outside {low:g} to {high:g}")
        return value

    read.__name__ = "number"
    return read


def _token(arguments: argparse.Namespace, names: Mapping[str, str]) -> str | None:
    """The token of the flag that `names` says, else of the environment."""
    file = getattr(arguments, names["token_file"])
    if file is None:
        return os.environ.get("TWINLENS_TOKEN", "").strip() or None
    lines = Path(file).read_text("utf-8").split("\n")
    if not (tokens := [stripped for line in lines if (stripped := line.strip())]):
        raise ValueError(f"{_flag(names['token_file'])} {file} holds no token")
    return tokens[0]


def _tls(arguments: argparse.Namespace, names: Mapping[str, str]) -> Tls | None:
    """TLS by these flags; None if none of them is given."""
    files = [getattr(arguments, names[name]) for name in _FILES]
    if not (getattr(arguments, names["tls"]) or any(files)):
        return None
    if (files[1] is None) != (files[2] is None):
        raise ValueError(f"{_flag(names['cert_file'])} and {_flag(names['key_file'])} go together")
    tls = Tls(*files)
    tls.check(lambda field: _flag(names[field]))
    return tls


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
