"""What passes between the front and a process that compiles structures."""

from __future__ import annotations

import msgspec


class Vocabulary(msgspec.Struct, frozen=True, tag=True):
    """First of all: the checkpoint's folder, its number of words, and the tokens that end an answer."""

    model: str
    size: int
    ends: list[int]


class Compile(msgspec.Struct, frozen=True, tag=True):
    """Check this structure; see `request.Structure`."""

    kind: str
    text: str


class Compiled(msgspec.Struct, frozen=True, tag=True):
    """The structure in llguidance's own form."""

    grammar: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """It makes no sense, or allows nothing; `why` may be shown to the caller."""

    why: str


class Prepared(msgspec.Struct, frozen=True, tag=True):
    """The vocabulary is read: structures can come."""


ToCompiler = Vocabulary | Compile
FromCompiler = Prepared | Compiled | Refused
