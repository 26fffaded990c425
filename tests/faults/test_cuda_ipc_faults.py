"""Deaths and delays on the way from device to device, by the CPU's twin of CUDA IPC: never wrong rows, and no leavings.

Of two ranks the second one is frozen where rows are to stay on their way for as long as a test wants.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests import pictures
from tests.device_twin.services import twin_encoder, twin_llm
from tests.launch import Service, stopped
from tests.rpc.pairs import about, asked, idle, quiet, tokens, usable
from tests.rpc.test_transports import by_transport
from tests.waiting import until
from twinlens import EncoderClient, LlmClient, TwinlensError, v1

CUDA, SHARED = v1.TRANSPORT_CUDA_IPC, v1.TRANSPORT_SHARED_MEMORY
GROUP: dict[str, object] = {"tp": 2, "rank_timeout_seconds": 60}
_seed = itertools.count(9_900)


def new_picture() -> bytes:
    return pictures.encoded(pictures.noise(96, 96, next(_seed)))


@pytest.fixture(scope="module")
def checkpoint(checkpoints: Callable[..., Path]) -> Path:
    return checkpoints("qwen3_vl")


class Twins:
    """Both services, and how they are made to fail."""

    def __init__(self, stack: ExitStack, encoder: Service, llm: Service) -> None:
        self.encoder = encoder
        self.llm = llm
        self.media = stack.enter_context(EncoderClient(encoder.address))
        self.text = stack.enter_context(LlmClient(llm.address))
        until(lambda: usable(self.text, 1), "the encoder is usable")
        self.until_ready()

    def until_ready(self) -> None:
        until(lambda: self.text.get_load().encoders[0].cuda_ipc, "the ranks read the encoder's device")

    def ask(self, picture: bytes) -> list[int]:
        return tokens(self.text, asked(about(picture)))

    def kill_worker(self) -> None:
        (worker,) = self.encoder.children("encoder_service.worker")
        os.kill(worker, signal.SIGKILL)

    @contextmanager
    def on_the_way(self, picture: bytes) -> Iterator[Callable[[], list[int]]]:
        """A picture whose rows are leased and not copied by all ranks before the block ends; the answer, after it."""
        (rank,) = self.llm.children("llm_service.worker")
        with ThreadPoolExecutor(1) as threads, stopped(rank):
            answer = threads.submit(self.ask, picture)
            until(lambda: self.media.get_load().leases == 1, "its rows are leased")
            yield lambda: answer.result(180)

    def mapped_pools(self) -> list[int]:
        """How many pools each rank has open."""
        ranks = [*self.llm.children("llm_service.engine"), *self.llm.children("llm_service.worker")]
        return [Path(f"/proc/{pid}/maps").read_text().count("memfd:twin-pool") for pid in ranks]


@contextmanager
def twins(checkpoint: Path, *, dies: bool = False, **encoder_flags: object) -> Iterator[Twins]:
    code = None if dies else 0
    with ExitStack() as stack:
        encoder = stack.enter_context(twin_encoder(checkpoint, exit_code=code, **encoder_flags))
        llm = stack.enter_context(twin_llm(checkpoint, encoder.address, exit_code=code, **GROUP))
        yield Twins(stack, encoder, llm)


@pytest.mark.parametrize("opened", [True, False], ids=["pool open", "pool not open yet"])
def test_rows_of_a_worker_that_dies_under_them_are_fetched_in_another_way(checkpoint: Path, opened: bool) -> None:
    picture = new_picture()
    with twins(checkpoint) as both:
        if opened:
            both.ask(new_picture())
        with both.on_the_way(picture) as answer:
            both.kill_worker()
            until(lambda: both.media.get_load().leases == 0, "nobody is to believe in that memory")
        said, load = answer(), both.text.get_load()
        assert load.encode_retries == 1
        assert by_transport(both.media)[SHARED] == load.rows_shared > 0
        until(lambda: len(both.media.get_info().device_pools) == 1, "another worker has taken its place")
        both.until_ready()
        both.text.flush_cache()
        both.media.flush_cache()
        assert both.ask(picture) == said
        after = both.text.get_load()
        assert after.rows_mirrored - load.rows_mirrored == load.rows_shared, "the new worker's pool serves"
        until(lambda: both.mapped_pools() == [1, 1], "nobody holds the memory of the dead one")
        until(lambda: idle(both.text) and quiet(both.media), "nothing is held")


def test_rows_that_are_read_after_their_lease_do_not_count(checkpoint: Path) -> None:
    picture = new_picture()
    with twins(checkpoint, lease_seconds=3) as both:
        with both.on_the_way(picture) as answer:
            until(lambda: both.media.get_load().leases == 0, "the lease ends by its time")
        said, load = answer(), both.text.get_load()
        assert (load.encode_retries, load.rows_mirrored) == (1, 0)
        assert load.rows_shared == load.rows_received > 0
        both.text.flush_cache()
        assert both.ask(picture) == said
        assert both.text.get_load().rows_mirrored == load.rows_shared
        until(lambda: idle(both.text) and quiet(both.media), "nothing is held")


def test_a_reader_that_is_killed_while_it_copies_leaves_no_lease(checkpoint: Path) -> None:
    with ExitStack() as stack:
        encoder = stack.enter_context(twin_encoder(checkpoint))
        llm = stack.enter_context(twin_llm(checkpoint, encoder.address, exit_code=None, **GROUP))
        both = Twins(stack, encoder, llm)
        with both.on_the_way(new_picture()) as answer:
            llm.process.kill()
            with pytest.raises(TwinlensError):
                answer()
            until(lambda: both.media.get_load().leases == 0, "no lease is left")
            until(lambda: quiet(both.media), "no stream is left")


def test_rows_in_the_mirrors_of_an_engine_that_dies_are_fetched_again(checkpoint: Path) -> None:
    picture = new_picture()
    with twins(checkpoint) as both:
        said, load = both.ask(picture), both.text.get_load()
        assert load.rows_mirrored > 0
        assert load.row_bytes > 0
        os.kill(both.llm.children("llm_service.engine")[0], signal.SIGKILL)
        until(lambda: not _serves(both.text), "the engine is gone")
        until(lambda: _serves(both.text), "the engine is back")
        assert both.text.get_load().row_bytes == 0
        both.until_ready()
        assert both.ask(picture) == said
        assert both.text.get_load().rows_mirrored == 2 * load.rows_mirrored


def test_an_encoder_that_is_killed_while_its_rows_are_copied_is_let_go(checkpoint: Path) -> None:
    picture = new_picture()
    with twins(checkpoint, dies=True) as both, twin_encoder(checkpoint, device="TWIN-1") as other:
        both.ask(picture)
        assert both.mapped_pools() == [1, 1]
        with both.on_the_way(new_picture()) as answer:
            both.encoder.process.kill()
            until(lambda: not usable(both.text, 1), "it is known to be gone")
        with pytest.raises(TwinlensError) as error:
            answer()
        assert error.value.code.name == "UNAVAILABLE"
        until(lambda: both.mapped_pools() == [0, 0], "nobody holds its memory")
        assert both.ask(picture), "what landed is still here"
        with twin_llm(checkpoint, other.address) as llm, LlmClient(llm.address) as text:
            until(lambda: usable(text, 1), "the other encoder is usable")
            assert tokens(text, asked(about(picture))) == both.ask(picture)


def _serves(client: LlmClient) -> bool:
    try:
        client.get_load()
    except TwinlensError:
        return False
    return True
