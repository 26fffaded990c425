"""Certificates and keys as PEM files. They are checked before gRPC sees them, whose errors say little."""

from __future__ import annotations

import ssl
from pathlib import Path

_CERTIFICATE, _KEY, _ENCRYPTED = b"-----BEGIN CERTIFICATE-----", b"PRIVATE KEY-----", b"ENCRYPTED"


def certificates(path: str | Path, option: str) -> bytes:
    """A file with at least one certificate. Raises OSError, or ValueError, which names `option`."""
    content = _read(path, option)
    if _CERTIFICATE not in content:
        instead = "a private key" if _KEY in content else "no PEM certificate"
        raise ValueError(f"{option} {path} must hold certificates, and holds {instead}")
    return content


def private_key(path: str | Path, option: str) -> bytes:
    """A file with a private key that no password protects. Raises as `certificates`."""
    content = _read(path, option)
    if _KEY not in content:
        instead = "a certificate" if _CERTIFICATE in content else "no PEM key"
        raise ValueError(f"{option} {path} must hold a private key, and holds {instead}")
    if _ENCRYPTED in content:
        raise ValueError(f"{option} {path} is protected by a password: give a key without one")
    return content


def check_pair(cert: str | Path, key: str | Path, cert_option: str, key_option: str) -> None:
    """Raises ValueError if a key does not belong to the first certificate in a file."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(cert, key)
    except ssl.SSLError as error:
        said = "are not of one pair" if error.reason == "KEY_VALUES_MISMATCH" else "cannot be used"
        raise ValueError(f"{cert_option} {cert} and {key_option} {key} {said}") from None


def check_files(
    *, ca: tuple[str, str] = ("", ""), cert: tuple[str, str] = ("", ""), key: tuple[str, str] = ("", "")
) -> None:
    """Raises ValueError, with the option and what to do, if a file cannot be used for TLS. Each is an option and its
    file; options without a file are skipped."""
    try:
        if ca[1]:
            certificates(ca[1], ca[0])
        if cert[1]:
            certificates(cert[1], cert[0])
        if key[1]:
            private_key(key[1], key[0])
    except OSError as error:
        raise ValueError(f"{error.filename} cannot be read: {error.strerror}") from None
    if cert[1] and key[1]:
        check_pair(cert[1], key[1], cert[0], key[0])


def _read(path: str | Path, option: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        error.filename = f"{option} {path}"  # it is shown with the reason
        raise
