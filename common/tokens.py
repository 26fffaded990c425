"""Bearer tokens, in options or in files, one a line; files are read again when they are replaced. Who is called takes
any of them, and who calls sends the first: so one token follows another with no moment in which both sides differ."""

from __future__ import annotations

import hmac
from pathlib import Path

from common import log
from common.tls_files import Seen, look_at

_log = log.get("tokens")


def read_tokens(token: str, file: str) -> tuple[str, ...]:
    """The token that is given directly, or those in a file, without what stands around them; none where neither is
    given.

    Raises ValueError for a file that cannot be read, or holds none, and for what no header could carry.
    """
    if not (token or file):
        return ()
    try:
        lines = Path(file).read_text("utf-8").splitlines() if file else [token]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read as tokens") from error
    tokens = tuple(stripped for line in lines if (stripped := line.strip()))
    if file and not tokens:
        raise ValueError(f"{file} holds no token")
    if not tokens or not all(each.isascii() and each.isprintable() for each in tokens):
        raise ValueError("a token is one line of ASCII characters")
    return tokens


class TokenFile:
    """A file that holds bearer tokens."""

    def __init__(self, path: str) -> None:
        """Reads the file. Raises as `read_tokens`."""
        self._path = path
        self._looked_at = self._look()
        self._tokens = read_tokens("", path)

    @property
    def tokens(self) -> tuple[str, ...]:
        """The tokens that are there now; while there are none that can be used, the last ones."""
        looked = self._look()
        if looked != self._looked_at:
            self._looked_at = looked
            try:
                self._tokens = read_tokens("", self._path)
                _log.info("tokens were replaced", file=self._path, tokens=len(self._tokens))
            except ValueError as error:
                _log.warning("tokens were replaced by what cannot be used; the old ones stay", cause=str(error))
        return self._tokens

    @property
    def token(self) -> str:
        """The one to send."""
        return self.tokens[0]

    def _look(self) -> Seen:
        try:
            return look_at(self._path)
        except OSError:
            return ()


class AcceptedTokens:
    """Those of which callers must send one; where there are none, every caller is let in."""

    def __init__(self, token: str = "", file: str = "") -> None:
        """Raises as `read_tokens`."""
        self._given = read_tokens(token, "")
        self._file = TokenFile(file) if file else None

    @property
    def tokens(self) -> tuple[str, ...]:
        """As they are now."""
        return self._file.tokens if self._file is not None else self._given

    def admit(self, token: bytes) -> bool:
        """Whether whoever sends this is let in. How long the answer takes says nothing of any token."""
        tokens = self.tokens
        return not tokens or bool(sum(hmac.compare_digest(token, each.encode()) for each in tokens))
