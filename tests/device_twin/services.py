"""Both services with the twin of device memory switched on, as a pair that a test asks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.device_twin import environ
from tests.launch import Service, launch
from tests.rpc.pairs import ENCODER_FLAGS, LLM_FLAGS, Pair, usable
from tests.waiting import until
from twinlens import EncoderClient, LlmClient

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
    model: Path, *encoders: str, device: str = "TWIN-0", exit_code: int | None = 0, **more: object
) -> Iterator[Service]:
    """An LLM service whose ranks have mirrors on the device of this name."""
    given = {"model": model, "listen": "127.0.0.1:0", "encoders": ",".join(encoders), **LLM_FLAGS, **MIRROR, **more}
    with launch("llm_service", *flags(**given), environ=environ(device), exit_code=exit_code) as service:
        yield service


@contextmanager
def twin_pair(model: Path, **llm_flags: object) -> Iterator[Pair]:
    """Both, for the length of the block; asserts that nothing is held at its end."""
    with (
        twin_encoder(model) as encoder,
        twin_llm(model, encoder.address, **llm_flags) as llm,
        EncoderClient(encoder.address) as media,
        LlmClient(llm.address) as text,
    ):
        both = Pair(model, encoder, llm, media, text)
        until(lambda: usable(text, 1), "the encoder is usable")
        until(lambda: text.get_load().encoders[0].cuda_ipc, "the ranks read its device")
        yield both
        until(both.idle, "nothing is held at the end")
        until(lambda: media.get_load().leases == 0, "no lease is left")
