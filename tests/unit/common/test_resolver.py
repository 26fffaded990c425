"""Where encoders are: lists and names that are read again, and what cannot be read stands for what it last said."""

from __future__ import annotations

import _thread
import asyncio
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from common.rpc.resolver import Resolver


async def test_a_list_is_read_again_and_comments_are_skipped(tmp_path: Path) -> None:
    listing = tmp_path / "encoders"
    listing.write_text("10.0.0.1:7001\n\n# a comment\n10.0.0.2:7001  # another\n")
    resolver = Resolver([f"file://{listing}", "10.0.0.9:7001"])
    assert set(await resolver.resolve()) == {"10.0.0.1:7001", "10.0.0.2:7001", "10.0.0.9:7001"}
    listing.write_text("10.0.0.3:7001")
    assert set(await resolver.resolve()) == {"10.0.0.3:7001", "10.0.0.9:7001"}


@pytest.mark.parametrize("text", ["", "\n", "# nobody\n", "no address\n", "10.0.0.1:70010\n", None], ids=repr)
async def test_a_list_that_is_being_written_stands_for_what_it_last_said(tmp_path: Path, text: str | None) -> None:
    listing = tmp_path / "encoders"
    listing.write_text("10.0.0.1:7001\n")
    resolver = Resolver([f"file://{listing}"])
    assert set(await resolver.resolve()) == {"10.0.0.1:7001"}
    if text is None:
        listing.unlink()
    else:
        listing.write_text(text)
    assert set(await resolver.resolve()) == {"10.0.0.1:7001"}


async def test_a_name_that_no_thread_can_look_up_just_now_stands_for_what_it_last_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resolver = Resolver(["dns:///localhost:7001"])
    before = await resolver.resolve()
    assert before

    def no_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_thread, "start_new_thread", no_thread)
    assert await resolver.resolve() == before


async def test_a_look_up_that_hangs_can_be_left(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, over = threading.Event(), threading.Event()

    def hangs(*_: Any, **__: Any) -> list[Any]:
        begun.set()
        over.wait()
        return []

    monkeypatch.setattr(socket, "getaddrinfo", hangs)
    looking = asyncio.create_task(Resolver(["dns:///localhost:7001"]).resolve())
    await asyncio.to_thread(begun.wait)
    looking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await looking
    over.set()
