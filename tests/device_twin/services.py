"""Both services with the twin of device memory switched on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.device_twin import environ
from tests.launch import Service, launch
from tests.rpc.pairs import ENCODER_FLAGS, LLM_FLAGS

POOL = {"device_pool_bytes": "8MiB"}
MIRROR = {"row_mirror": "yes"}


def flags(**given: object) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]


@contextmanager
def twin_encoder(
    model: Path, *, device: str = "TWIN-0", exit_code: int | None = 0, **more: object
) -> Iterator[Service]:
    """An encoder whose workers have pools on the device of this name."""
    given = {"model": model, "listen": "127.0.0.1:0", **ENCODER_FLAGS, **POOL, **more}
    with launch("encoder_service", *flags(**given), environ=environ(device), exit_code=exit_code) as service:
        yield service


@contextmanager
def twin_llm(
    model: Path,
    *encoders: str,
    device: str = "TWIN-0",
    exit_code: int | None = 0,
    environment: Mapping[str, str] | None = None,
    **more: object,
) -> Iterator[Service]:
    """An LLM service whose ranks have mirrors on the device of this name."""
    given = {"model": model, "listen": "127.0.0.1:0", "encoders": ",".join(encoders), **LLM_FLAGS, **MIRROR, **more}
    environment = {**environ(device), **(environment or {})}
    with launch("llm_service", *flags(**given), environ=environment, exit_code=exit_code) as service:
        yield service
