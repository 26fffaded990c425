"""A process that behaves like a service, or badly: `python -m tests.unit.tools.fake_service BEHAVIOUR…`."""

from __future__ import annotations

import signal
import sys


def main(behaviours: list[str]) -> int:
    """`silent` never says that it serves, `deaf` hears no SIGTERM, `short` ends with 7 once it serves."""
    # Blocked before the ready line, so that a SIGTERM right after it is waited for, not lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
    if "fails" in behaviours:
        return 3
    if "silent" not in behaviours:
        print("hello\nready grpc=127.0.0.1:4321 and more", flush=True)
    if "short" in behaviours:
        return 7
    signal.sigwait({signal.SIGUSR1} if "deaf" in behaviours else {signal.SIGTERM})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
