"""Proxies before gateways, with the very configurations that docs/operations/proxies.md shows."""

from __future__ import annotations

import re
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme

from tests.launch import ROOT
from tests.ports import held_address
from tests.waiting import until

PAGE = ROOT / "docs/operations/proxies.md"
_AROUND_NGINX = """
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/log;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/bodies;
    proxy_temp_path {folder}/answers;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
{shown}
}}
"""


@dataclass(frozen=True, slots=True)
class Proxy:
    """Where a proxy listens, and whom to trust there."""

    port: int
    trust: ssl.SSLContext


def shown(language: str) -> str:
    """The configuration of gateways' proxies in this language."""
    section = PAGE.read_text(encoding="utf-8").partition("\n## Before the gateways\n")[2].partition("\n## ")[0]
    (block,) = re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)
    return str(block)


def program_of(kind: str) -> str:
    """nginx's or haproxy's program; without it, the test is skipped."""
    program = shutil.which(kind, path="/usr/local/sbin:/usr/sbin:/usr/local/bin:/usr/bin")
    if program is None:
        pytest.skip(f"{kind} is not installed here")
    return program


@contextmanager
def proxy(kind: str, program: str, gateways: Sequence[str], folder: Path) -> Iterator[Proxy]:
    """nginx or haproxy, by its program, before two gateways, for the length of the block."""
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    for name in ("gateway.pem", "gateway.key"):
        issued.private_key_and_cert_chain_pem.write_to_path(str(folder / name))
    port = int(held_address().rpartition(":")[2])
    content = shown(kind).replace("/tls/", f"{folder}/")
    for number, address in enumerate(gateways):
        assert f"gateway-{number}.internal:8000" in content
        content = content.replace(f"gateway-{number}.internal:8000", address)
    content, listens = re.subn(
        r"^( +listen | +bind ):?443 ssl", rf"\g<1>127.0.0.1:{port} ssl", content, flags=re.MULTILINE
    )
    assert listens == 1
    file = folder / f"{kind}.conf"
    file.write_text(_AROUND_NGINX.format(folder=folder, shown=content) if kind == "nginx" else content)
    flags = ["-p", str(folder), "-c", str(file)] if kind == "nginx" else ["-db", "-f", str(file)]
    log = folder / "output"
    with log.open("wb") as out:
        process = subprocess.Popen([program, *flags], stdout=out, stderr=out)
    try:
        until(lambda: _answers(port, process, log), f"{kind} listens")
        trust = ssl.create_default_context()
        authority.configure_trust(trust)
        yield Proxy(port, trust)
    finally:
        process.terminate()
        process.wait(180)


def _answers(port: int, process: subprocess.Popen[bytes], log: Path) -> bool:
    assert process.poll() is None, log.read_text()
    try:
        socket.create_connection(("127.0.0.1", port), timeout=180).close()
    except ConnectionRefusedError:
        return False
    return True
