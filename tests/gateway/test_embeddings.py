"""`POST /v1/embeddings`, asked by OpenAI's client, by vLLM's callers, and over services that go away."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import grpc
import openai
import pytest
from openai.types import embedding_create_params

from gateway.api.embeddings import EmbeddingRequest
from tests.gateway.scripted import Scripted, scripted
from tests.gateway.trio import PICTURE, Door, Trio, image, said, text, video
from tests.launch import gateway
from tests.rpc.pairs import asked, lasting
from tests.unit.twinlens.conftest import serving
from tests.unit.twinlens.fakes import FakeLlm
from tests.waiting import until
from twinlens import image as picture
from twinlens import system, user, v1
from twinlens import video as film

PATH = "/v1/embeddings"


@pytest.fixture(scope="module")
def script() -> Iterator[Scripted]:
    with scripted(max_prompts=4) as running:
        yield running


def post(door: Scripted, **fields: Any) -> tuple[int, Any, list[v1.EmbedRequest]]:
    door.llm.to_embed.clear()
    reply = door.post(PATH, fields, {"x-request-id": "same"})
    return reply.status, json.loads(reply.body), list(door.llm.to_embed)


def refused(door: Scripted, **fields: Any) -> tuple[str, str | None]:
    status, body, asked = post(door, **fields)
    assert (status, asked) == (400, [])
    return body["error"]["code"], body["error"]["param"]


def test_openais_client_gets_the_vectors_of_the_llm_service(door: Trio) -> None:
    theirs = [door.services.text.embed(v1.TextInput(prompt=each)) for each in ("Hello", "Bye")]
    ours = door.client.embeddings.create(model=door.model, input=["Hello", "Bye"])
    assert [each.embedding for each in ours.data] == [list(each.values) for each in theirs]
    assert [each.index for each in ours.data] == [0, 1]
    assert (ours.object, ours.data[0].object, ours.model) == ("list", "embedding", door.model)
    assert ours.usage.prompt_tokens == ours.usage.total_tokens == sum(each.usage.prompt_tokens for each in theirs)
    floats = door.client.embeddings.create(model=door.model, input="Hello", encoding_format="float")
    assert floats.data[0].embedding == ours.data[0].embedding
    ids = door.services.text.tokenize("Hello")
    assert door.client.embeddings.create(model=door.model, input=[ids, ids]).data[1].embedding == list(theirs[0].values)
    few = door.client.embeddings.create(model=door.model, input=ids, dimensions=8, user="me").data[0].embedding
    assert few == list(door.services.text.embed(v1.TextInput(prompt="Hello"), dimensions=8).values)


def test_conversations_with_media_are_embedded_as_the_llm_service_lays_them_out(door: Trio) -> None:
    instruction, empty = said("Represent it.", role="system"), said(text(""), role="assistant")
    shown = [instruction, said(image(), text("A cat."))]
    moving = [instruction, said(video())]
    theirs = [
        door.services.text.embed([system("Represent it."), user(picture(PICTURE), "A cat.")]),
        door.services.text.embed([system("Represent it."), user(film(_content(video())))]),
    ]
    reply = json.loads(door.post(PATH, {"messages": [shown, moving], "model": door.model}).body)
    assert [each["embedding"] for each in reply["data"]] == [pytest.approx(list(each.values)) for each in theirs]
    assert reply["usage"]["prompt_tokens"] == sum(each.usage.prompt_tokens for each in theirs)
    as_vllm = {"messages": [*shown, empty], "continue_final_message": True, "add_special_tokens": True}
    one = json.loads(door.post(PATH, as_vllm | {"encoding_format": "float"}).body)
    assert one["data"][0]["embedding"] == pytest.approx(list(theirs[0].values))
    again = json.loads(door.post(PATH, {"messages": shown}).body)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def _content(part: dict[str, Any]) -> bytes:
    return base64.b64decode(part["video_url"]["url"].partition(",")[2])


def test_models_say_what_their_embeddings_are(door: Trio) -> None:
    told = door.services.text.get_info().embeddings
    (model,) = json.loads(door.get("/v1/models").body)["data"]
    assert model["embeddings"] == {"dimensions": told.dimensions, "pooling": "last", "normalized": True}


def test_every_field_of_openais_is_served(script: Scripted) -> None:
    assert set(embedding_create_params.EmbeddingCreateParams.__annotations__) <= set(EmbeddingRequest.model_fields)
    status, body, (asked,) = post(
        script, input="x", model="demo", dimensions=1, cache_salt="mine", priority=3, max_handovers=0, user="me"
    )
    assert status == 200, body
    wanted = v1.EmbedRequest(request_id="same", model="demo", dimensions=1, cache_salt="mine", priority=3)
    wanted.max_handovers = 0
    wanted.text.prompt = "x"
    assert asked == wanted
    assert body["data"] == [{"object": "embedding", "index": 0, "embedding": [pytest.approx(0.6)]}]
    details = {"prompt_tokens": 9, "completion_tokens": 0, "total_tokens": 9}
    assert body["usage"] == details | {"prompt_tokens_details": {"cached_tokens": 4}}


def test_base64_is_float32_with_the_lowest_byte_first(script: Scripted) -> None:
    _, body, _ = post(script, input="x", encoding_format="base64")
    assert struct.unpack("<2f", base64.b64decode(body["data"][0]["embedding"])) == pytest.approx((0.6, -0.8))


def test_each_of_several_prompts_has_a_name_of_its_own(script: Scripted) -> None:
    _, body, asked = post(script, input=["a", "b"])
    assert {each.request_id for each in asked} == {"same-0", "same-1"}
    assert (body["id"], body["usage"]["prompt_tokens"]) == ("embd-same", 18)


def test_settings_of_media_and_templates_go_with_messages(script: Scripted) -> None:
    settings = {"mm_processor_kwargs": {"max_pixels": 4096}, "chat_template_kwargs": {"enable_thinking": False}}
    _, _, (asked,) = post(script, messages=[said(image())], **settings)
    assert asked.chat.messages[0].parts[0].media.options.max_pixels == 4096
    assert (asked.chat.HasField("thinking"), asked.chat.thinking) == (True, False)
    for name, value in settings.items():
        assert refused(script, input="x", **{name: value}) == ("BAD_FIELD", None)


@pytest.mark.parametrize(("side", "end"), [(None, True), ("right", True), ("left", False)])
def test_prompts_are_cut_at_their_ends_unless_the_caller_says_otherwise(
    script: Scripted, side: str | None, end: bool
) -> None:
    _, _, (asked,) = post(script, input="x", truncate_prompt_tokens=5, truncation_side=side)
    assert (asked.truncate_prompt_tokens, asked.truncate_end) == (5, end)
    _, _, (asked,) = post(script, input="x", truncation_side=side)
    assert (asked.HasField("truncate_prompt_tokens"), asked.truncate_end) == (False, False)


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({}, "BAD_FIELD", None),
        ({"input": "x", "messages": [said("x")]}, "BAD_FIELD", None),
        ({"input": []}, "TOO_MANY_PROMPTS", "input"),
        ({"input": ["x"] * 5}, "TOO_MANY_PROMPTS", "input"),
        ({"messages": [[said("x")]] * 5}, "TOO_MANY_PROMPTS", "messages"),
        ({"messages": []}, "BAD_FIELD", "messages"),
        ({"input": [[5], "x"]}, "BAD_FIELD", "input[1]"),
        ({"input": "x", "encoding_format": "hex"}, "BAD_FIELD", "encoding_format"),
        ({"input": "x", "truncate_prompt_tokens": "5"}, "BAD_FIELD", "truncate_prompt_tokens"),
        ({"input": "x", "truncation_side": "end"}, "BAD_FIELD", "truncation_side"),
        ({"input": "x", "normalize": True}, "FIELD_NOT_SERVED", "normalize"),
        ({"input": "x", "stream": True}, "FIELD_NOT_SERVED", "stream"),
        ({"messages": [said("x")], "continue_final_message": True}, "BAD_FIELD", "continue_final_message"),
        (
            {"messages": [said("x"), said("y", role="assistant")], "continue_final_message": True},
            "BAD_FIELD",
            "continue_final_message",
        ),
        (
            {
                "messages": [said("x"), said("", role="assistant") | {"reasoning_content": "y"}],
                "continue_final_message": True,
            },
            "BAD_FIELD",
            "continue_final_message",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_served_is_refused(script: Scripted, fields: Any, code: str, param: str | None) -> None:
    assert refused(script, **fields) == (code, param)


def test_what_the_llm_service_refuses_names_the_prompt(door: Trio) -> None:
    longest = door.services.text.get_info().context_tokens
    for body, code, param in (
        ({"input": ["x", ""]}, "EMPTY_PROMPT", "input[1]"),
        ({"input": [5] * (longest + 1)}, "context_length_exceeded", "input"),
        ({"input": "x", "dimensions": 100_000}, "OUT_OF_RANGE", "dimensions"),
        ({"messages": [[said("x")], [said(image(b"no picture"))]]}, "MEDIA_FORMAT", "messages[1][0].content[0]"),
    ):
        reply = door.post(PATH, body)
        assert (reply.status, reply.error["code"], reply.error["param"]) == (400, code, param)
    with pytest.raises(openai.NotFoundError, match="no model has that name"):
        door.client.embeddings.create(model="another", input="x")


def test_a_model_that_gives_none_says_so(script: Scripted) -> None:
    status = v1.Status(code=12, message="embeddings of this model are not served", reason="NO_POOLING")
    script.llm.refusal, script.llm.embeddings = (grpc.StatusCode.UNIMPLEMENTED, status), None
    try:
        code, body, _ = post(script, input="x")
        assert (code, body["error"]["code"]) == (400, "NO_POOLING")
        told = [{each["id"]: each["embeddings"]} for each in json.loads(script.get("/v1/models").body)["data"]]
        assert told in ([{"demo": None}], [{"demo": {"dimensions": 2, "pooling": "last", "normalized": True}}])
        until(lambda: b'"embeddings":null' in script.get("/v1/models").body, "it is known")
    finally:
        script.llm.refusal = None


def test_one_whose_service_is_down_goes_to_another_and_stays_where_its_beginning_is() -> None:
    down = grpc.StatusCode.UNAVAILABLE, v1.Status(code=14, message="it stops", reason="STOPPING")
    with ExitStack() as stack:
        services = [FakeLlm(), FakeLlm()]
        addresses = [stack.enter_context(serving(llm=each)) for each in services]
        door = Door(stack.enter_context(gateway(*addresses)))
        until(lambda: door.metric("llm_services_usable") == 2, "both serve")
        for _ in range(3):
            assert door.post(PATH, {"input": "x"}).status == 200
        assert sorted(len(each.to_embed) for each in services) == [0, 3]
        home = max(services, key=lambda each: len(each.to_embed))
        home.refusal = down
        assert door.post(PATH, {"input": "x"}).status == 200
        assert sorted(len(each.to_embed) for each in services) == [1, 4]
        for each in services:
            each.refusal = down
        reply = door.post(PATH, {"input": ["x", "y"]})
        assert (reply.status, reply.error["code"]) == (503, "STOPPING")
        until(lambda: door.metric("open_requests") == 0, "nothing is under way")


def test_a_caller_who_leaves_ends_the_work(door: Trio) -> None:
    llm, prompts = door.services.text, ["word " * 3000] * 4
    body = json.dumps({"input": prompts}).encode()
    head = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    with llm.generate(asked(user("on and on"), lasting())) as stream, door.connect() as bare:  # steps take their time
        assert next(iter(stream)).HasField("started")
        before = llm.get_load().cancelled_requests
        bare.sendall(head + body)
        until(lambda: (load := llm.get_load()).running + load.waiting == 1 + len(prompts), "all of them are there")
        bare.close()
        until(lambda: llm.get_load().cancelled_requests == before + len(prompts), "all of them are given up")
        assert door.metric("open_requests") == 0
    until(door.idle, "nothing is held")
