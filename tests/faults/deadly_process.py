"""An encoder that dies of one picture once its caller has the header: `python -m tests.faults.deadly_process`."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

from encoder_service.__main__ import main
from encoder_service.engine.embedding_store import Entry
from encoder_service.engine.flight import Flight
from encoder_service.engine.pipeline import Pipeline
from encoder_service.servicer import EncoderServicer
from tests.faults import poison

_compute, _get_load = Pipeline._compute, EncoderServicer.GetLoad
_asked = asyncio.Event()


async def _get_load_and_tell(self: EncoderServicer, *given: Any) -> Any:
    _asked.set()
    return await _get_load(self, *given)


async def _compute_or_die(self: Pipeline, flight: Flight, *given: Any) -> Entry:
    if flight.item.source == poison.PICTURE:
        # A death tells of an item where its caller had read the header. Two questions of how things are, half a second
        # apart, have come after it: by then the LLM service has read it, however slow the machine is.
        for _ in range(2):
            _asked.clear()
            await _asked.wait()
        os.kill(os.getpid(), signal.SIGKILL)
    return await _compute(self, flight, *given)


if __name__ == "__main__":
    Pipeline._compute = _compute_or_die  # type: ignore[method-assign]
    EncoderServicer.GetLoad = _get_load_and_tell  # type: ignore[method-assign]
    main(worker="testkit.light.worker")
