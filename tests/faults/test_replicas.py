"""Encoders that die, freeze or are replaced under load: no caller notices anything but time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import pytest

from tests.faults.replicas import Crowd, Replica, more, question, replicas
from tests.launch import llm_server
from tests.rpc.pairs import LLM_FLAGS, answer, asked, idle, usable
from tests.waiting import until
from twinlens import LlmClient, TwinlensError, user

# Little room for rows and no prefix cache: nearly every picture has to come from an encoder again.
FORGETFUL: dict[str, object] = {**LLM_FLAGS, "row_cache_bytes": "300KiB", "prefix_cache": False}
STREAMS = 16


@contextmanager
def served(checkpoint: Path, *encoders: str, **flags: object) -> Iterator[LlmClient]:
    """An LLM service with these encoders, all of them usable; asserts that nothing is held at the end."""
    with llm_server(checkpoint, *encoders, **{**FORGETFUL, **flags}) as llm, LlmClient(llm.address) as client:
        until(lambda: usable(client, len(encoders)), "all encoders are usable")
        yield client
        until(lambda: idle(client), "nothing is held")


def sees(client: LlmClient, replica: Replica) -> bool:
    """Whether the LLM service takes this encoder for usable."""
    return any(encoder.address == replica.address and encoder.usable for encoder in client.get_load().encoders)


@pytest.mark.soak
def test_an_encoder_that_is_killed_again_and_again_costs_no_caller_an_error(checkpoint: Path) -> None:
    with replicas(checkpoint, 2) as both, served(checkpoint, *(each.address for each in both)) as client:
        crowd = Crowd.taught(client)
        with crowd.asking(STREAMS):
            for round_ in range(4):
                victim = both[round_ % 2]
                until(more(crowd.answered, 2 * STREAMS), "they are in full swing")
                victim.kill()
                until(more(crowd.answered, STREAMS), "the other one serves all")
                victim.start()
                until(lambda: usable(client, 2), "it is back")
        load = client.get_load()
        assert set(crowd.outcomes) == {"right"}
        assert load.encode_retries <= 0.2 * load.encode_attempts + 64


@pytest.mark.parametrize("shared_memory", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_a_frozen_encoder_is_noticed_and_taken_back_when_it_thaws(checkpoint: Path, shared_memory: bool) -> None:
    with (
        replicas(checkpoint, 2, shared_memory=shared_memory) as both,
        served(checkpoint, *(each.address for each in both)) as client,
    ):
        crowd = Crowd.taught(client)
        with crowd.asking(STREAMS):
            until(more(crowd.answered, STREAMS), "they are in full swing")
            both[0].freeze()
            until(lambda: not sees(client, both[0]), "it is noticed")
            until(more(crowd.answered, STREAMS), "the other one serves all")
            both[0].thaw()
            until(lambda: sees(client, both[0]), "it is taken back")
        assert set(crowd.outcomes) == {"right"}


@pytest.mark.soak
def test_five_rolling_restarts_under_load_fail_no_request(checkpoint: Path) -> None:
    with replicas(checkpoint, 2) as both, served(checkpoint, *(each.address for each in both)) as client:
        crowd = Crowd.taught(client)
        crowd.pause = 0.05  # encoders that start, ten times over, need the machine as well
        with crowd.asking(STREAMS // 4):
            for replica in both * 5:
                until(more(crowd.answered, 2), "requests are served all the while")
                replica.stop()  # SIGTERM: streams under way end well
                replica.start()
                until(lambda: usable(client, 2), "it is back")
        assert set(crowd.outcomes) == {"right"}


def test_the_only_encoder_killed_is_an_honest_answer_and_text_goes_on(checkpoint: Path) -> None:
    with replicas(checkpoint, 1) as (only,), served(checkpoint, only.address) as client:
        right = answer(client, question(1)).choices[0].token_ids
        words = answer(client, asked(user("hello"))).choices[0].token_ids
        only.kill()
        for number in (2, 4):
            with pytest.raises(TwinlensError) as error:
                answer(client, question(number))
            assert error.value.code is grpc.StatusCode.UNAVAILABLE
            assert error.value.retry_after is not None
        assert answer(client, asked(user("hello"))).choices[0].token_ids == words
        only.start()
        until(lambda: usable(client, 1), "it is back")
        assert answer(client, question(1)).choices[0].token_ids == right


@pytest.mark.soak
def test_encoders_that_come_and_go_serve_every_request(checkpoint: Path, tmp_path: Path) -> None:
    """1 → 3 → 1, by a file of addresses that is read again while serving."""
    listing = tmp_path / "encoders"
    with ExitStack() as stack:
        first, *others = stack.enter_context(replicas(checkpoint, 3))
        listing.write_text(f"{first.address}\n")
        client = stack.enter_context(served(checkpoint, f"file://{listing}"))
        crowd = Crowd.taught(client)
        with crowd.asking(STREAMS // 2):
            until(more(crowd.answered, STREAMS), "one serves all")
            listing.write_text("\n".join(each.address for each in (first, *others)))
            until(lambda: usable(client, 3), "three serve")
            until(more(crowd.answered, 2 * STREAMS), "three serve all")
            listing.write_text(f"{first.address}\n")
            until(lambda: usable(client, 1), "one serves again")
            until(more(crowd.answered, STREAMS), "one serves all")
        assert set(crowd.outcomes) == {"right"}
