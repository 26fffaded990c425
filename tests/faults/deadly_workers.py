"""An encoder whose workers, which are this module too, die of one picture: `python -m tests.faults.deadly_workers`."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from encoder_service.__main__ import main
from testkit.light import worker

_rows = worker.rows


def _rows_or_die(staging: Any, piece: Any, layout: Any) -> bytes:
    """A worker that ends at a picture of one colour."""
    pixels = staging[piece.pixels : piece.pixels + piece.frames * piece.height * piece.width * 3]
    if pixels.min() == pixels.max():
        os.kill(os.getpid(), signal.SIGKILL)
    return _rows(staging, piece, layout)


if __name__ == "__main__":
    if sys.argv[1].isdecimal():
        worker.rows = _rows_or_die
        worker.main(*map(int, sys.argv[1:4]))
    else:
        main(worker="tests.faults.deadly_workers")
