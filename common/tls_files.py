"""Certificates that are replaced while a server runs: cert-manager, for one, writes new files long before old ones end.

Files are looked at, not watched: whoever needs them asks whether they have changed. What cannot be used, such as a
certificate whose key has not been written yet, is left alone, and looked at again next time.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from common import log
from twinlens import credentials

_log = log.get("tls")

_Seen = tuple[tuple[int, int, int], ...]
"""Of each file its inode, its length in bytes, and when it was written, in nanoseconds."""


@dataclass(frozen=True, slots=True)
class Certificates:
    """A certificate chain, its private key, and the roots that callers' certificates must come from, or none; PEM."""

    cert: bytes
    key: bytes
    roots: bytes | None


class TlsFiles:
    """The files that `--tls-cert`, `--tls-key` and `--tls-client-ca` name."""

    def __init__(self, cert: str, key: str, ca: str = "") -> None:
        """Reads nothing yet. `ca` "" means that callers need no certificate."""
        self._cert, self._key, self._ca = cert, key, ca
        self._used: _Seen = ()
        self._refused: _Seen = ()

    def read(self) -> Certificates:
        """What is in the files. Raises OSError or ValueError where it cannot be used."""
        seen = self._look()
        credentials.check_files(
            ca=("--tls-client-ca", self._ca), cert=("--tls-cert", self._cert), key=("--tls-key", self._key)
        )
        roots = Path(self._ca).read_bytes() if self._ca else None
        certificates = Certificates(Path(self._cert).read_bytes(), Path(self._key).read_bytes(), roots)
        self._used = seen
        return certificates

    def changed(self) -> Certificates | None:
        """What is in the files, where that is not what was read last and can be used; logged. It raises nothing."""
        try:
            seen = self._look()
            if seen == self._used:
                return None
            certificates = self.read()
        except (OSError, ValueError) as error:
            self._refuse(str(error))
            return None
        _log.info("certificates were replaced", cert=self._cert)
        return certificates

    def _look(self) -> _Seen:
        files = [Path(name).stat() for name in (self._cert, self._key, self._ca) if name]
        return tuple((file.st_ino, file.st_size, file.st_mtime_ns) for file in files)

    def _refuse(self, cause: str) -> None:
        """Says it once for each state of the files."""
        try:
            seen = self._look()
        except OSError:
            seen = ((0, 0, 0),)
        if seen != self._refused:
            self._refused = seen
            _log.warning("certificates were replaced by what cannot be used; the old ones stay", cause=cause)
