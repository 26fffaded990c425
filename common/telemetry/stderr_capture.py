"""What others write to standard error, as lines of our log: C libraries, Python's warnings, its `logging`. A process
that has called `start` hands gRPC's core and its like a pipe, and reads that. Python's own `sys.stderr` stays what it
was, for last words; so does what children are given (`descriptor`): none waits for its parent to read."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading

from common.telemetry import log

_STDERR = 2
_LAST_SECONDS = 1.0
_LONGEST = 4096
_LEVELS = {"I": "info", "W": "warning", "E": "error", "F": "error"}
"""How lines of gRPC's core begin."""


class _State:
    """Where the true standard error is."""

    descriptor = _STDERR


def descriptor() -> int:
    """The standard error that children are to be given."""
    return _State.descriptor


def start() -> None:
    """For this process, from now on, unless people read its log, on a terminal. After `log.configure`."""
    if sys.stderr is None or sys.stderr.isatty() or _State.descriptor != _STDERR:
        return
    try:
        kept = os.dup(_STDERR)
    except OSError:  # there is none
        return
    read, write = os.pipe()
    sys.stderr.flush()
    sys.stderr = os.fdopen(kept, "w", buffering=1, errors="backslashreplace", closefd=False)
    _State.descriptor = kept
    log.write_to(sys.stderr)
    os.dup2(write, _STDERR)
    os.close(write)
    reader = threading.Thread(target=_read, args=(read,), name="foreign log", daemon=True)
    reader.start()
    atexit.register(_leave, kept, reader)
    logging.getLogger().addHandler(_Handler())
    logging.captureWarnings(capture=True)


def _leave(kept: int, reader: threading.Thread) -> None:
    """Lets what is still in the pipe be read."""
    os.dup2(kept, _STDERR)
    reader.join(_LAST_SECONDS)


def _read(pipe: int) -> None:
    with os.fdopen(pipe, "rb") as lines:
        while line := lines.readline(_LONGEST):
            if text := line.decode(errors="backslashreplace").strip():
                said = log.get("native")
                getattr(said, _LEVELS.get(text[0], "warning") if text[1:5].isdecimal() else "warning")(text)


class _Handler(logging.Handler):
    """Hands records of `logging` on."""

    def emit(self, record: logging.LogRecord) -> None:
        """One line for a record, with its traceback where it has one."""
        level = "error" if record.levelno >= logging.ERROR else "warning"
        getattr(log.get(record.name), level)(record.getMessage(), exc_info=record.exc_info)
