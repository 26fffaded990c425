"""A filter of system calls for a process that parses strangers' data: listed calls are allowed, all others fail with
EPERM, for all threads and for good. It consists of call numbers for x86-64 and aarch64."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Iterator

_ARCHITECTURES = {"x86_64": (0, 0xC000003E, 317), "aarch64": (1, 0xC00000B7, 277)}
"""By machine: the column of `_CALLS`, AUDIT_ARCH, and the number of `seccomp` itself."""

_NONE = -1
_CALLS = {
    # existing descriptors and memory
    "read": (0, 63),
    "write": (1, 64),
    "close": (3, 57),
    "fstat": (5, 80),
    "poll": (7, _NONE),
    "lseek": (8, 62),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "brk": (12, 214),
    "pread64": (17, 67),
    "pwrite64": (18, 68),
    "readv": (19, 65),
    "writev": (20, 66),
    "select": (23, _NONE),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "sendto": (44, 206),
    "recvfrom": (45, 207),
    "pselect6": (270, 72),
    "ppoll": (271, 73),
    # threads, and how they wait
    "sched_yield": (24, 124),
    "nanosleep": (35, 101),
    "futex": (202, 98),
    "set_tid_address": (218, 96),
    "clock_nanosleep": (230, 115),
    "set_robust_list": (273, 99),
    "membarrier": (324, 283),
    "rseq": (334, 293),
    "futex_waitv": (449, 449),
    # signals to itself
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sigaltstack": (131, 132),
    "restart_syscall": (219, 128),
    # queries about the process and the machine
    "getpid": (39, 172),
    "uname": (63, 160),
    "gettimeofday": (96, 169),
    "getrlimit": (97, 163),
    "getrusage": (98, 165),
    "sysinfo": (99, 179),
    "times": (100, 153),
    "getuid": (102, 174),
    "getgid": (104, 176),
    "geteuid": (107, 175),
    "getegid": (108, 177),
    "getppid": (110, 173),
    "getpriority": (140, 141),
    "sched_getparam": (143, 121),
    "sched_getscheduler": (145, 120),
    "sched_get_priority_max": (146, 125),
    "sched_get_priority_min": (147, 126),
    "gettid": (186, 178),
    "sched_getaffinity": (204, 123),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "getcpu": (309, 168),
    "getrandom": (318, 278),
    # its end
    "exit": (60, 93),
    "exit_group": (231, 94),
}
_CLONE, _CLONE3 = (56, 220), (435, 435)
_KILL, _TGKILL = (62, 129), (234, 131)
_FCNTL, _PRCTL, _PRLIMIT = (72, 25), (157, 167), (302, 261)
_LAST_KNOWN = 469

_CLONE_THREAD = 0x0001_0000
_CLONE_NEW = 0x7E02_0000
"""Threads, and the bits that ask for namespaces."""

_FCNTL_FLAGS = (1, 2, 3, 4)
"""F_GETFD, F_SETFD, F_GETFL, F_SETFL: none creates a descriptor or redirects signals."""

_PRCTL_NAMES = (15, 16)
"""PR_SET_NAME and PR_GET_NAME, of a thread."""

_PR_SET_NO_NEW_PRIVS = 38
_SET_MODE_FILTER, _ALL_THREADS = 1, 1

_LOAD, _EQUAL, _ABOVE, _AND, _RETURN = 0x20, 0x15, 0x25, 0x54, 0x06
_ALLOW, _REFUSE, _UNKNOWN = 0x7FFF_0000, 0x0005_0001, 0x0005_0026
"""SECCOMP_RET_ALLOW, and SECCOMP_RET_ERRNO with EPERM and with ENOSYS."""

_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16

Instruction = tuple[int, int, int, int]


class _Program(ctypes.Structure):
    """sock_fprog of linux/filter.h."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def confine() -> str:
    """From now on this process, with all its threads, can compute, and talk by the descriptors that it has; it may
    start threads. Returns why the kernel does not confine it, or nothing."""
    found = _ARCHITECTURES.get(platform.machine())
    if found is None or struct.calcsize("P") != 8:
        return f"there is no filter for {platform.machine()}"
    column, architecture, call = found
    code = b"".join(struct.pack("=HBBI", *each) for each in _instructions(column, architecture, os.getpid()))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, *map(ctypes.c_ulong, (1, 0, 0, 0))):
        return f"no_new_privs: {os.strerror(ctypes.get_errno())}"
    program = _Program(len(code) // 8, code)
    libc.syscall.restype = ctypes.c_long
    number, mode, flags = map(ctypes.c_long, (call, _SET_MODE_FILTER, _ALL_THREADS))
    if failed := libc.syscall(number, mode, flags, ctypes.byref(program)):
        return f"seccomp: {os.strerror(ctypes.get_errno()) if failed < 0 else 'a thread has another filter'}"
    return ""


def _instructions(column: int, architecture: int, pid: int) -> Iterator[Instruction]:
    yield (_LOAD, 0, 0, _ARCHITECTURE)
    yield (_EQUAL, 1, 0, architecture)
    yield _end(_REFUSE)
    yield (_LOAD, 0, 0, _NUMBER)
    for numbers in _CALLS.values():
        if numbers[column] != _NONE:
            yield from _of(numbers[column], [_end(_ALLOW)])
    # New threads, but no processes; clone3 passes its flags in memory, which filters cannot read, and callers fall back
    # to clone if it is missing.
    yield from _of(_CLONE[column], _if(_CLONE_THREAD, at=0, mask=_CLONE_THREAD | _CLONE_NEW))
    yield from _of(_CLONE3[column], [_end(_UNKNOWN)])
    for each in (_KILL, _TGKILL):
        yield from _of(each[column], _if(pid, at=0))
    yield from _of(_FCNTL[column], _if(*_FCNTL_FLAGS, at=1))
    yield from _of(_PRCTL[column], _if(*_PRCTL_NAMES, at=0))
    # Its own limits are read, not set: both halves of the pointer to new ones are 0.
    yield from _of(_PRLIMIT[column], [*_unless(0, at=0), *_unless(0, at=2), *_unless(0, at=2, high=True), _end(_ALLOW)])
    yield (_ABOVE, 0, 1, _LAST_KNOWN)
    yield _end(_UNKNOWN)  # newer C libraries try it first, and do without
    yield _end(_REFUSE)


def _of(number: int, then: list[Instruction]) -> list[Instruction]:
    """For calls with this number, these instructions, which must end; other calls jump behind them."""
    return [(_EQUAL, 0, len(then), number), *then]


def _if(*values: int, at: int, mask: int = 0) -> list[Instruction]:
    """Allows the call if the lower half of an argument, masked, is one of these values."""
    masked = [(_AND, 0, 0, mask)] if mask else []
    allowed = [step for value in values for step in ((_EQUAL, 0, 1, value), _end(_ALLOW))]
    return [(_LOAD, 0, 0, _FIRST_ARGUMENT + 8 * at), *masked, *allowed, _end(_REFUSE)]


def _unless(value: int, *, at: int, high: bool = False) -> list[Instruction]:
    """Refuses the call unless half of an argument has this value."""
    place = _FIRST_ARGUMENT + 8 * at + 4 * high
    return [(_LOAD, 0, 0, place), (_EQUAL, 1, 0, value), _end(_REFUSE)]


def _end(how: int) -> Instruction:
    return (_RETURN, 0, 0, how)
