"""A picture that ends whoever computes it: refused after one retry, remembered, and of no concern to anybody else."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from tests.faults import poison
from tests.faults.replicas import Crowd, more, replicas
from tests.faults.test_replicas import served
from tests.rpc.pairs import about, answer, asked, usable
from tests.scrape import scrape
from tests.waiting import until
from twinlens import LlmClient, TwinlensError

CALLERS = 4
DEATHS = "twinlens_encoder_worker_deaths_total"


def refusal(client: LlmClient) -> str:
    """Why a question about the poison is refused: it is INTERNAL, and names the picture."""
    with pytest.raises(TwinlensError) as error:
        answer(client, asked(about(poison.PICTURE)))
    assert (error.value.code, error.value.retry_after) == (grpc.StatusCode.INTERNAL, None)
    return error.value.reason


def refusal_in_the_end(client: LlmClient) -> str:
    """The same, asked anew while the answer is that it may be tried again: a stream to an encoder whose death is not
    known yet takes one of the item's attempts, and tells nothing of the item."""
    told = list[TwinlensError]()

    def refused() -> bool:
        with pytest.raises(TwinlensError) as error:
            answer(client, asked(about(poison.PICTURE)))
        told.append(error.value)
        return error.value.retry_after is None

    until(refused, "it is refused for good")
    assert told[-1].code is grpc.StatusCode.INTERNAL
    return told[-1].reason


def check_attempts(client: LlmClient) -> None:
    """No storm: at most 1.2 streams for each item that was asked for."""
    load = client.get_load()
    assert load.encode_attempts <= 1.2 * (load.encode_attempts - load.encode_retries)


def test_a_picture_that_ends_workers_is_refused_after_one_retry_and_hurts_nobody_else(checkpoint: Path) -> None:
    flags = {"module": "tests.faults.deadly_workers", "workers": 2, "metrics_listen": "127.0.0.1:0"}
    with replicas(checkpoint, 2, **flags) as both, served(checkpoint, *(each.address for each in both)) as client:

        def deaths() -> float:
            return sum(scrape(each.metrics)[DEATHS] for each in both)

        crowd = Crowd.taught(client)
        with crowd.asking(CALLERS):
            until(more(crowd.answered, CALLERS), "they are in full swing")
            assert refusal(client) == "POISON_ITEM"
            assert deaths() == 2
            assert refusal(client) == "POISON_ITEM"
            assert deaths() == 2, "it is not tried again"
            until(more(crowd.answered, 16 * CALLERS), "the others are served")
        assert set(crowd.outcomes) == {"right"}
        check_attempts(client)


@pytest.mark.soak
def test_a_picture_that_ends_encoders_is_refused_when_two_have_died_and_hurts_nobody_else(
    checkpoint: Path, tmp_path: Path
) -> None:
    """Two others take their places, and have begun before: what is remembered is so for a minute."""
    listing = tmp_path / "encoders"
    with replicas(checkpoint, 5, module="tests.faults.deadly_process") as (first, *rest):
        listing.write_text(f"{first.address}\n")
        with served(checkpoint, f"file://{listing}") as client:
            listing.write_text("\n".join(each.address for each in (first, *rest[:2])))
            until(lambda: usable(client, 3), "three are usable")
            crowd = Crowd.taught(client)
            with crowd.asking(CALLERS):
                until(more(crowd.answered, CALLERS), "they are in full swing")
                assert refusal_in_the_end(client) == "POISON_ITEM"
                until(lambda: usable(client, 1), "it has not reached the third one")
                assert refusal(client) == "POISON_ITEM"
                living = [each for each in (first, *rest) if each.alive]
                assert len(living) == 3
                listing.write_text("\n".join(each.address for each in living))
                until(lambda: usable(client, 3), "the others are there")
                assert refusal(client) == "POISON_ITEM"
                assert all(each.alive for each in living)
                until(more(crowd.answered, 8 * CALLERS), "all of them serve")
            assert set(crowd.outcomes) == {"right"}
            check_attempts(client)
