"""`GET /`: the page to try it on, and its files at `/page/NAME`. They are the same for everybody, and need no token."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from common.errors import NotFound

_FOLDER: Final = Path(__file__).resolve().parent.parent / "page"
_KINDS: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' blob:; "
    "media-src blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
"""The page loads only files from here, shows its user's files, and never renders text as markup."""
_HEADERS: Final = {
    "cache-control": "no-cache",  # kept, and asked about each time: another release has other files
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(self), microphone=(self), geolocation=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    kind: str
    tag: str


class Page:
    """The page's files, read once: requested names are looked up among them, so no path leads elsewhere."""

    def __init__(self) -> None:
        self._files = {path.name: _read(path) for path in _FOLDER.iterdir() if path.suffix in _KINDS}

    @property
    def routes(self) -> list[Route]:
        """The paths of these files."""
        return [
            Route("/", self.index, methods=["GET"]),
            Route("/page/{name}", self.file, methods=["GET"]),
        ]

    async def index(self, request: Request) -> Response:
        """The page itself."""
        return self._answer(request, "index.html")

    async def file(self, request: Request) -> Response:
        """One of its files. Raises NotFound."""
        return self._answer(request, request.path_params["name"])

    def _answer(self, request: Request, name: str) -> Response:
        if (file := self._files.get(name)) is None:
            raise NotFound("there is nothing at this path", reason="NOT_FOUND")
        headers = {**_HEADERS, "etag": file.tag}
        if file.tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(file.content, headers={**headers, "content-type": file.kind})


def _read(path: Path) -> _File:
    content = path.read_bytes()
    return _File(content, _KINDS[path.suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"')
