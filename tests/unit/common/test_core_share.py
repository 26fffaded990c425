"""On how many cores a process computes while others compute on the same ones."""

from __future__ import annotations

import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from common.hardware import usable_cores
from common.process import core_share
from common.process.core_share import CoreShare

Make = Callable[[int], tuple[CoreShare, list[int]]]


@pytest.fixture
def name() -> str:
    return f"twinlens-test-{secrets.token_hex(8)}"


@pytest.fixture
def make(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """A share of so many cores, which looks whenever it may, and what it was told to use."""
    monkeypatch.setattr(core_share, "_LOOK_SECONDS", 0.0)
    made: list[CoreShare] = []

    def one(threads: int) -> tuple[CoreShare, list[int]]:
        used: list[int] = []
        made.append(CoreShare(name, threads, used.append))
        return made[-1], used

    yield one
    for share in made:
        share.close()


def test_one_alone_has_all_and_two_have_half_each(make: Make) -> None:
    (one, first), (other, second) = make(8), make(8)
    with one.computing():
        assert first == []
        with other.computing():
            assert second == [4]
            one.look()
            assert first == [4]
        one.look()
        assert first == [4, 8]
    with other.computing():
        assert second == [4, 8]


def test_a_share_is_one_core_at_least(make: Make) -> None:
    shares = [make(2) for _ in range(3)]
    with shares[0][0].computing(), shares[1][0].computing(), shares[2][0].computing():
        assert [used for _, used in shares] == [[], [1], [1]]


def test_whoever_finds_no_free_claim_computes_all_the_same(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_share, "_CLAIMS", 1)
    (one, _), (other, used) = make(2), make(2)
    with one.computing(), other.computing():
        other.look()
    assert used == []


def test_modules_look_before_they_compute(make: Make) -> None:
    (one, used), (other, _) = make(2), make(2)
    layers = nn.Sequential(nn.Identity(), nn.Identity())
    one.between(layers)
    layers(torch.zeros(1))
    with one.computing():
        layers(torch.zeros(1))
        assert used == []
        with other.computing():
            layers(torch.zeros(1))
        assert used == [1]


def test_it_does_not_look_again_at_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_share, "_LOOK_SECONDS", 3600.0)
    (one, used), (other, _) = make(2), make(2)
    with one.computing(), other.computing():
        one.look()
        assert used == []


def test_the_claim_of_a_process_that_ends_is_free(name: str, make: Make) -> None:
    program = (
        "import sys; from common.process.core_share import CoreShare\n"
        "block = CoreShare(sys.argv[1], 2, print).computing(); block.__enter__(); print('claims', flush=True); input()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdin is not None
    assert child.stdout.readline() == "claims\n"
    share, used = make(2)
    with share.computing():
        assert used == [1]
        child.kill()
        child.wait()
        share.look()
        assert used == [1, 2]
    child.stdout.close()
    child.stdin.close()


def test_whoever_leaves_cores_to_others_shares_none() -> None:
    assert CoreShare.of_this_host(usable_cores() - 1, print) is None
    assert CoreShare.of_this_host(1, print) is None
    if usable_cores() > 1:
        share = CoreShare.of_this_host(usable_cores(), print)
        assert share is not None
        share.close()
