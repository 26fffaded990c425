"""`python -m benchmarks.paced_engine SOCKET_FD ROW_ARENA_FD`: a light engine whose steps take as long as a model's on
a GPU and leave the processor idle, for `benchmarks.gateway`. It measures nothing by itself."""

from __future__ import annotations

from functools import partial

from llm_service.engine.process import serve
from testkit.light.engine import load

STEP_SECONDS = 0.03

if __name__ == "__main__":
    serve(partial(load, step_seconds=STEP_SECONDS))
