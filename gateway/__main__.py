"""`python -m gateway`: one gateway."""

from __future__ import annotations

import signal
import sys
from importlib.util import find_spec

from common.process.descriptors import prepare

_MODULES = ("google.rpc", "httptools", "prometheus_client", "pydantic", "starlette", "structlog", "uvicorn", "uvloop")


def main() -> None:
    """Serves until a signal arrives; exits with 1 and one line if it cannot start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the service listens for it, it ends the process in silence
    prepare("gateway")
    if missing := [name for name in _MODULES if not _is_here(name)]:
        sys.exit(f"gateway: not installed: {', '.join(missing)}. Install them with: pip install 'twinlens[gateway]'")
    import uvloop

    from common.config import load
    from gateway.config import GatewayConfig
    from gateway.server import serve

    config = load(GatewayConfig, "TWINLENS_GATEWAY", "Twinlens gateway: OpenAI's HTTP API in front of LLM services.")
    try:
        uvloop.run(serve(config))
    except OSError as error:
        sys.exit(f"gateway: {error}")


def _is_here(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # or the package around it is missing
        return False


if __name__ == "__main__":
    main()
