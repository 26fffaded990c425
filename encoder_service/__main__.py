"""`python -m encoder_service`: one encoder."""

from __future__ import annotations

import asyncio
import signal
import sys

from common.process.descriptors import prepare
from common.requirements import require
from common.rpc.forks import keep_grpc_out


def main(*, worker: str = "encoder_service.worker") -> None:
    """Serves until a signal arrives; exits with 1 and one line if it cannot start. Device workers run the module
    `worker`."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the service listens for it, it ends the process in silence
    prepare("encoder_service")
    keep_grpc_out()
    require("encoder_service")  # before anything that is installed with it is imported
    from common.checkpoints.checkpoint import CheckpointError
    from common.config import load
    from common.process.children import ChildDied
    from common.process.hidden_memory import hide_memory
    from common.process.malloc import keep_large_blocks
    from encoder_service.config import PREFIX, EncoderConfig
    from encoder_service.engine.workers import WorkerError
    from encoder_service.server import serve

    config = load(EncoderConfig, PREFIX, "Twinlens encoder service: pictures, videos and sounds in, rows out.")
    keep_large_blocks()
    hide_memory()
    try:
        asyncio.run(serve(config, worker=worker))
    except (CheckpointError, WorkerError, ChildDied, OSError) as error:
        sys.exit(f"encoder_service: {error}")


if __name__ == "__main__":
    main()
