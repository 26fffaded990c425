"""gRPC and child processes: none of these is a fork that uses gRPC, so gRPC need not do anything about them."""

from __future__ import annotations

import os


def keep_grpc_out() -> None:
    """Call before gRPC is imported. Otherwise it stops its threads before each fork and restarts them afterwards.
    Python forks if it cannot start a process in the cheaper way for lack of memory, and then there is none for those
    threads either: the service would never answer again."""
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
