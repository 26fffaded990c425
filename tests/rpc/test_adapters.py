"""LoRA adapters of a running service: loaded and unloaded, chosen by a request's model, kept over an engine's death."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import httpx2 as httpx
import pytest
import torch

from tests.adapters import ALL, make_adapter
from tests.launch import Service, gateway, llm_server, send
from tests.peft_reference import PeftReference
from tests.rpc.pairs import LLM_FLAGS, answer, asked, greedy, holds_nothing, idle, lasting, refusal, tokens
from tests.scrape import labelled, picker_specs
from tests.waiting import until
from twinlens import LlmClient, TwinlensError, user, v1

PROMPT = user("Tell me at some length about two red circles.")


@pytest.fixture(scope="module")
def folder(checkpoints: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    for number in range(4):
        make_adapter(checkpoints("qwen3_vl"), root / str(number), seed=number)
    (root / "bad").mkdir()
    return root


@pytest.fixture(scope="module")
def llm(checkpoints: Callable[..., Path], folder: Path) -> Iterator[Service]:
    with llm_server(
        checkpoints("qwen3_vl"),
        **{**LLM_FLAGS, "lora_dir": folder, "lora_modules": "zero=0", "max_loras": 2, "max_loaded_loras": 4},
        metrics_listen="127.0.0.1:0",
    ) as running:
        yield running


@pytest.fixture(scope="module")
def client(llm: Service) -> Iterator[LlmClient]:
    with LlmClient(llm.address) as calls:
        yield calls


@pytest.fixture(autouse=True)
def _as_it_began(client: LlmClient) -> Iterator[None]:
    """One adapter, loaded at the start, before and after each test."""
    yield
    for adapter in client.get_info().adapters:
        if adapter.name != "zero":
            client.unload_adapter(adapter.name)
    until(lambda: holds_nothing(client), "nothing is held")


def refused(client: LlmClient, name: str, path: str) -> TwinlensError:
    before = list(client.get_info().adapters)
    with pytest.raises(TwinlensError) as error:
        client.load_adapter(name, path)
    assert list(client.get_info().adapters) == before, "nothing has changed"
    return error.value


def test_the_model_of_a_request_chooses(client: LlmClient) -> None:
    base = tokens(client, asked(PROMPT))
    assert tokens(client, asked(PROMPT, model=client.get_info().model)) == base
    zero = tokens(client, asked(PROMPT, model="zero"))
    assert zero != base
    loaded = client.load_adapter("one", "1")
    assert (loaded.name, loaded.rank, loaded.in_flight) == ("one", 4, 0)
    assert [adapter.name for adapter in client.get_info().adapters] == ["zero", "one"]
    one = tokens(client, asked(PROMPT, model="one"))
    assert len({tuple(each) for each in (base, zero, one)}) == 3
    client.load_adapter("again", "1")
    assert tokens(client, asked(PROMPT, model="again")) == one
    found = answer(client, asked(PROMPT, model="again")).choices[0].usage
    assert found.cached_tokens > 0, "the same adapter under another name has the same keys and values"
    unknown = refusal(client, asked(PROMPT, model="two"))
    assert (unknown.code, unknown.reason) == (grpc.StatusCode.NOT_FOUND, "UNKNOWN_MODEL")


def test_more_adapters_than_slots_take_turns(client: LlmClient) -> None:
    alone = {}
    for number in (1, 2, 3):
        client.load_adapter(str(number), str(number))
        alone[str(number)] = tokens(client, asked(PROMPT, greedy(24), model=str(number)))
    fills = client.get_load().adapter_fills
    streams = {name: client.generate(asked(PROMPT, greedy(24), model=name)) for name in alone}
    said = {name: [t for event in stream for t in event.delta.token_ids] for name, stream in streams.items()}
    assert said == alone
    assert client.get_load().adapter_fills > fills


def test_an_endpoint_picker_reads_which_adapters_run_and_which_wait(client: LlmClient, llm: Service) -> None:
    """Two run at most, so the third waits."""
    name = picker_specs()["loraSpec"]
    client.load_adapter("one", "1")
    client.load_adapter("two", "2")

    def said() -> dict[str, str]:
        ((labels, _),) = labelled(llm.metrics)[name]
        return labels

    with ExitStack() as streams:
        for adapter in ("zero", "one", "two"):
            stream = streams.enter_context(client.generate(asked(PROMPT, lasting(), model=adapter)))
            if adapter != "two":
                assert next(iter(stream)).HasField("started")
        expected = {"max_lora": "2", "running_lora_adapters": "one,zero", "waiting_lora_adapters": "two"}
        until(lambda: said() == expected, "a beat has come")
    until(lambda: said() == {"max_lora": "2", "running_lora_adapters": "", "waiting_lora_adapters": ""}, "another one")


def test_what_is_refused_changes_nothing(client: LlmClient) -> None:
    bad = grpc.StatusCode.INVALID_ARGUMENT
    for name, path, code, reason in (
        ("one", "nowhere", bad, "BAD_ADAPTER"),
        ("one", "../outside", bad, "BAD_ADAPTER"),
        ("one", "bad", bad, "BAD_ADAPTER"),
        ("", "1", bad, "BAD_NAME"),
        ("x" * 129, "1", bad, "BAD_NAME"),
        (client.get_info().model, "1", bad, "BAD_NAME"),
        ("zero", "1", grpc.StatusCode.FAILED_PRECONDITION, "ADAPTER_EXISTS"),
    ):
        error = refused(client, name, path)
        assert (error.code, error.reason) == (code, reason), (name, path)
    for number in (1, 2, 3):
        client.load_adapter(str(number), str(number))
    assert refused(client, "more", "1").reason == "TOO_MANY_ADAPTERS"
    with pytest.raises(TwinlensError) as error:
        client.unload_adapter("nobody")
    assert (error.value.code, error.value.reason) == (grpc.StatusCode.NOT_FOUND, "UNKNOWN_ADAPTER")


def test_an_answer_that_has_begun_ends_with_the_adapter_that_is_unloaded(client: LlmClient) -> None:
    client.load_adapter("one", "1")
    whole = tokens(client, asked(PROMPT, greedy(16), model="one"))
    with client.generate(asked(PROMPT, lasting(), model="one")) as stream:
        events = iter(stream)
        assert next(events).HasField("started")
        assert client.unload_adapter("one").in_flight == 1
        assert refusal(client, asked(PROMPT, model="one")).reason == "UNKNOWN_MODEL"
        said: list[int] = []
        while len(said) < len(whole):
            said += next(events).delta.token_ids
        assert said[: len(whole)] == whole
    client.load_adapter("one", "2")
    assert tokens(client, asked(PROMPT, greedy(16), model="one")) != whole, "the name is another adapter's now"


def test_an_engine_that_ends_is_followed_by_one_with_the_same_adapters(client: LlmClient, llm: Service) -> None:
    client.load_adapter("one", "1")
    whole = tokens(client, asked(PROMPT, greedy(48), model="one"))
    with client.generate(asked(PROMPT, greedy(1500), model="one")) as stream:
        events = iter(stream)
        assert next(events).HasField("started")
        send(*llm.children("llm_service.engine"), signal.SIGKILL)
        said = [token for event in events for token in event.delta.token_ids]
    assert (said[: len(whole)], len(said)) == (whole, 1500)


def test_an_adapter_whose_folder_has_changed_is_lost_with_the_engine(
    client: LlmClient, llm: Service, folder: Path, checkpoints: Callable[..., Path]
) -> None:
    make_adapter(checkpoints("qwen3_vl"), folder / "changing", seed=7)
    client.load_adapter("changing", "changing")
    make_adapter(checkpoints("qwen3_vl"), folder / "changing", seed=8)
    send(*llm.children("llm_service.engine"), signal.SIGKILL)
    until(lambda: [each.name for each in client.get_info().adapters] == ["zero"], "what is lost has no name")
    assert refusal(client, asked(PROMPT, model="changing")).reason == "UNKNOWN_MODEL"
    assert len(tokens(client, asked(PROMPT, model="zero"))) == 8


def test_the_gateway_lists_adapters_and_sends_requests_to_them(client: LlmClient, llm: Service) -> None:
    with gateway(llm.address) as front, httpx.Client(base_url=f"http://{front.address}") as http:
        until(lambda: len(http.get("/v1/models").json()["data"]) == 2, "both are listed")
        base, zero = http.get("/v1/models").json()["data"]
        assert (zero["id"], zero["parent"]) == ("zero", base["id"])
        assert http.get("/v1/models/zero").json() == zero

        def said(model: str) -> str:
            body = {"model": model, "prompt": "Two red circles.", "max_tokens": 8, "temperature": 0}
            response = http.post("/v1/completions", json=body).json()
            assert response["model"] == model
            return response["choices"][0]["text"]

        assert said("zero") != said(base["id"])
        assert http.post("/v1/completions", json={"model": "none", "prompt": "x"}).status_code == 404


@pytest.mark.soak
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_two_ranks_give_the_tokens_of_peft_while_adapters_come_and_go(
    checkpoints: Callable[..., Path], tmp_path: Path, family: str
) -> None:
    directory, ids = checkpoints(family), [*range(20, 60)]
    given = [{"r": rank, "lora_alpha": 4 * rank, "target_modules": list(ALL[:4])} for rank in (2, 3, 8)]
    peft = PeftReference(directory, tmp_path, given)
    said = [peft.generate(number, {"input_ids": torch.tensor([ids])}, 48) for number in range(4)]
    assert len({tuple(each) for each in said}) == 4, "the adapters prove nothing"
    flags = {**LLM_FLAGS, "lora_dir": tmp_path, "max_loras": 2, "max_lora_rank": 8, "tp": 2}
    with llm_server(directory, light=False, **flags) as running, LlmClient(running.address) as calls:

        def begun(number: int) -> Iterator[v1.GenerateResponse]:
            model = peft.folders[number - 1].name if number else ""
            stream = iter(calls.generate(asked(v1.TokensInput(ids=ids), greedy(48), model=model)))
            assert next(stream).HasField("started")
            return stream

        def rest(stream: Iterator[v1.GenerateResponse]) -> list[int]:
            return [token for event in stream for token in event.delta.token_ids]

        first, second, third = (path.name for path in peft.folders)
        calls.load_adapter(first, first)
        streams = [begun(0), begun(1)]
        calls.load_adapter(second, second)
        streams.append(begun(2))
        calls.unload_adapter(first)
        calls.load_adapter(third, third)
        streams += [begun(3), begun(0), begun(2)]
        assert [rest(each) for each in streams] == [said[number] for number in (0, 1, 2, 3, 0, 2)]
        assert [each.name for each in calls.get_info().adapters] == [second, third]
        assert calls.get_load().adapter_fills >= 3
        until(lambda: idle(calls), "nothing is held")


def test_without_a_folder_there_are_none(checkpoints: Callable[..., Path]) -> None:
    with llm_server(checkpoints("qwen3_vl"), **LLM_FLAGS) as plain, LlmClient(plain.address) as calls:
        assert refused(calls, "one", "1").reason == "ADAPTERS_OFF"
