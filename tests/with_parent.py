"""Programs that the kernel kills when the process that started them ends: none is left by a suite that was killed."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def with_parent(*command: str) -> list[str]:
    """What starts a program so, in place of its own command, which it has again once it runs."""
    return [sys.executable, "-IS", __file__, str(os.getpid()), *command]


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == int(sys.argv[1]):  # else it has ended already
        os.execv(sys.argv[2], sys.argv[2:])
