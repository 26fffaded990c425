"""Certificates that are replaced while a process runs, as cert-manager does long before old ones expire.

Files are polled. Unusable ones, such as a certificate whose key has not been written yet, are ignored, and checked
again next time.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from common.telemetry import log
from twinlens import credentials

_log = log.get("tls")

Seen = tuple[tuple[int, int, int], ...]
"""Of each file its inode, its length in bytes, and when it was written, in nanoseconds."""


@dataclass(frozen=True, slots=True)
class Certificates:
    """A certificate chain and its private key, empty if none is shown, and the roots that the other side's certificates
    must come from, if any; PEM."""

    cert: bytes
    key: bytes
    roots: bytes | None


class TlsFiles:
    """The files of one side of TLS; for a server those of `--tls-cert`, `--tls-key` and `--tls-client-ca`."""

    def __init__(
        self,
        cert: str,
        key: str,
        ca: str = "",
        *,
        options: tuple[str, str, str] = ("--tls-cert", "--tls-key", "--tls-client-ca"),
    ) -> None:
        """Does not read yet. A name may be "" if there is no such file; `options` are their names in messages."""
        self._cert, self._key, self._ca = cert, key, ca
        self._options = options
        self._used: Seen = ()
        self._refused: Seen = ()

    def read(self) -> Certificates:
        """The content of the files. Raises OSError or ValueError if it cannot be used."""
        seen = self._look()
        options = self._options
        credentials.check_files(ca=(options[2], self._ca), cert=(options[0], self._cert), key=(options[1], self._key))
        cert, key, ca = (Path(name).read_bytes() if name else b"" for name in (self._cert, self._key, self._ca))
        self._used = seen
        return Certificates(cert, key, ca or None)

    def changed(self) -> Certificates | None:
        """The content of the files, if it has changed since it was last read and can be used; logged. Raises
        nothing."""
        try:
            seen = self._look()
            if seen == self._used:
                return None
            certificates = self.read()
        except (OSError, ValueError) as error:
            self._refuse(str(error))
            return None
        _log.info("certificates were replaced", cert=self._cert or self._ca)
        return certificates

    def _look(self) -> Seen:
        return look_at(self._cert, self._key, self._ca)

    def _refuse(self, cause: str) -> None:
        """Says it once for each state of the files."""
        try:
            seen = self._look()
        except OSError:
            seen = ((0, 0, 0),)
        if seen != self._refused:
            self._refused = seen
            _log.warning("new certificates cannot be used; the old ones stay", cause=cause)


def look_at(*names: str) -> Seen:
    """The identity of the files; "" stands for none. Raises OSError if one is missing."""
    files = [Path(name).stat() for name in names if name]
    return tuple((file.st_ino, file.st_size, file.st_mtime_ns) for file in files)
