"""`python -m gateway`: one gateway."""

from __future__ import annotations

import signal
import sys

from common.process.descriptors import prepare
from common.requirements import GATEWAY_MODULES, require


def main() -> None:
    """Serves until a signal arrives; exits with 1 and one line if it cannot start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the service listens for it, it ends the process in silence
    prepare("gateway")
    require("gateway", "gateway", GATEWAY_MODULES)
    import uvloop

    from common.config import load
    from gateway.config import GatewayConfig
    from gateway.server import serve

    config = load(GatewayConfig, "TWINLENS_GATEWAY", "Twinlens gateway: OpenAI's HTTP API in front of LLM services.")
    try:
        uvloop.run(serve(config))
    except OSError as error:
        sys.exit(f"gateway: {error}")


if __name__ == "__main__":
    main()
