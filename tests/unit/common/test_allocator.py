"""The allocator keeps large blocks: told apart by the pages that the system has to give."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import resource, sys
from common.allocator import keep_large_blocks
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


def faults(mode: str) -> int:
    """Page faults of 128 messages of 1 MiB, of which eight live at a time."""
    run = subprocess.run([sys.executable, "-c", _PROGRAM, mode], check=True, stdout=subprocess.PIPE, text=True)
    return int(run.stdout)


def test_memory_of_large_messages_is_used_again() -> None:
    assert faults("keep") < 256 < faults("leave")
