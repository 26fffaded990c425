"""LoRA adapters that callers of the gateway load and unload: at every LLM service, and what is said where some fail."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.adapters import make_adapter
from tests.gateway.trio import Door, Reply
from tests.launch import Service, gateway, llm_server
from tests.rpc.pairs import LLM_FLAGS
from tests.waiting import until
from twinlens import LlmClient

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
NOBODY = "127.0.0.1:1"
GOOD = {"lora_name": "x", "lora_path": "both"}


@pytest.fixture(scope="module")
def services(
    checkpoints: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Service, Service]]:
    """Two services of one model, of which each has an adapter of its own on its disk, and both have `both`."""
    with ExitStack() as stack:
        running = []
        for number, own in enumerate(("first", "second")):
            root = tmp_path_factory.mktemp(own)
            for name in ("both", own):
                make_adapter(checkpoints("qwen3_vl"), root / name, seed=number)
            flags = {**LLM_FLAGS, "lora_dir": root, "max_loras": 2}
            running.append(stack.enter_context(llm_server(checkpoints("qwen3_vl"), **flags)))
        yield running[0], running[1]


@pytest.fixture(scope="module")
def door(services: tuple[Service, Service]) -> Iterator[Door]:
    with gateway(*(each.address for each in services), allow_lora_updates="on") as running:
        front = Door(running)
        until(lambda: front.metric("llm_services_usable") == 2, "both can be used")
        yield front


def load(door: Door, name: str, path: str, **fields: Any) -> Reply:
    return door.post(LOAD, {"lora_name": name, "lora_path": path, **fields})


def unload(door: Door, name: str, **fields: Any) -> Reply:
    return door.post(UNLOAD, {"lora_name": name, **fields})


def names(service: Service) -> list[str]:
    with LlmClient(service.address) as client:
        return [adapter.name for adapter in client.get_info().adapters]


def listed(door: Door) -> list[str]:
    return [each["id"] for each in json.loads(door.get("/v1/models").body)["data"] if "parent" in each]


def test_an_adapter_comes_to_every_service_and_goes(door: Door, services: tuple[Service, Service]) -> None:
    loaded = load(door, "mine", "both", load_inplace=False)
    assert loaded.status == 200, loaded.body
    addresses = sorted(each.address for each in services)
    said = json.loads(loaded.body)
    assert (said["object"], said["lora_name"], sorted(said["services"])) == ("lora_adapter.loaded", "mine", addresses)
    assert listed(door) == ["mine"], "it is listed at once"
    assert [names(each) for each in services] == [["mine"], ["mine"]]
    asked = {"model": "mine", "prompt": "Two red circles.", "max_tokens": 4}
    assert [door.post("/v1/completions", asked).status for _ in range(4)] == [200] * 4
    again = load(door, "mine", "both")
    assert (again.status, again.error["code"], again.error["param"]) == (400, "ADAPTER_EXISTS", "lora_name")
    assert "already been loaded" in again.error["message"]
    gone = unload(door, "mine")
    assert (gone.status, json.loads(gone.body)["object"]) == (200, "lora_adapter.unloaded")
    assert listed(door) == []
    assert door.post("/v1/completions", asked).status == 404
    missing = unload(door, "mine")
    assert (missing.status, missing.error["code"], missing.error["param"]) == (404, "UNKNOWN_ADAPTER", "lora_name")


def test_what_only_some_services_do_is_told_of_each(door: Door, services: tuple[Service, Service]) -> None:
    first, second = (each.address for each in services)
    reply = load(door, "half", "first")
    said = json.loads(reply.body)
    assert (reply.status, said["error"]["code"], reply.headers["x-should-retry"]) == (502, "NOT_EVERYWHERE", "false")
    outcomes = {each.pop("address"): each for each in said["services"]}
    assert outcomes[first] == {"code": None}
    assert outcomes[second]["code"] == "BAD_ADAPTER"
    assert "no such folder" in outcomes[second]["message"]
    assert [names(each) for each in services] == [["half"], []]
    assert unload(door, "half").status == 200, "no service has it then"
    assert [names(each) for each in services] == [[], []]


def test_a_service_that_cannot_be_reached_is_one_of_them(services: tuple[Service, Service]) -> None:
    with gateway(services[0].address, NOBODY, allow_lora_updates="on") as running:
        front = Door(running)
        until(lambda: front.metric("llm_services_usable") == 1, "one can be used")
        reply = load(front, "lone", "both")
        outcomes = {each["address"]: each["code"] for each in json.loads(reply.body)["services"]}
        assert (reply.status, outcomes) == (502, {services[0].address: None, NOBODY: "NO_LLM_SERVICE"})
        with LlmClient(services[0].address) as client:
            client.unload_adapter("lone")


@pytest.mark.parametrize(
    ("path", "body", "answer"),
    [
        (LOAD, {"lora_name": "x", "lora_path": "../outside"}, (400, "BAD_ADAPTER", "lora_path")),
        (LOAD, {"lora_name": "", "lora_path": "both"}, (400, "BAD_NAME", "lora_name")),
        (LOAD, {"lora_name": "x"}, (400, "BAD_FIELD", "lora_path")),
        (LOAD, {**GOOD, "load_inplace": True}, (400, "FIELD_NOT_SERVED", "load_inplace")),
        (LOAD, {**GOOD, "base_model_name": "other"}, (404, "UNKNOWN_MODEL", "base_model_name")),
        (UNLOAD, {"lora_name": 5}, (400, "BAD_FIELD", "lora_name")),
    ],
)
def test_what_no_service_can_do_is_refused_by_name(
    door: Door, services: tuple[Service, Service], path: str, body: dict[str, Any], answer: tuple[int, str, str]
) -> None:
    reply = door.post(path, body)
    assert (reply.status, reply.error["code"], reply.error["param"]) == answer
    assert [names(each) for each in services] == [[], []]


def test_over_several_models_the_base_is_named(checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    make_adapter(checkpoints("qwen3_vl"), tmp_path / "mine", seed=1)
    flags = {**LLM_FLAGS, "lora_dir": tmp_path, "max_loras": 2}
    with ExitStack() as stack:
        one, other = (
            stack.enter_context(llm_server(checkpoints("qwen3_vl"), **{**flags, "served_model_name": name}))
            for name in ("one", "other,also")
        )
        running = stack.enter_context(gateway(one.address, other.address, allow_lora_updates="on"))
        front = Door(running)
        until(lambda: front.metric("llm_services_usable") == 2, "both can be used")
        unclear = load(front, "mine", "mine")
        assert (unclear.status, unclear.error["code"], unclear.error["param"]) == (400, "BAD_FIELD", "base_model_name")
        assert load(front, "mine", "mine", base_model_name="other").status == 200
        assert (names(one), names(other)) == ([], ["mine"])
        assert unload(front, "mine", base_model_name="also").status == 200
        assert names(other) == []
        taken = load(front, "also", "mine", base_model_name="other")
        assert (taken.status, taken.error["param"]) == (400, "lora_name")


def test_nobody_changes_anything_unless_that_is_allowed(services: tuple[Service, Service]) -> None:
    with gateway(services[0].address) as running:
        front = Door(running)
        for reply in (load(front, "x", "both"), unload(front, "x")):
            assert (reply.status, reply.error["code"]) == (404, "NOT_FOUND")
            assert "only if the gateway has --allow-lora-updates" in reply.error["message"]
