"""Certificates that are replaced under a server."""

from __future__ import annotations

from pathlib import Path

import pytest
import trustme

from common.rpc.tls_files import TlsFiles


class Files:
    """A certificate and its key as files, which an authority writes again."""

    def __init__(self, folder: Path) -> None:
        self.cert, self.key = folder / "cert.pem", folder / "key.pem"
        self._authority = trustme.CA()
        self.write()

    def write(self, *, with_key: bool = True) -> None:
        issued = self._authority.issue_cert("localhost")
        self.cert.write_bytes(issued.cert_chain_pems[0].bytes())
        if with_key:
            issued.private_key_pem.write_to_path(str(self.key))


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def test_new_files_are_taken_once(files: Files) -> None:
    tls = TlsFiles(str(files.cert), str(files.key))
    assert tls.read().cert == files.cert.read_bytes()
    assert tls.changed() is None
    files.write()
    certificates = tls.changed()
    assert certificates is not None
    assert (certificates.cert, certificates.key, certificates.roots) == (
        files.cert.read_bytes(),
        files.key.read_bytes(),
        None,
    )
    assert tls.changed() is None


def test_a_certificate_without_its_key_waits_for_it(files: Files) -> None:
    tls = TlsFiles(str(files.cert), str(files.key))
    tls.read()
    files.write(with_key=False)
    assert tls.changed() is None
    files.write()
    assert tls.changed() is not None


def test_files_that_are_gone_change_nothing(files: Files) -> None:
    tls = TlsFiles(str(files.cert), str(files.key), str(files.cert))
    assert tls.read().roots == files.cert.read_bytes()
    files.key.unlink()
    assert tls.changed() is None
    files.write()
    assert tls.changed() is not None


def test_roots_without_a_certificate_are_looked_at_too(files: Files) -> None:
    tls = TlsFiles("", "", str(files.cert), options=("certificate", "key", "roots"))
    assert tls.read().cert == b""
    files.cert.write_text("no certificate")
    assert tls.changed() is None
    files.write()
    changed = tls.changed()
    assert changed is not None
    assert changed.roots == files.cert.read_bytes()
