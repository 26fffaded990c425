"""An encoder whose workers, which are this module too, die of one picture: `python -m tests.faults.deadly_workers`."""

from __future__ import annotations

import os
import signal
import sys

from encoder_service.__main__ import main
from encoder_service.engine import workers


def work(*descriptors: int) -> None:
    """A worker that ends at a picture of one colour."""
    from encoder_service.worker.__main__ import main as serve
    from encoder_service.worker.runner import Runner

    cut = Runner._patches

    def cut_or_die(self, piece):
        patches = cut(self, piece)
        if patches.min() == patches.max():
            os.kill(os.getpid(), signal.SIGKILL)
        return patches

    Runner._patches = cut_or_die
    serve(*descriptors)


if __name__ == "__main__":
    if sys.argv[1].isdecimal():
        work(*map(int, sys.argv[1:4]))
    else:
        workers.MODULE = "tests.faults.deadly_workers"
        main()
