"""Which of a checkpoint's own adapters a prompt is computed with, by its items."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest

from common.errors import Unavailable
from common.media.item import Modality
from llm_service.engine.messages import AdapterRead
from llm_service.engine_client.client import EngineClient
from llm_service.generation.adapters import Adapters


class Engine:
    """Reads any folder but "broken"."""

    def __init__(self) -> None:
        self.read = list[str]()
        self.on_adapter_lost: Callable[[int], None] = lambda _: None

    async def load_adapter(self, path: str) -> AdapterRead:
        self.read.append(path)
        error = "it is broken" if path == "broken" else ""
        return AdapterRead(len(self.read), path.encode(), 4, error=error)


OF_MEDIA = {"image": "seen", "video": "seen", "audio": "heard"}


def adapters(engine: Engine, of_media: dict[str, str] = OF_MEDIA) -> Adapters:
    return Adapters(cast(EngineClient, engine), (), 1, enabled=False, of_media=of_media)


async def test_the_first_modality_that_a_prompt_has_says_which() -> None:
    made = adapters(engine := Engine())
    for path in ("seen", "heard"):
        await made.load_own(path)
    assert engine.read == ["seen", "heard"]
    every = [(), ("audio",), ("video",), ("audio", "image")]
    found = [made.of_media([Modality(kind) for kind in kinds]) for kinds in every]
    assert [each and each.digest for each in found] == [None, b"heard", b"seen", b"seen"]
    assert made.all == [], "they have no name"


async def test_without_its_own_adapter_a_prompt_is_not_computed() -> None:
    """One that an engine has lost, or cannot read."""
    made = adapters(engine := Engine())
    await made.load_own("heard")
    engine.on_adapter_lost(1)
    with pytest.raises(Unavailable, match="own adapter is lost"):
        made.of_media([Modality.AUDIO])
    assert made.of_media([]) is None
    with pytest.raises(Unavailable, match="it is broken"):
        await adapters(Engine(), {"audio": "broken"}).load_own("broken")


async def test_a_request_that_holds_one_at_the_end_is_told() -> None:
    made = adapters(Engine())
    await made.load_own("heard")
    found = made.of_media([Modality.AUDIO])
    assert found is not None
    made.begin(found)
    with pytest.raises(AssertionError, match="held by nobody"):
        made.check_idle()
    made.end(found)
    made.check_idle()
