"""Replicas that come, go, and whose certificates are replaced."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from common.rpc.replica_set import ReplicaSet, Upkeep
from common.rpc.resolver import Resolver
from tests.clock import turns


class Files:
    """Certificates that a test replaces."""

    replaced = False

    def changed(self) -> bool:
        return self.replaced


class Kept:
    """What was done with replicas, which are the addresses they are at; `broken` files cannot be read."""

    def __init__(self, listed: Path) -> None:
        self.done: list[tuple[str, str, float | None]] = []
        self.broken = False
        self.end = asyncio.Event()
        self.files = Files()
        upkeep = Upkeep(self.open, self.renew, self.close)
        self.set = ReplicaSet("test", Resolver([f"file://{listed}"]), self.files, upkeep, grace=7.0)  # type: ignore[arg-type]

    def open(self, address: str, _name: str) -> str:
        if self.broken:
            raise OSError("not whole")
        self.done.append(("open", address, None))
        return address

    def renew(self, replica: str, grace: float) -> Coroutine[Any, Any, None]:
        if self.broken:
            raise OSError("not whole")
        return self._under_way("renewed", replica, grace)

    async def close(self, replica: str, grace: float | None) -> None:
        await self._under_way("closed", replica, grace)

    async def _under_way(self, what: str, replica: str, grace: float | None) -> None:
        if grace is not None:
            await self.end.wait()
        self.done.append((what, replica, grace))


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    path = tmp_path / "replicas"
    path.write_text("a:1\nb:1\n")
    return path


async def test_those_on_the_list_are_known_and_one_that_leaves_has_time_to_end(listed):
    kept = Kept(listed)
    await kept.set.look()
    assert set(kept.set.known) == {"a:1", "b:1"}
    listed.write_text("b:1\nc:1\n")
    await kept.set.look()
    assert set(kept.set.known) == {"b:1", "c:1"}
    kept.end.set()
    await turns()
    assert ("closed", "a:1", 7.0) in kept.done
    await kept.set.close()
    assert {each for each in kept.done if each[2] is None} >= {("closed", "b:1", None), ("closed", "c:1", None)}
    assert not kept.set.known


async def test_at_the_end_nobody_waits_for_what_is_under_way(listed):
    kept = Kept(listed)
    await kept.set.look()
    listed.write_text("b:1\n")
    await kept.set.look()
    await kept.set.close()
    assert ("closed", "a:1", 7.0) not in kept.done


async def test_replaced_certificates_are_taken_by_each_and_what_cannot_be_read_stays_as_it_was(listed):
    kept = Kept(listed)
    await kept.set.look()
    kept.files.replaced = kept.broken = True
    listed.write_text("a:1\nb:1\nc:1\n")
    await kept.set.look()
    assert set(kept.set.known) == {"a:1", "b:1"}
    kept.broken = False
    await kept.set.look()
    kept.end.set()
    await turns()
    assert {each for each in kept.done if each[0] == "renewed"} == {("renewed", "a:1", 7.0), ("renewed", "b:1", 7.0)}
    assert set(kept.set.known) == {"a:1", "b:1", "c:1"}
    await kept.set.close()
