"""Both services, started as a user starts them, for the length of a measurement."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

_STOP_SECONDS = 30


@contextmanager
def process(module: str, *flags: str) -> Iterator[str]:
    """Starts `python -m module` on a free port; gives the address of its `ready` line, and drains it at the end."""
    environ = {"TWINLENS_LLM_KERNELS": "wait", **os.environ, "PYTHONUNBUFFERED": "1"}  # torch would be measured instead
    command = [sys.executable, "-m", module, "--listen", "127.0.0.1:0", "--log-level", "warning", *flags]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ)
    try:
        assert child.stdout is not None
        line = child.stdout.readline()
        if not line.startswith("ready grpc="):
            raise RuntimeError(f"{module} did not start")
        yield line.removeprefix("ready grpc=").split()[0]
    finally:
        child.send_signal(signal.SIGTERM)
        child.wait(_STOP_SECONDS)


@contextmanager
def both(
    model: Path, *, encoder_flags: tuple[str, ...] = (), llm_flags: tuple[str, ...] = ()
) -> Iterator[tuple[str, str]]:
    """One encoder and one LLM service; their addresses."""
    with ExitStack() as stack:
        encoder = stack.enter_context(process("encoder_service", "--model", str(model), *encoder_flags))
        llm = stack.enter_context(process("llm_service", "--model", str(model), "--encoders", encoder, *llm_flags))
        yield encoder, llm
