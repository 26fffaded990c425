"""`data:` addresses (RFC 2397): the content is in the address itself, so nothing is fetched."""

from __future__ import annotations

import base64
import binascii

from common.errors import InvalidInput

_SCHEME = "data:"
_LONGEST_HEAD = 1024
"""Characters before the comma. Megabytes of parameters would become lists of a hundred times their size."""
_LISTED = "video/jpeg"
"""The type of a list: pictures in base64, separated by commas, as vLLM's clients send a video's frames. It is decoded
to the concatenated pictures."""
_MOST_PIECES = 10_000
_ESCAPED = {"%2B": "+", "%2b": "+", "%2F": "/", "%2f": "/", "%3D": "=", "%3d": "="}
_ESCAPED |= {"%0A": "", "%0a": "", "%0D": "", "%0d": "", "%20": "", "%09": ""}
"""Characters of base64 that some clients escape; unescaping them one by one takes milliseconds for any URL."""
_URL_SAFE = bytes.maketrans(b"-_", b"+/")
_SPACES = b" \t\r\n"


def is_data(url: str) -> bool:
    """The address holds its content."""
    return url[: len(_SCHEME)].lower() == _SCHEME


def decode(url: str, field: str) -> tuple[bytes, str]:
    """The content and the MIME type, empty where none is stated. Takes milliseconds for megabytes.

    A list of pictures (`video/jpeg`) comes as one behind the other. Either alphabet of RFC 4648 is taken, and line ends
    as e-mail has them. Raises InvalidInput for one that is not base64 all through.

    >>> decode("data:image/gif;base64,R0lG", "url"), decode("data:;base64,_-\\n8=", "url")
    ((b'GIF', 'image/gif'), (b'\\xff\\xef', ''))
    >>> decode("data:video/jpeg;base64,YQ==,Yg==", "url")
    (b'ab', 'video/jpeg')
    """
    comma = url.find(",", 0, len(_SCHEME) + _LONGEST_HEAD)
    mime_type, *parameters = url[len(_SCHEME) : max(comma, 0)].split(";")
    body = url[comma + 1 :]
    if mime_type.strip().lower() == _LISTED:
        return b"".join(decode_body(each, field) for each in _pieces(body, field)), mime_type
    if comma < 0 or "base64" not in (each.strip().lower() for each in parameters):
        raise _bad("the data address does not say ;base64 before its comma", field)
    return decode_body(body, field), mime_type


def _pieces(body: str, field: str) -> list[str]:
    """Of a list. Raises InvalidInput for a flood of them."""
    if body.count(",") >= _MOST_PIECES:
        raise _bad(f"the data address lists more than {_MOST_PIECES} pictures", field)
    return body.split(",")


def decode_body(body: str, field: str) -> bytes:
    """The content of what follows the comma. Raises InvalidInput likewise."""
    if "%" in body:
        for escaped, sign in _ESCAPED.items():
            body = body.replace(escaped, sign)
    try:
        return _decoded(body)
    except ValueError:
        raise _bad("the part after the comma of the data address is not base64", field) from None


def _decoded(body: str) -> bytes:
    try:
        return base64.b64decode(body, validate=True)
    except binascii.Error:
        return base64.b64decode(body.encode("ascii").translate(_URL_SAFE, _SPACES), validate=True)


def _bad(why: str, field: str) -> InvalidInput:
    return InvalidInput(why, reason="BAD_BASE64", field=field)
