"""Forms with a file, `multipart/form-data`, parsed in memory into their type."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from typing import Final, TypeVar

from pydantic import BaseModel, ValidationError
from python_multipart.multipart import parse_options_header
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from common.errors import InvalidInput
from gateway.errors import from_validation
from gateway.request_context import RequestContext

_MOST_FIELDS: Final = 64
_LONGEST_FIELD: Final = 1 << 20
"""Bytes of a field that is no file."""
_CHARSETS: Final = (b"utf-8", b"utf8", b"us-ascii", b"iso-8859-1")
"""Allowed charsets: some other decoders of Python take half a minute for a megabyte."""
_PIECE: Final = 256 << 10
"""Bytes parsed at a time, after which other requests get a turn."""

Fields = TypeVar("Fields", bound=BaseModel)


class _InMemory(MultiPartParser):
    """The body is in memory, within its bounds: its file need not go to a disk."""

    spool_max_size = sys.maxsize


async def read_form(context: RequestContext, headers: Headers, kind: type[Fields], file: str) -> tuple[Fields, bytes]:
    """A form's fields, and the content of the file with this name. The values of a list, `name[]`, are joined by
    commas. Raises InvalidInput, which names the field."""
    body, context.body = context.body, b""
    kind_of_body, parameters = parse_options_header(headers.get("content-type", ""))
    if kind_of_body != b"multipart/form-data":
        raise InvalidInput("the body is not a form: its content type is not multipart/form-data", reason="BAD_FORM")
    if parameters.get(b"charset", _CHARSETS[0]).lower() not in _CHARSETS:
        raise InvalidInput("the form cannot be read: its charset is not UTF-8", reason="BAD_FORM")
    try:
        parser = _InMemory(headers, _pieces(body), max_files=1, max_fields=_MOST_FIELDS, max_part_size=_LONGEST_FIELD)
        form = await parser.parse()
    except MultiPartException as error:
        raise InvalidInput(f"the form cannot be read: {error.message}", reason="BAD_FORM") from None
    given = form.multi_items()
    texts: dict[str, list[str]] = {}
    content: bytes | None = None
    for name, value in given:
        if isinstance(value, UploadFile) == (name != file):
            raise InvalidInput(f"{file} must be a file, and no other field may be", reason="BAD_FIELD", field=name)
        if isinstance(value, UploadFile):
            content = await value.read()
            await value.close()
        else:
            texts.setdefault(name, []).append(value)
    if content is None:
        raise InvalidInput("the file is missing", reason="BAD_FIELD", field=file)
    if twice := next((name for name, values in texts.items() if len(values) > 1 and not _is_list(name)), None):
        raise InvalidInput("this field is given more than once", reason="BAD_FIELD", field=twice)
    values = {name: ",".join(each) for name, each in texts.items() if each != [""]}
    try:
        asked = kind.model_validate_strings(values, strict=False)
    except ValidationError as error:
        raise from_validation(error) from None
    context.take_name(asked)
    return asked, content


def _is_list(name: str) -> bool:
    return name.endswith("[]")


async def _pieces(body: bytes) -> AsyncGenerator[bytes, None]:
    for begin in range(0, len(body), _PIECE):
        yield body[begin : begin + _PIECE]
        await asyncio.sleep(0)
