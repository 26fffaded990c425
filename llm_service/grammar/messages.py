"""Messages between the front and a process that compiles structures."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


class Vocabulary(msgspec.Struct, frozen=True, tag=True):
    """First of all: the checkpoint's folder, its number of words, and the tokens that end an answer."""

    model: str
    size: int
    ends: list[int]


@dataclass(frozen=True, slots=True)
class StructureLimits:
    """The limits of a structure. `multiple` and `repeats` bound the numbers of `foresight.Demand`, `depth` the nesting
    of groups, `compiled_bytes` the size of its compiled form."""

    multiple: int
    repeats: int
    depth: int
    compiled_bytes: int


class Compile(msgspec.Struct, frozen=True, tag=True):
    """Asks to check this structure (`request.Structure`), within so many seconds of processor time and the limits."""

    kind: str
    text: str
    seconds: float
    limits: StructureLimits


class CompileStarted(msgspec.Struct, frozen=True, tag=True):
    """The process with this id is at it."""

    pid: int


class Compiled(msgspec.Struct, frozen=True, tag=True):
    """The structure in llguidance's own form, and the bytes of memory that its compiled form holds."""

    grammar: str
    bytes: int


class Refused(msgspec.Struct, frozen=True, tag=True):
    """It makes no sense, allows nothing, or is `too_large`; `why` may be shown to the caller."""

    why: str
    too_large: bool = False


class TooSlow(msgspec.Struct, frozen=True, tag=True):
    """It has had all of its processor time."""


class Broke(msgspec.Struct, frozen=True, tag=True):
    """The process that was at it has crashed over it, or wanted more memory than it may have."""


class Lost(msgspec.Struct, frozen=True, tag=True):
    """The process was killed from outside, or none could be started: the structure is not at fault, and was not even
    tried unless it had `begun`."""

    begun: bool = True


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The vocabulary is read: structures can come."""


Answer = Compiled | Refused
Outcome = Compiled | Refused | TooSlow | Broke | Lost
ToCompiler = Vocabulary | Compile
FromCompiler = Ready | CompileStarted | Outcome
