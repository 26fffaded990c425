"""A host that lends its devices keeps its ranks running, whatever one start of them comes to."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from common.process.children import Child, ChildDied
from llm_service.settings import Joined, RankPlace
from llm_service.worker import node


@pytest.mark.parametrize("error", [ChildDied("a rank has ended"), OSError("Cannot allocate memory")])
async def test_ranks_that_could_not_be_started_or_have_ended_are_started_again(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    again, ends = asyncio.Event(), [error]

    async def run(_: RankPlace, __: float) -> None:
        if ends:
            raise ends.pop()
        again.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(node, "_run", run)
    keeping = asyncio.create_task(node._keep(cast(RankPlace, None), 1.0, pause=0))
    waiting = asyncio.create_task(again.wait())
    await asyncio.wait([keeping, waiting], return_when=asyncio.FIRST_COMPLETED)
    assert not keeping.done()
    assert again.is_set()
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)


async def test_a_rank_that_hangs_before_it_has_joined_is_not_waited_for_without_end() -> None:
    class Hangs:
        async def receive(self) -> Joined:
            return await asyncio.Future()

    with pytest.raises(ChildDied, match=r"not joined after 0.1 seconds"):
        await node._joined([cast(Child[Joined], Hangs())], 0.1)
