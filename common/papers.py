"""The PEM files that a service is started with, looked at before anything is served or connected to."""

from __future__ import annotations

from twinlens import credentials


def check(*, ca: tuple[str, str] = ("", ""), cert: tuple[str, str] = ("", ""), key: tuple[str, str] = ("", "")) -> None:
    """Raises ValueError, with the option and what to do, where a file cannot be used for TLS. Each is an option and its
    file; one without a file is left out."""
    try:
        if ca[1]:
            credentials.certificates(ca[1], ca[0])
        if cert[1]:
            credentials.certificates(cert[1], cert[0])
        if key[1]:
            credentials.private_key(key[1], key[0])
    except OSError as error:
        raise ValueError(f"{error.filename} cannot be read: {error.strerror}") from None
    if cert[1] and key[1]:
        credentials.check_pair(cert[1], key[1], cert[0], key[0])
