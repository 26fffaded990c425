"""Reasoning as callers keep it and send it back without reading it, in the place that OpenAI has for an encrypted form.
Nothing is encrypted here: callers may read what the model says."""

from __future__ import annotations

import base64
import binascii
from typing import Final

from pydantic_core import PydanticCustomError

_MARK: Final = "unencrypted:"


def sealed(text: str) -> str:
    """A text in that form.

    >>> sealed("Hm."), opened(sealed("Hm."))
    ('unencrypted:SG0u', 'Hm.')
    """
    return _MARK + base64.b64encode(text.encode()).decode()


def opened(given: str) -> str:
    """The text. Raises PydanticCustomError for one that another server has sealed."""
    mark, _, rest = given.partition(":")
    try:
        if f"{mark}:" != _MARK:
            raise ValueError
        return base64.b64decode(rest, validate=True).decode()
    except (binascii.Error, ValueError):
        raise PydanticCustomError("value_error", "this is not what an answer of this gateway had here") from None
