"""An encoder whose process dies of one picture, once it has computed it: `python -m tests.faults.deadly_process`."""

from __future__ import annotations

import os
import signal
from typing import Any

from encoder_service.__main__ import main
from encoder_service.engine.embedding_store import Entry
from encoder_service.engine.flight import Flight
from encoder_service.engine.pipeline import Pipeline
from tests.faults import poison

_compute = Pipeline.compute


async def _compute_and_die(self: Pipeline, flight: Flight, *given: Any) -> Entry:
    entry = await _compute(self, flight, *given)
    if flight.item.source == poison.PICTURE:
        os.kill(os.getpid(), signal.SIGKILL)
    return entry


if __name__ == "__main__":
    Pipeline.compute = _compute_and_die  # type: ignore[method-assign]
    main(worker="tests.light.worker")
