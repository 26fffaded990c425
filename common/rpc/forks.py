"""gRPC beside processes that are started: none of those is a copy of this one, so gRPC has nothing to do about it."""

from __future__ import annotations

import os


def keep_grpc_out() -> None:
    """Before gRPC is imported. It would stop its threads before each fork and start them again behind it. Python forks
    as well where it has tried to start a process in the cheaper way and there is room for none, and then there is none
    for those threads either: the service would never answer again, not even when there is room."""
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
