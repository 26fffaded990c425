"""LoRA adapters that callers of a gateway had loaded, at LLM services that come later, or come back."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from tests.adapters import make_adapter
from tests.gateway.llm_replicas import LlmReplica
from tests.gateway.test_adapters import LOAD, UNLOAD
from tests.gateway.trio import Door
from tests.launch import gateway
from tests.waiting import until
from twinlens import LlmClient

ASKED = {"model": "mine", "prompt": "Two red circles.", "max_tokens": 4, "temperature": 0}


def names(replica: LlmReplica) -> set[str]:
    with LlmClient(replica.address) as client:
        return {adapter.name for adapter in client.get_info().adapters}


def text_of(door: Door) -> str:
    reply = door.post("/v1/completions", ASKED)
    assert reply.status == 200, reply.body
    return str(json.loads(reply.body)["choices"][0]["text"])


def test_services_that_come_later_or_come_back_are_brought_to_what_callers_asked_for(
    checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    make_adapter(checkpoints("qwen3_vl"), tmp_path / "adapters/both", seed=1)
    listed = tmp_path / "services"
    with ExitStack() as stack:
        first, second = (LlmReplica(checkpoints("qwen3_vl"), lora_dir=tmp_path / "adapters") for _ in range(2))
        for replica in (first, second):
            stack.callback(replica.stop)
            replica.start()
        listed.write_text(first.address)
        door = Door(stack.enter_context(gateway(f"file://{listed}", allow_lora_updates="on")))
        until(lambda: door.metric("llm_services_usable") == 1, "one can be used")
        assert door.post(LOAD, {"lora_name": "mine", "lora_path": "both"}).status == 200
        said = text_of(door)

        listed.write_text(f"{first.address}\n{second.address}\n")
        until(lambda: names(second) == {"mine"}, "one that comes later has it")
        first.stop()
        first.start()
        until(lambda: names(first) == {"mine"}, "one that comes back has it again")
        second.kill()
        until(lambda: door.metric("llm_services_usable") == 1 and text_of(door) == said, "it answers as before")
        assert door.metric("kept_adapters") == 1

        assert door.post(LOAD, {"lora_name": "other", "lora_path": "both"}).status == 502, "one cannot be reached"
        assert door.post(UNLOAD, {"lora_name": "mine"}).status == 502
        second.start()
        until(lambda: names(second) == {"other"}, "it has what was asked for meanwhile, and no more")
        until(lambda: door.metric("missing_adapters") == 0, "nothing is missing")
        changes = 'late_adapter_changes_total{change="load",outcome="%s"}'
        assert [door.metric(changes % outcome) for outcome in ("refused", "given_up")] == [0, 0]
        assert door.metric(changes % "done") >= 3


def test_an_adapter_that_is_loaded_again_comes_to_services_that_had_refused_it(
    checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    own = [tmp_path / name for name in ("one", "other")]
    make_adapter(checkpoints("qwen3_vl"), own[0] / "both", seed=1)
    own[1].mkdir()
    with ExitStack() as stack:
        first, second = (LlmReplica(checkpoints("qwen3_vl"), lora_dir=folder) for folder in own)
        for replica in (first, second):
            stack.callback(replica.stop)
            replica.start()
        door = Door(stack.enter_context(gateway(first.address, second.address, allow_lora_updates="on")))
        until(lambda: door.metric("llm_services_usable") == 2, "both can be used")
        refused = 'late_adapter_changes_total{change="load",outcome="refused"}'
        assert door.post(LOAD, {"lora_name": "mine", "lora_path": "both"}).status == 502
        assert door.metric("missing_adapters") == 1
        second.stop()
        second.start()
        until(lambda: door.metric(refused) == 1, "it is asked again when it comes again")
        make_adapter(checkpoints("qwen3_vl"), own[1] / "both", seed=1)
        again = door.post(LOAD, {"lora_name": "mine", "lora_path": "both"})
        outcomes = {each["address"]: each["code"] for each in json.loads(again.body)["services"]}
        assert (again.status, outcomes) == (502, {first.address: "ADAPTER_EXISTS", second.address: None})
        assert (names(first), names(second)) == ({"mine"}, {"mine"})
        assert (door.metric("missing_adapters"), door.metric(refused)) == (0, 1)
