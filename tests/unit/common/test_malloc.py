"""The allocator keeps large blocks, as the pages show that the system has to give, and gives back what is free."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import resource, sys
from common.process.malloc import keep_large_blocks
keep = sys.argv[1] == "keep"
assert not keep or keep_large_blocks()
for _ in range(4):
    messages = [bytes([1]) * (1 << 20) for _ in range(8)]
    del messages
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(16):
    messages = [bytes([1]) * (1 << 20) for _ in range(8)]
    del messages
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


_SCATTERED = """
from common.process.malloc import give_back
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
blocks = [bytes([1]) * (100 << 10) for _ in range(1000)]
kept = blocks[::25]
del blocks
before = resident()
assert give_back()
print(before - resident())
"""


def faults(mode: str) -> int:
    """Page faults of 128 messages of 1 MiB, of which eight live at a time."""
    run = subprocess.run([sys.executable, "-c", _PROGRAM, mode], check=True, stdout=subprocess.PIPE, text=True)
    return int(run.stdout)


def test_memory_of_large_messages_is_used_again() -> None:
    assert faults("keep") < 256 < faults("leave")


def test_what_is_free_between_blocks_that_are_kept_is_given_back() -> None:
    run = subprocess.run([sys.executable, "-c", _SCATTERED], check=True, stdout=subprocess.PIPE, text=True)
    assert int(run.stdout) > 50 << 20
