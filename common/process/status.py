"""How a process of this host is, as /proc tells it, and how it ended, as its exit status tells it."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

_FROM_OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}

HELD_UP_SECONDS = 30.0
"""How long a process is waited for that is held up: not without end, since one that spins for ever looks no different.
"""


def is_held_up(pid: int) -> bool:
    """Whether a process of this host that makes no progress is slow, and not stopped or stuck: one of its threads runs,
    waits for a core, or for a disk, including swapped-out memory. False if it has ended."""
    return not is_stopped(pid) and bool({"R", "D"} & set(_thread_states(pid)))


def is_stopped(pid: int) -> bool:
    """Whether a process of this host has been stopped, as by SIGSTOP or a debugger."""
    return bool({"T", "t"} & set(_thread_states(pid)))


def cpu_seconds(pid: int) -> float | None:
    """Processor time of a process of this host over all its threads, in steps of 0.01 s; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    if fields[0] in "ZX":
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def was_ended(status: int | None) -> bool:
    """Whether somebody killed a process with this exit status (`returncode`) from outside, such as the kernel when
    memory runs out: its own exits have other statuses. True if the status is unknown."""
    return status is None or -status in _FROM_OUTSIDE


def how_it_ended(status: int | None) -> str:
    """An exit status (`returncode`) in words, for the log.

    >>> how_it_ended(70), how_it_ended(-9)
    ('exit status 70', 'killed by SIGKILL')
    """
    if status is None:
        return "it has not ended"
    if status >= 0:
        return f"exit status {status}"
    with contextlib.suppress(ValueError):  # some have no name
        return f"killed by {signal.Signals(-status).name}"
    return f"killed by signal {-status}"


def _thread_states(pid: int) -> Iterator[str]:
    """One letter for each thread, as the kernel shows it."""
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # a thread that has ended since
            yield stat.read_text().rpartition(")")[2].split()[0]
