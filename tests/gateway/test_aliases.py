"""A model that has several names: requests may ask for it by any of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.gateway.trio import Door
from tests.launch import gateway, llm_server
from tests.rpc.pairs import LLM_FLAGS
from tests.waiting import until
from twinlens import LlmClient

NAMES = "tiny,owner/Tiny-VL,tiny"


@pytest.fixture(scope="module")
def door(checkpoints: Callable[..., Path]) -> Iterator[Door]:
    """Its sampling is by the operator's settings alone."""
    settings = {"generation_config": "none", "override_generation_config": '{"temperature": 0, "max_new_tokens": 3}'}
    with ExitStack() as stack:
        flags = {**LLM_FLAGS, "served_model_name": NAMES, **settings}
        llm = stack.enter_context(llm_server(checkpoints("qwen3_vl"), **flags))
        with LlmClient(llm.address) as client:
            info = client.get_info()
        assert (info.model, list(info.aliases)) == ("tiny", ["owner/Tiny-VL"])
        front = Door(stack.enter_context(gateway(llm.address)))
        until(lambda: front.metric("llm_services_usable") == 1, "it can be used")
        yield front


def test_each_is_listed_and_answered_as_it_was_asked_for(door: Door) -> None:
    listed = json.loads(door.get("/v1/models").body)["data"]
    assert [each["id"] for each in listed] == ["tiny", "owner/Tiny-VL"]
    texts = set()
    for name in ("tiny", "owner/Tiny-VL"):
        assert json.loads(door.get(f"/v1/models/{name}").body)["id"] == name
        body = {"model": name, "prompt": "hello"}
        reply = door.post("/v1/completions", body)
        answer = json.loads(reply.body)
        assert (reply.status, answer["model"]) == (200, name)
        assert answer["usage"]["completion_tokens"] == 3, "as long as the operator's default"
        texts.add(answer["choices"][0]["text"])
    assert len(texts) == 1
    assert json.loads(door.post("/v1/completions", {"prompt": "hello"}).body)["model"] == "tiny"
    assert door.post("/v1/completions", {"model": "other", "prompt": "hello"}).error["code"] == "UNKNOWN_MODEL"
