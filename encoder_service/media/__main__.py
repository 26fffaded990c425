"""The decode process: the only place where untrusted bytes are parsed. It may be killed at any time.

It takes one job at a time from its parent. Known errors of decoders become `Refused`; anything else ends the process,
and the parent starts a new one.
"""

from __future__ import annotations

import importlib
import os
import resource
import struct
import sys
import warnings
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, cast

import numpy as np

from common.process import seccomp
from common.process.parent_link import ParentLink, die_with_parent, leave_signals_to_parent
from common.shm.arena import Range, SharedBuffer
from encoder_service.item import Inspection
from encoder_service.media.complexity import TooComplex, UnusualKind
from encoder_service.media.frame_resizing import decode_resized
from encoder_service.media.messages import (
    Decode,
    Decoded,
    DecoderSettings,
    Decoding,
    FromDecoder,
    Inspect,
    Inspected,
    Ready,
    Refused,
    ToDecoder,
)

_UNREADABLE = (
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    RuntimeError,
    TypeError,
    KeyError,
    IndexError,
    MemoryError,
    OverflowError,
    ZeroDivisionError,
    struct.error,
    zlib.error,
)
"""What Pillow, decord and PyAV raise for broken input."""

_STANDARD_STREAMS = 3
"""Descriptors that are always open; with this limit no other can be opened."""


def main(link_fd: int, staging_fd: int) -> None:
    """Serves jobs until the parent is gone."""
    die_with_parent()
    leave_signals_to_parent()
    warnings.simplefilter("ignore")  # Pillow warns of broken metadata, which nobody would read
    link: ParentLink[Any] = ParentLink(link_fd, ToDecoder)
    settings = link.receive()
    assert isinstance(settings, DecoderSettings)
    staging = SharedBuffer.attach(staging_fd, settings.staging_bytes)
    _hush()
    desk = Desk(staging, settings)
    _restrict(settings.staging_bytes + settings.memory_bytes)  # from here on, no module can be imported
    link.send(Ready(unconfined=seccomp.confine()))
    while True:
        try:
            job = link.receive()
        except EOFError:
            return
        for answer in desk.answers(job):
            link.send(answer)


class OpenFile(Protocol):
    """A file of some modality. Its methods raise one of `_UNREADABLE` if it cannot be read, or TooComplex, or
    UnusualKind."""

    def __init__(self, data: bytes, settings: DecoderSettings) -> None: ...

    @staticmethod
    def prepare() -> None:
        """Imports everything needed to read such files, since no module can be imported later."""
        ...

    def inspect(self) -> Inspection:
        """What its header says."""
        ...

    def decode(self, frames: Sequence[int], out: np.ndarray) -> Iterator[int]:
        """Writes frames by number into `out`, [len(frames), height, width, depth] uint8; yields the number written so
        far."""
        ...


class SoundingFile(OpenFile, Protocol):
    """A file that also has sound, [n] float32 at the bounds' rate."""

    samples: np.ndarray


class Desk:
    """Does one job after the other. Of files that may stay open, the last one does, until it is decoded."""

    def __init__(self, staging: SharedBuffer, settings: DecoderSettings) -> None:
        self._staging = staging
        self._settings = settings
        self._decoders = {name: _decoder(name) for name in settings.decoders}
        self._open: tuple[bytes, OpenFile] | None = None

    def answers(self, job: Inspect | Decode) -> Iterator[FromDecoder]:
        """The answers to a job; the last one ends it."""
        try:
            if isinstance(job, Inspect):
                yield self._inspect(job)
            else:
                yield from self._decode(job)
        except _UNREADABLE as error:
            self._open = None
            why, kinds = f"{type(error).__name__}: {error}", (TooComplex, UnusualKind)
            too_complex, unsupported = (isinstance(error, kind) for kind in kinds)
            yield Refused(why, too_complex=too_complex, unsupported=unsupported)

    def _inspect(self, job: Inspect) -> Inspected:
        file = self._file(job)
        seen = file.inspect()
        if job.key:
            self._open = (job.key, file)
        return Inspected(seen)

    def _decode(self, job: Decode) -> Iterator[FromDecoder]:
        shape = (len(job.frames), job.height, job.width, job.depth)
        file, pixels = self._file(job), job.pixels
        if job.samples:
            sound = np.frombuffer(self._staging.view, np.float32, job.samples, pixels)
            sound[:] = cast("SoundingFile", file).samples
            pixels += sound.nbytes
        out = np.frombuffer(self._staging.view, np.uint8, int(np.prod(shape)), pixels).reshape(shape)
        frames = file.decode(job.frames, out) if job.whole is None else decode_resized(file, job.frames, job.whole, out)
        yield from map(Decoding, frames)
        yield Decoded()

    def _file(self, job: Inspect | Decode) -> OpenFile:
        if job.key:
            kept, self._open = self._open, None
            if kept and kept[0] == job.key:
                return kept[1]
        data = bytes(self._staging.slice(Range(job.offset, job.size)))
        return self._decoders[job.decoder](data, self._settings)


def _decoder(name: str) -> type[OpenFile]:
    """The class that "module:Class" names, ready to read files."""
    module, _, attribute = name.partition(":")
    found: type[OpenFile] = getattr(importlib.import_module(module), attribute)
    found.prepare()
    return found


def _hush() -> None:
    """Decoders' libraries print to descriptor 2; it is closed to them, and kept for our own messages."""
    sys.stderr = os.fdopen(os.dup(2), "w")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)


def _restrict(memory_bytes: int) -> None:
    """Forbids core dumps, opening files or sockets, and writing files, and bounds memory, beyond which decoders raise
    MemoryError or die. Decoders' libraries know formats that name files and addresses, and would open these. What code
    that has taken over the process could undo, by closing a stream, `seccomp` prevents."""
    for kind, limit in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, _STANDARD_STREAMS),
        (resource.RLIMIT_AS, memory_bytes),
    ):
        resource.setrlimit(kind, (limit, limit))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
