"""Callers: the tokens that they must send, their names, and what keeps callers with different names apart at the LLM
services."""

from __future__ import annotations

import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from common.rpc.bearer_tokens import ReadAgain, check_tokens, read_lines

_NAME: Final = re.compile(r"[A-Za-z0-9._@+-]{1,64}")
_BETWEEN: Final = "\t"
"""Separates a name from its token; tokens cannot contain it."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a token. `name` is empty if the token has none, or no token is needed."""

    name: str = ""
    key: bytes = field(default=b"", repr=False)

    def salt(self, own: str) -> str:
        """The salt for LLM services, given the request's `own`. For a caller with a name it is a digest that nobody
        without one of that name's tokens can compute."""
        if not self.name:
            return own
        return hmac.digest(self.key, f"salt\0{self.name}\0{own}".encode(), "sha256").hex()


class Callers:
    """The callers who are admitted: those with a token from the file; without a file, everybody."""

    def __init__(self, file: str = "") -> None:
        """Raises ValueError if the file cannot be used."""
        self._file = ReadAgain(file, _read) if file else None

    def known(self, tokens: Sequence[bytes]) -> Caller | None:
        """The sender of these tokens, the first known one; None if none is known. The time that this takes reveals
        nothing about tokens."""
        if self._file is None:
            return Caller()
        lines = self._file.lines
        found = [caller for each in tokens for token, caller in lines if hmac.compare_digest(each, token)]
        return found[0] if found else None


def _read(file: str) -> tuple[tuple[bytes, Caller], ...]:
    """Tokens and their callers. The first token of a name is the key of all its salts, so that gateways with the same
    file agree. Raises ValueError."""
    names: dict[str, str] = {}
    keys: dict[str, bytes] = {}
    for line in read_lines(file):
        name, token = _parts(line)
        if not (name or token):
            continue
        if name and not _NAME.fullmatch(name):
            raise ValueError(f"{file}: a caller's name has 1 to 64 letters, digits and signs of ._@+-")
        if not token:
            raise ValueError(f"{file}: a caller's name has no token")
        check_tokens([token])
        if names.setdefault(token, name) != name:
            raise ValueError(f"{file}: two callers have the same token")
        keys.setdefault(name, token.encode() if name else b"")
    return tuple((token.encode(), Caller(name, keys[name])) for token, name in names.items())


def _parts(line: str) -> tuple[str, str]:
    """The name, which may be empty, and the token of a line.

    >>> _parts("alice\\tsecret "), _parts(" a secret\\n"), _parts("\\tsecret"), _parts("alice\\t")
    (('alice', 'secret'), ('', 'a secret'), ('', 'secret'), ('alice', ''))
    """
    name, between, token = line.partition(_BETWEEN)
    return (name.strip(), token.strip()) if between else ("", name.strip())
