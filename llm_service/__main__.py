"""`python -m llm_service`: one LLM service."""

from __future__ import annotations

import asyncio
import signal
import sys

from common.process.descriptors import prepare
from common.requirements import require
from common.rpc.forks import keep_grpc_out


def main(*, engine: str = "llm_service.engine") -> None:
    """Serves until a signal arrives; exits with 1 and one line if it cannot start. The engine runs the module
    `engine`."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the service listens for it, it ends the process in silence
    prepare("llm_service")
    keep_grpc_out()
    require("llm_service")  # before anything that is installed with it is imported
    import uvloop

    from common.checkpoints.checkpoint import CheckpointError
    from common.config import load
    from common.errors import TwinlensError
    from common.process.malloc import keep_large_blocks
    from llm_service.config import LlmConfig
    from llm_service.engine_settings import first_rank

    config = load(LlmConfig, "TWINLENS_LLM", "Twinlens LLM service: text and media in, streamed tokens out.")
    keep_large_blocks()
    try:
        meeting = config.meeting()
        if meeting.node_rank:
            from llm_service.worker.node import lend  # a host that lends its devices serves nothing

            asyncio.run(lend(first_rank(config, meeting), config.start_seconds, config.log_level))
        else:
            from llm_service.server import serve

            uvloop.run(serve(config, engine_module=engine))
    except (CheckpointError, OSError, TwinlensError) as error:
        sys.exit(f"llm_service: {error}")


if __name__ == "__main__":
    main()
