"""What Python's openai does around a request: it reads answers as models, gathers streams, gives up, tries again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.gateway.partner import ANSWER, TOOL, converse
from tests.gateway.scripted import Scripted, scripted
from tests.waiting import until

ROME: Any = {"model": "demo", "messages": [{"role": "user", "content": "Rome?"}]}
SLOW: Any = {"model": "demo", "messages": [{"role": "user", "content": "Slow"}]}
FULL: Any = {"model": "demo", "messages": [{"role": "user", "content": "Full"}]}
BUSY: Any = {"model": "demo", "messages": [{"role": "user", "content": "Busy"}]}
STRICT: Any = {**TOOL, "function": {**TOOL["function"], "strict": True}}


class City(BaseModel):
    """The form of an answer."""

    city: str


@pytest.fixture(scope="module")
def door() -> Iterator[Scripted]:
    with scripted() as running:
        converse(running)
        yield running


@pytest.fixture
def client(door: Scripted) -> Iterator[openai.OpenAI]:
    door.llm.requests.clear()
    with openai.OpenAI(base_url=f"http://{door.gateway.address}/v1", api_key="x", max_retries=0) as client:
        yield client


def test_an_answer_is_read_as_a_model(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(**ROME, response_format=City)
    assert answer.choices[0].message.parsed == City(city="Rome")
    response = client.responses.parse(model="demo", input="Rome?", text_format=City)
    assert response.output_parsed == City(city="Rome")


def test_a_calls_arguments_are_read_as_a_model(client: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(City, name="weather")
    answer = client.chat.completions.parse(**ROME, tools=[tool])
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == City(city="Rome")


def test_the_helper_for_streams_tells_of_words_arguments_and_the_end(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(**ROME, tools=[STRICT]) as stream:
        events = list(stream)
        answer = stream.get_final_completion().choices[0]
    assert "".join(each.delta for each in events if each.type == "content.delta") == "Let me see."
    (done,) = (each for each in events if each.type == "tool_calls.function.arguments.done")
    assert (done.name, done.parsed_arguments) == ("weather", {"city": "Rome"})
    assert (answer.finish_reason, len(answer.message.tool_calls or [])) == ("tool_calls", 1)
    with client.chat.completions.stream(**ROME, response_format=City) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == City(city="Rome")


def test_the_helper_for_streams_says_that_a_call_was_cut_off(client: openai.OpenAI) -> None:
    with (
        client.chat.completions.stream(
            model="demo",
            messages=[{"role": "user", "content": "Cut"}],
            tools=[openai.pydantic_function_tool(City, name="weather")],
        ) as stream,
        pytest.raises(openai.LengthFinishReasonError),
    ):
        list(stream)


def test_the_helper_for_streams_of_responses_reads_a_model(client: openai.OpenAI) -> None:
    with client.responses.stream(model="demo", input="Rome?", text_format=City) as stream:
        words = "".join(each.delta for each in stream if each.type == "response.output_text.delta")
        assert stream.get_final_response().output_parsed == City.model_validate_json(words) == City(city="Rome")


def test_what_the_client_says_of_a_refusal_names_the_field(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="audio: this field is not supported"):
        client.chat.completions.create(**ROME, audio={"format": "wav", "voice": "alloy"})


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_request_that_its_caller_gives_up_ends_in_the_service(
    door: Scripted, client: openai.OpenAI, stream: bool
) -> None:
    name = 'requests_total{status="499",surface="chat"}'
    before = door.metric(name)
    hasty = client.with_options(timeout=0.3)

    def gives_up() -> int:
        with pytest.raises(openai.APITimeoutError):
            list(hasty.chat.completions.create(**SLOW, stream=stream))
        return len(door.llm.requests)

    until(gives_up, "a generation had begun")
    until(lambda: door.metric(name) > before, "it is counted as left")
    until(lambda: not door.llm.under_way, "its generation has ended")


def test_what_is_refused_for_now_is_tried_again(door: Scripted, client: openai.OpenAI) -> None:
    answer = client.with_options(max_retries=1).chat.completions.create(**BUSY)
    assert (answer.choices[0].message.content, len(door.llm.requests)) == (ANSWER, 2)
    with pytest.raises(openai.RateLimitError) as error:
        client.chat.completions.create(**FULL)
    assert (error.value.code, error.value.response.headers["retry-after"]) == ("TOO_MANY_WAITING", "1")
    response = client.with_options(max_retries=1).responses.create(model="demo", input="Busy")
    assert response.output_text == ANSWER
