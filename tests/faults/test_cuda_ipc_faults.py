"""Deaths and delays on the way from device to device, by the CPU's twin of CUDA IPC: never wrong rows, and no leavings.

Of two ranks the second one is frozen where rows are to stay on their way for as long as a test wants.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest

from tests import pictures
from tests.device_twin.services import twin_encoder, twin_llm
from tests.launch import Service, stopped
from tests.ports import held_address
from tests.rpc.pairs import about, asked, greedy, idle, quiet, tokens, usable
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
    """Both services, and how they are made to fail. The encoder is started again at its address, as a test wants it."""

    def __init__(self, stack: ExitStack, checkpoint: Path) -> None:
        self._checkpoint = checkpoint
        self._encoder_stack = ExitStack()
        stack.callback(self._end_encoder)
        self._address = held_address()
        self._start_encoder({})
        self.llm = stack.enter_context(twin_llm(checkpoint, self._address, exit_code=None, **GROUP))
        self.text = stack.enter_context(LlmClient(self.llm.address))

    def set_up(self, **encoder_flags: object) -> None:
        """Whatever a test before has done: an encoder with these flags, which the ranks read, and empty caches."""
        if self.encoder.process.poll() is not None or encoder_flags != self._encoder_flags:
            self._end_encoder()
            self._start_encoder(encoder_flags)
        self.until_ready()
        self.text.flush_cache()
        self.media.flush_cache()

    def _end_encoder(self) -> None:
        killed = self.encoder.process.poll() is not None
        self._encoder_stack.close()
        assert killed or self.encoder.process.returncode == 0

    def _start_encoder(self, flags: dict[str, object]) -> None:
        self._encoder_flags = flags
        start = twin_encoder(self._checkpoint, listen=self._address, exit_code=None, **flags)
        self.encoder = self._encoder_stack.enter_context(start)
        self.media = self._encoder_stack.enter_context(EncoderClient(self.encoder.address))

    def until_ready(self) -> None:
        until(lambda: len(self.media.get_info().device_pools) == 1, "the encoder has a worker")
        until(lambda: usable(self.text, 1), "the encoder is usable")
        until(lambda: self.text.get_load().encoders[0].cuda_ipc, "the ranks read the encoder's device")

    def until_quiet(self) -> None:
        until(lambda: idle(self.text) and quiet(self.media), "nothing is held")

    def ask(self, picture: bytes) -> list[int]:
        return tokens(self.text, asked(about(picture)))

    def kill_worker(self) -> None:
        (worker,) = self.encoder.children("encoder_service.worker")
        os.kill(worker, signal.SIGKILL)

    def on_the_way(self, picture: bytes) -> AbstractContextManager[Callable[[], list[int]]]:
        return on_the_way(self.llm, self.text, self.media, picture)

    def mapped_pools(self) -> list[int]:
        """How many pools each rank has open."""
        ranks = [*self.llm.children("llm_service.engine"), *self.llm.children("llm_service.worker")]
        return [Path(f"/proc/{pid}/maps").read_text().count("memfd:twin-pool") for pid in ranks]


@contextmanager
def on_the_way(
    llm: Service, text: LlmClient, media: EncoderClient, picture: bytes
) -> Iterator[Callable[[], list[int]]]:
    """A picture whose rows are leased and not copied by all ranks before the block ends; the answer, after it."""
    with ThreadPoolExecutor(1) as threads, stopped(*llm.children("llm_service.worker")):
        answer = threads.submit(tokens, text, asked(about(picture)))
        until(lambda: media.get_load().leases == 1, "its rows are leased")
        yield lambda: answer.result(180)


@pytest.fixture(scope="module")
def both(checkpoint: Path) -> Iterator[Twins]:
    with ExitStack() as stack:
        yield Twins(stack, checkpoint)


@pytest.mark.parametrize(
    "opened",
    [pytest.param(False, marks=pytest.mark.soak, id="pool not open yet"), pytest.param(True, id="pool open")],
)
def test_rows_of_a_worker_that_dies_under_them_are_fetched_in_another_way(both: Twins, opened: bool) -> None:
    both.set_up()
    if opened:
        both.ask(new_picture())
    elif any(both.mapped_pools()):
        both.kill_worker()  # the next one's pool is a new one
        until(lambda: not any(both.mapped_pools()), "nobody holds the memory of the dead one")
        both.until_ready()
    before, sent = both.text.get_load(), by_transport(both.media).get(SHARED, 0)
    picture = new_picture()
    with both.on_the_way(picture) as answer:
        both.kill_worker()
        until(lambda: both.media.get_load().leases == 0, "nobody is to believe in that memory")
    said, load = answer(), both.text.get_load()
    assert load.encode_retries == before.encode_retries + 1
    rows = load.rows_shared - before.rows_shared
    assert by_transport(both.media)[SHARED] - sent == rows > 0
    both.until_ready()
    both.text.flush_cache()
    both.media.flush_cache()
    assert both.ask(picture) == said
    after = both.text.get_load()
    assert after.rows_mirrored - load.rows_mirrored == rows, "the new worker's pool serves"
    until(lambda: both.mapped_pools() == [1, 1], "nobody holds the memory of the dead one")
    both.until_quiet()


def test_rows_in_the_mirrors_of_an_engine_that_dies_are_fetched_again(both: Twins) -> None:
    both.set_up()
    picture, before = new_picture(), both.text.get_load()
    said, load = both.ask(picture), both.text.get_load()
    rows = load.rows_mirrored - before.rows_mirrored
    assert rows > 0
    assert load.row_bytes > 0
    (killed,) = both.llm.children("llm_service.engine")
    os.kill(killed, signal.SIGKILL)
    until(lambda: killed not in both.llm.children("llm_service.engine") and _serves(both.text), "another engine serves")
    assert both.text.get_load().row_bytes == 0
    both.until_ready()
    assert both.ask(picture) == said
    assert both.text.get_load().rows_mirrored == load.rows_mirrored + rows
    both.until_quiet()


@pytest.mark.soak
def test_an_answer_about_rows_in_the_mirrors_goes_on_in_the_next_engine(both: Twins) -> None:
    both.set_up()
    asking, before = asked(about(new_picture()), greedy(80)), both.text.get_load()
    undisturbed = tokens(both.text, asking)
    assert both.text.get_load().rows_mirrored > before.rows_mirrored
    stream = iter(both.text.generate(asking))
    assert next(stream).HasField("started")
    os.kill(both.llm.children("llm_service.engine")[0], signal.SIGKILL)
    assert [token for event in stream for token in event.delta.token_ids] == undisturbed
    both.until_ready()
    both.until_quiet()


def test_an_encoder_that_is_killed_while_its_rows_are_copied_is_let_go(both: Twins) -> None:
    both.set_up()
    picture = new_picture()
    said = both.ask(picture)
    assert both.mapped_pools() == [1, 1]
    with both.on_the_way(new_picture()) as answer:
        both.encoder.process.kill()
        until(lambda: not usable(both.text, 1), "it is known to be gone")
    with pytest.raises(TwinlensError) as error:
        answer()
    assert error.value.code.name == "UNAVAILABLE"
    until(lambda: both.mapped_pools() == [0, 0], "nobody holds its memory")
    assert both.ask(picture) == said, "what landed is still here"
    both.set_up()
    assert both.ask(picture) == said


def test_rows_that_are_read_after_their_lease_do_not_count(both: Twins) -> None:
    both.set_up(lease_seconds=3)
    picture, before = new_picture(), both.text.get_load()
    with both.on_the_way(picture) as answer:
        until(lambda: both.media.get_load().leases == 0, "the lease ends by its time")
    said, load = answer(), both.text.get_load()
    assert (load.encode_retries, load.rows_mirrored) == (before.encode_retries + 1, before.rows_mirrored)
    rows = load.rows_shared - before.rows_shared
    assert load.rows_received - before.rows_received == rows > 0
    both.text.flush_cache()
    assert both.ask(picture) == said
    assert both.text.get_load().rows_mirrored == before.rows_mirrored + rows
    both.until_quiet()


def test_a_reader_that_is_killed_while_it_copies_leaves_no_lease(both: Twins) -> None:
    """The last test of this file: nobody starts the LLM service again."""
    both.set_up()
    with both.on_the_way(new_picture()) as answer:
        both.llm.process.kill()
        with pytest.raises(TwinlensError):
            answer()
        until(lambda: both.media.get_load().leases == 0, "no lease is left")
        until(lambda: quiet(both.media), "no stream is left")


def _serves(client: LlmClient) -> bool:
    try:
        client.get_load()
    except TwinlensError:
        return False
    return True
