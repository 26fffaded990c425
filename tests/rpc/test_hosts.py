"""A group whose ranks are spread over two hosts: two launches that share nothing but the network."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from tests import pictures
from tests.launch import Process, command_line, descendants, llm_server, send, start
from tests.ports import held_address
from tests.rpc.pairs import LLM_FLAGS, Pair, about, asked, greedy, tokens, usable
from tests.waiting import until
from twinlens import LlmClient, TwinlensError, user

PROMPTS = [
    about(pictures.encoded(pictures.photograph("coffee").resize((160, 120)))),
    user("Tell me about two red circles."),
]


@contextmanager
def other_host(model: Path, *flags: str, **environ: str) -> Iterator[Process]:
    """The second host, for the length of the block; it has to end on SIGTERM and leave no process behind."""
    process = start("llm_service", f"--model={model}", "--threads=1", *flags, environ={**os.environ, **environ})
    known: set[int] = set()
    try:
        yield process
        known = set(descendants(process.pid))
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
        until(lambda: not any(map(command_line, known)), "its ranks are gone")
    finally:
        for pid in {*known, *descendants(process.pid)}:
            send(pid, signal.SIGKILL)
        if process.poll() is None:
            process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.soak
def test_two_hosts_give_the_tokens_of_one_rank(qwen3: Pair) -> None:
    """The second of the two ranks on each host has its rows from the first."""
    folder, address, ranks = qwen3.checkpoint, held_address(), 4
    spread = {"tp": ranks, "nodes": 2, "rendezvous": address}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in spread.items()]
    expected = [tokens(qwen3.text, asked(prompt, greedy(32))) for prompt in PROMPTS]
    with (
        other_host(folder, *flags, "--node-rank=1") as second,
        llm_server(folder, qwen3.encoder.address, light=False, **LLM_FLAGS, **spread) as service,
        LlmClient(service.address) as two,
    ):
        assert second.stdout is not None
        here = ranks // 2
        assert second.stdout.readline() == f"ready ranks={here}-{ranks - 1}\n"
        until(lambda: usable(two, 1), "the encoder is usable")
        assert [tokens(two, asked(prompt, greedy(32))) for prompt in PROMPTS] == expected
        assert len(two.get_info().devices) == ranks
        assert len(service.children("llm_service.worker")) == here - 1


@pytest.mark.soak
def test_a_rank_that_dies_on_another_host_is_noticed_and_the_group_comes_back(checkpoints: Callable[..., Path]) -> None:
    """The hosts are told of each other by the variables that launchers set."""
    folder = checkpoints("qwen3_vl")
    launcher = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": held_address().rpartition(":")[2], "WORLD_SIZE": "2"}
    first = {**LLM_FLAGS, "tp": 2}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in launcher.items():
            patch.setenv(name, value)
        with (
            other_host(folder, "--tp=2", RANK="1") as second,
            llm_server(folder, light=False, **first) as service,
            LlmClient(service.address) as client,
        ):
            expected = tokens(client, asked(PROMPTS[1]))
            asking = asked(user("count"), greedy(100))
            undisturbed = tokens(client, asking)
            for fault in (signal.SIGKILL, signal.SIGSTOP):
                rank = lent(second)
                stream = iter(client.generate(asking))
                assert next(stream).HasField("started")
                os.kill(rank, fault)
                if fault is signal.SIGSTOP:  # nothing on its host can tell that it is frozen: its own connection does
                    until(lambda: not _serves(client), "the frozen rank is noticed")
                    send(rank, signal.SIGCONT)
                assert [token for event in stream for token in event.delta.token_ids] == undisturbed
                until(lambda: _serves(client), "the group is back")
                assert tokens(client, asked(PROMPTS[1])) == expected
            # While there is nothing to do it is missed after seconds, in which another one wants to take its place.
            os.kill(lent(second), signal.SIGKILL)
            until(lambda: not _serves(client), "it is missed")
            until(lambda: _serves(client), "the group is back")
            assert tokens(client, asked(PROMPTS[1])) == expected


@pytest.mark.soak
def test_a_rank_that_is_lost_while_hosts_are_awaited_is_missed_and_has_its_place_in_the_next_group(
    checkpoints: Callable[..., Path],
) -> None:
    """Two of four hosts never come."""
    folder, address = checkpoints("qwen3_vl"), held_address()
    flags = ["--tp=4", "--nodes=4", f"--rendezvous={address}"]
    with other_host(folder, *flags, "--node-rank=1") as second:
        with first_host(folder, *flags) as first:
            until(lambda: _has_joined(address, 1), "it has joined")
            os.kill(lent(second), signal.SIGKILL)
            assert first.wait(180) != 0, "its engine could not start"
        with first_host(folder, *flags):
            until(lambda: _has_joined(address, 1), "it has joined the next group")


@contextmanager
def first_host(model: Path, *flags: str) -> Iterator[Process]:
    """It serves once all have come."""
    process = start(
        "llm_service", f"--model={model}", "--threads=1", "--listen=127.0.0.1:0", *flags, environ={**os.environ}
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(120)
        assert process.stdout is not None
        process.stdout.close()


def _has_joined(address: str, rank: int) -> bool:
    host, _, port = address.rpartition(":")
    try:
        return bool(TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=1)).check([f"beat/{rank}"]))
    except RuntimeError:  # there is no store just now
        return False


def lent(host: Process) -> int:
    """The one rank of the other host."""
    (rank,) = [pid for pid, line in descendants(host.pid).items() if "llm_service.worker" in line]
    return rank


def _serves(client: LlmClient) -> bool:
    try:
        client.get_load()
    except TwinlensError:
        return False
    return True
