"""A real HTTP server for tests of fetching, and the ways in which a media host can misbehave."""

from __future__ import annotations

import contextlib
import ssl
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PIECE = b"\xff" * 65536


@dataclass
class MediaHost:
    """What it serves by path, and how often, with which headers, it was asked."""

    port: int = 0
    files: dict[str, bytes] = field(default_factory=dict)
    redirects: dict[str, str] = field(default_factory=dict)
    asked: Counter[str] = field(default_factory=Counter)
    headers: dict[str, dict[str, str]] = field(default_factory=dict)
    sent: int = 0
    scheme: str = "http"
    held: threading.Event = field(default_factory=threading.Event)
    """What `/held` waits for before it sends its last byte."""

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"{self.scheme}://{host}:{self.port}{path}"

    @property
    def authority(self) -> str:
        """Its entry in a host list."""
        return f"127.0.0.1:{self.port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    host: MediaHost

    def do_GET(self) -> None:
        host, path = self.host, self.path.partition("?")[0]
        host.asked[path] += 1
        host.headers[path] = {name.lower(): value for name, value in self.headers.items()}
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            if path in host.files:
                self._answer(200, host.files[path])
            elif path in host.redirects:
                self._answer(302, b"", Location=host.redirects[path])
            elif path.startswith("/status/"):
                self._answer(int(path.removeprefix("/status/")), b"no")
            else:
                getattr(self, f"_{path.removeprefix('/')}")()

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        self._head(status, **{"Content-Length": str(len(body)), **headers})
        self.wfile.write(body)
        self.host.sent += len(body)

    def _head(self, status: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Set-Cookie": "who=you", **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def _held(self) -> None:
        """Everything but the last byte, until the test lets go."""
        body = self.host.files["/good"]
        self._head(200, Content_Length=str(len(body)))
        self.wfile.write(body[:-1])
        self.wfile.flush()
        self.host.held.wait()
        self.wfile.write(body[-1:])

    def _silent(self) -> None:
        """Nothing at all."""
        self.host.held.wait()

    def _endless(self) -> None:
        self._head(200, Connection="close")
        while True:
            self.wfile.write(PIECE)
            self.host.sent += len(PIECE)

    def _huge(self) -> None:
        """Claims more than it has."""
        self._head(200, Content_Length=str(1 << 40))
        self.wfile.write(PIECE)

    def _truncated(self) -> None:
        self._head(200, Content_Length="1000")
        self.wfile.write(b"half")
        self.close_connection = True

    def _packed(self) -> None:
        self._answer(200, b"\x1f\x8b", Content_Encoding="gzip")

    def _chunked(self) -> None:
        body = self.host.files["/good"]
        self._head(200, Transfer_Encoding="chunked")
        for start in range(0, len(body), 1000):
            piece = body[start : start + 1000]
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        self.wfile.write(b"0\r\n\r\n")

    def _nonsense(self) -> None:
        self.wfile.write(b"this is not HTTP\r\n\r\n")
        self.close_connection = True

    def log_message(self, *_: object) -> None: ...


class _Server(ThreadingHTTPServer):
    daemon_threads = False
    block_on_close = True

    def handle_error(self, *_: object) -> None: ...


@contextlib.contextmanager
def media_host(tls: ssl.SSLContext | None = None, **files: bytes) -> Iterator[MediaHost]:
    """A server on a free port; `good=data` is served at `/good`. At the end no thread of it is left."""
    host = MediaHost(files={f"/{name}": data for name, data in files.items()}, scheme="https" if tls else "http")
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"host": host}))
    host.port = server.server_address[1]
    if tls:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield host
    finally:
        host.held.set()
        server.shutdown()
        server.server_close()
        thread.join()
