"""Certificates that are replaced under a server."""

from __future__ import annotations

from pathlib import Path

import pytest
import trustme

from common.grpc_channel import ChannelSecurity
from common.grpc_server import read_token
from common.tls_files import TlsFiles, TokenFile


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


def test_a_token_is_the_one_that_is_in_the_file_now(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("first\n")
    file = TokenFile(str(path), lambda: read_token("", str(path)))
    security = ChannelSecurity(token_file=file)
    assert security.metadata == (("authorization", "Bearer first"),)
    path.write_text("the second\n")
    assert security.metadata == (("authorization", "Bearer the second"),)
    path.write_text("")
    assert file.token == "the second"
    path.unlink()
    assert file.token == "the second"
    path.write_text("third, again\n")
    assert file.token == "third, again"


def test_a_token_that_is_none_is_refused_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "token"
    with pytest.raises(ValueError, match="cannot be read as a token"):
        TokenFile(str(path), lambda: read_token("", str(path)))
