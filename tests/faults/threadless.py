"""A service that can start no further thread once it is ready: `-m tests.faults.threadless MODULE FLAGS`."""

from __future__ import annotations

import sys
import threading
from importlib import import_module
from typing import Any

from common.process import descriptors


def _refuse(*_: Any) -> None:
    raise RuntimeError("can't start new thread")


def main() -> None:
    """Runs the module until a signal comes."""
    say = descriptors.say

    def last(line: str) -> str:
        threading._start_new_thread = _refuse  # type: ignore[attr-defined]
        return say(line)

    descriptors.say = last
    service = import_module(sys.argv.pop(1))
    service.main()


if __name__ == "__main__":
    main()
