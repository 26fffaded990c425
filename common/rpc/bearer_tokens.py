"""Bearer tokens, in options or in files, one per line; files are read again when they are replaced. Servers accept any
of them, and clients send the first, so tokens can be rotated without a moment in which both sides differ."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, TypeVar

from common.rpc.tls_files import Seen, look_at
from common.telemetry import log

_log = log.get("tokens")
Line = TypeVar("Line")


@contextmanager
def of_option(option: str) -> Iterator[None]:
    """Inside the block, the ValueError of an unusable token or file names the option that gives it."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from error


def read_tokens(token: str, file: str) -> tuple[str, ...]:
    """The token given directly, or those in a file, without surrounding white space; none if neither is given.

    Raises ValueError for a file that cannot be read, or has none, and for a token that a header cannot carry.
    """
    if not (token or file):
        return ()
    tokens = tuple(stripped for line in (read_lines(file) if file else [token]) if (stripped := line.strip()))
    check_tokens(tokens)
    return tokens


def read_lines(file: str) -> list[str]:
    """The lines of a file of tokens, at least one of which is not empty. Raises ValueError."""
    try:
        lines = Path(file).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ValueError(f"{file} cannot be read as tokens: {cause}") from error
    if not any(line.strip() for line in lines):
        raise ValueError(f"{file} holds no token")
    return lines


def check_tokens(tokens: Collection[str]) -> None:
    """Raises ValueError for none, and for a token that a header cannot carry."""
    if not tokens or not all(each.isascii() and each.isprintable() for each in tokens):
        raise ValueError("a token is one line of ASCII characters")


class ReadAgain(Generic[Line]):
    """A file of tokens, parsed by `read`, and again when it is replaced."""

    def __init__(self, path: str, read: Callable[[str], tuple[Line, ...]]) -> None:
        """Reads the file. Raises as `read`, ValueError if it cannot be used."""
        self._path = path
        self._read = read
        self._looked_at = self._look()
        self._lines = read(path)

    @property
    def lines(self) -> tuple[Line, ...]:
        """The current tokens; the last usable ones while the file is unusable."""
        looked = self._look()
        if looked != self._looked_at:
            self._looked_at = looked
            try:
                self._lines = self._read(self._path)
                _log.info("tokens were replaced", file=self._path, tokens=len(self._lines))
            except ValueError as error:
                _log.warning("new tokens cannot be used; the old ones stay", cause=str(error))
        return self._lines

    def _look(self) -> Seen:
        try:
            return look_at(self._path)
        except OSError:
            return ()


class TokenFile(ReadAgain[str]):
    """A file that holds bearer tokens."""

    def __init__(self, path: str) -> None:
        """Reads the file. Raises as `read_tokens`."""
        super().__init__(path, lambda file: read_tokens("", file))

    @property
    def tokens(self) -> tuple[str, ...]:
        """The current tokens."""
        return self.lines

    @property
    def token(self) -> str:
        """The one to send."""
        return self.tokens[0]


class AcceptedTokens:
    """The tokens that callers must send; if there are none, all callers are admitted."""

    def __init__(self, token: str = "", file: str = "") -> None:
        """Raises as `read_tokens`."""
        self._given = read_tokens(token, "")
        self._file = TokenFile(file) if file else None

    @property
    def tokens(self) -> tuple[str, ...]:
        """As they are now."""
        return self._file.tokens if self._file is not None else self._given

    def admit(self, token: bytes) -> bool:
        """Whether a token is accepted. The time that this takes reveals nothing about tokens."""
        tokens = self.tokens
        return not tokens or bool(sum(hmac.compare_digest(token, each.encode()) for each in tokens))
