"""The decode process: the only place where untrusted bytes are parsed. It may be killed at any time.

It takes one job at a time from its parent. What the decoders are known to raise becomes `Refused`; anything else ends
the process, and the parent starts a new one.
"""

from __future__ import annotations

import os
import resource
import signal
import struct
import sys
import warnings
import zlib
from typing import Any

import numpy as np

from common.arena import Range, SharedBuffer
from common.processes import ParentLink, die_with_parent
from encoder_service.media import image, video
from encoder_service.media.messages import (
    Begin,
    Decode,
    Decoded,
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
"""What Pillow and decord raise for broken input."""


def main(link_fd: int, staging_fd: int) -> None:
    """Serves jobs until the parent is gone."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")  # Pillow warns of broken metadata; nobody would read it
    link: ParentLink[Any] = ParentLink(link_fd, ToDecoder)
    begin = link.receive()
    assert isinstance(begin, Begin)
    staging = SharedBuffer.attach(staging_fd, begin.staging_bytes)
    _hush()
    _restrict(begin.staging_bytes + begin.memory_bytes)
    video.prepare()
    link.send(Ready())
    while True:
        try:
            job = link.receive()
        except EOFError:
            return
        link.send(_answer(job, staging, begin.threads))


def _answer(job: Inspect | Decode, staging: SharedBuffer, threads: int) -> FromDecoder:
    try:
        data = bytes(staging.slice(Range(job.offset, job.size)))
        if isinstance(job, Inspect):
            seen = video.inspect(data, threads) if job.video else image.inspect(data)
            return Inspected(seen.width, seen.height, seen.frames, seen.fps)
        shape = (len(job.frames), job.height, job.width, 3)
        out = np.frombuffer(staging.view, np.uint8, int(np.prod(shape)), job.pixels).reshape(shape)
        if job.video:
            video.decode(data, job.frames, out, threads)
        else:
            image.decode(data, out)
    except _UNREADABLE as error:
        return Refused(f"{type(error).__name__}: {error}")
    return Decoded()


def _hush() -> None:
    """The decoders' libraries print what they were given on descriptor 2; only our own words keep their way there."""
    sys.stderr = os.fdopen(os.dup(2), "w")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)


def _restrict(memory_bytes: int) -> None:
    """No core dumps, no files written, and a ceiling on memory, past which decoders raise MemoryError or die."""
    for kind, limit in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_AS, memory_bytes),
    ):
        resource.setrlimit(kind, (limit, limit))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
