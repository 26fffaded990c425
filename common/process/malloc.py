"""How the C library's allocator treats free memory. glibc returns a block of a megabyte, the size of messages with
rows, to the system when it is freed; the next one is faulted in page by page, each zeroed, which costs several times
what copying the message does. A service that streams such messages keeps the memory instead."""

from __future__ import annotations

import ctypes
import gc

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8  # the numbers of malloc.h

_OWN_MAPPING = 8 << 20
"""Blocks from this size on get pages of their own, and give them back: pictures and prompts come and go in any size."""

_KEPT = 64 << 20
"""Free memory at the end of a heap that is not given back."""


def keep_large_blocks() -> bool:
    """For this process, from now on; False if the C library has no such settings (musl)."""
    try:
        set_option = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    options = {_MMAP_THRESHOLD: _OWN_MAPPING, _TRIM_THRESHOLD: _KEPT, _TOP_PAD: _OWN_MAPPING, _ARENA_MAX: 1}
    taken = [set_option(option, value) for option, value in options.items()]
    return all(taken)


class _Mallinfo2(ctypes.Structure):
    """malloc.h's struct of this name; sizes in bytes."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks"),
            *("uordblks", "fordblks", "keepcost"),
        )
    )


def bytes_in_use() -> int:
    """Bytes allocated by this process and not freed, over all heaps; 0 if the C library does not tell (musl, or glibc
    before 2.33)."""
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return 0
    mallinfo2.restype = _Mallinfo2
    found = mallinfo2()
    return int(found.uordblks) + int(found.hblkhd)


def freeze_objects() -> None:
    """Moves all objects out of the garbage collector's sight, for good."""
    gc.collect()
    gc.freeze()


def give_back() -> bool:
    """Returns free memory of this process to the system: after loading, much of it lies between what is kept. False if
    the C library has no such call."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except AttributeError:
        return False
    return True
