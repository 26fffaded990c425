"""Completions, models, tokens, health, metrics, the release."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.gateway.trio import Trio, image, said
from tests.rpc.pairs import answer, asked
from twinlens import __version__, v1


def by_grpc(door: Trio, prompt: v1.TextInput | v1.TokensInput, **sampling: Any) -> Any:
    params = v1.SamplingParams(**{"max_tokens": 6, "temperature": 0.0, **sampling})
    return answer(door.services.text, asked(prompt, params))


def by_http(door: Trio, prompt: Any, **fields: Any) -> Any:
    return door.client.completions.create(
        **{"model": door.model, "prompt": prompt, "max_tokens": 6, "temperature": 0, **fields}
    )


@pytest.mark.parametrize("prompt", ["Hello", [5, 6, 7]], ids=["a text", "token ids"])
def test_a_completion_has_the_same_words_and_counts_as_by_grpc(door: Trio, prompt: Any) -> None:
    form = v1.TextInput(prompt=prompt) if isinstance(prompt, str) else v1.TokensInput(ids=prompt)
    theirs, ours = by_grpc(door, form), by_http(door, prompt)
    assert (ours.choices[0].text, ours.choices[0].finish_reason) == (theirs.text, "length")
    assert ours.usage.prompt_tokens == theirs.usage.prompt_tokens
    assert ours.usage.completion_tokens == theirs.usage.completion_tokens
    chunks = list(by_http(door, prompt, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == theirs.text
    assert chunks[-1].usage.completion_tokens == theirs.usage.completion_tokens


def test_each_chunk_says_the_usage_so_far_where_that_is_asked_for(door: Trio) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = by_http(door, ["One", "Two"], stream=True, stream_options=options)
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts[0] < counts[-1] == 12
    assert counts == sorted(counts)
    assert last.usage.completion_tokens_details.reasoning_tokens == 0, "which are known at the end"
    last.usage.completion_tokens_details = None
    assert chunks[-1].usage == last.usage


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_several_prompts_are_answered_in_order_of_their_choices(door: Trio, stream: bool) -> None:
    prompts = ["One", "Two", "Three"]
    fields: dict[str, Any] = {"n": 2, "temperature": 1.3, "seed": 4}
    expected = [
        choice.text for each in prompts for choice in by_grpc(door, v1.TextInput(prompt=each), **fields).choices
    ]
    if stream:
        found = [""] * 6
        for chunk in by_http(door, prompts, stream=True, **fields):
            found[chunk.choices[0].index] += chunk.choices[0].text
    else:
        whole = by_http(door, prompts, **fields)
        found = [choice.text for choice in whole.choices]
        assert [choice.index for choice in whole.choices] == [0, 1, 2, 3, 4, 5]
        assert whole.usage.completion_tokens == 36
    assert found == expected


def test_lists_of_token_ids_are_several_prompts(door: Trio) -> None:
    whole = by_http(door, [[5, 6, 7], [8, 9]])
    assert [choice.text for choice in whole.choices] == [
        by_grpc(door, v1.TokensInput(ids=ids)).text for ids in ([5, 6, 7], [8, 9])
    ]


def test_logprobs_of_a_completion_have_offsets(door: Trio) -> None:
    theirs = by_grpc(door, v1.TextInput(prompt="Hello"), logprobs=2).choices[0].logprobs
    logprobs = by_http(door, "Hello", logprobs=2).choices[0].logprobs
    assert logprobs.tokens == [each.text for each in theirs]
    assert logprobs.token_logprobs == [each.logprob for each in theirs]
    assert logprobs.text_offset[:3] == [0, len(theirs[0].text), len(theirs[0].text + theirs[1].text)]


def test_the_token_that_is_there_is_among_the_likeliest_of_a_completion(door: Trio) -> None:
    logprobs = by_http(door, "Hello", logprobs=0).choices[0].logprobs
    assert logprobs.top_logprobs == [
        {token: value} for token, value in zip(logprobs.tokens, logprobs.token_logprobs, strict=True)
    ]
    assert len(logprobs.tokens) > 1


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_offsets_are_those_of_the_text_also_where_characters_are_of_several_tokens(door: Trio, stream: bool) -> None:
    ids = [*door.services.text.tokenize("図👩é中"), *door.services.text.tokenize(" a b")]
    body = {"logit_bias": dict.fromkeys(map(str, ids), 20), "ignore_eos": True}
    answered = by_http(
        door, "Hello", max_tokens=40, temperature=1.5, seed=3, logprobs=0, extra_body=body, stream=stream
    )
    choices = [each.choices[0] for each in (answered if stream else [answered])]
    said = "".join(choice.text for choice in choices)
    scores = [choice.logprobs for choice in choices if choice.logprobs]
    places = [(token, at) for each in scores for token, at in zip(each.tokens, each.text_offset, strict=True)]
    assert all(said.startswith(token, at) for token, at in places if "\ufffd" not in token)
    assert {token for token, _ in places} >= {" a", "\ufffd"}
    assert len(said) < sum(len(token) for token, _ in places)


@pytest.mark.parametrize("prompts", [["Hello", "Näh"], [[5, 6, 7], [8, 9]]], ids=["texts", "token ids"])
def test_a_prompt_is_repeated_where_that_is_asked_for(door: Trio, prompts: list[Any]) -> None:
    words = [each if isinstance(each, str) else door.services.text.detokenize(*each) for each in prompts]
    plain = [choice.text for choice in by_http(door, prompts, n=2, seed=3, temperature=1).choices]
    expected = [words[number // 2] + each for number, each in enumerate(plain)]
    whole = by_http(door, prompts, n=2, seed=3, temperature=1, echo=True)
    assert [choice.text for choice in whole.choices] == expected
    found = [""] * 4
    for chunk in by_http(door, prompts, n=2, seed=3, temperature=1, echo=True, stream=True):
        found[chunk.choices[0].index] += chunk.choices[0].text
    assert found == expected


@pytest.mark.parametrize("prompt", ["Hello there", [5, 6, 7]], ids=["a text", "token ids"])
def test_a_prompt_that_is_repeated_is_scored_as_well(door: Trio, prompt: Any) -> None:
    form = v1.TextInput(prompt=prompt) if isinstance(prompt, str) else v1.TokensInput(ids=prompt)
    theirs = by_grpc(door, form, logprobs=1, prompt_logprobs=1, n=2)
    whole = by_http(door, prompt, logprobs=1, echo=True, n=2)
    for choice, their in zip(whole.choices, theirs.choices, strict=True):
        scores = choice.logprobs
        assert scores.token_logprobs == [
            None,
            *(each.logprob for each in (*theirs.prompt_logprobs, *their.logprobs)),
        ]
        assert "".join(scores.tokens) == choice.text
        assert scores.top_logprobs[0] is None
        assert scores.tokens[1] in scores.top_logprobs[1]
        places = zip(scores.tokens, scores.text_offset, strict=True)
        assert all(choice.text.startswith(token, at) for token, at in places if "\ufffd" not in token)
    assert len(scores.tokens) == whole.usage.total_tokens - whole.usage.completion_tokens // 2
    streams: list[dict[str, Any]] = [{"text": ""}, {"text": ""}]
    for chunk in by_http(door, prompt, logprobs=1, echo=True, n=2, stream=True):
        told, found = chunk.choices[0], streams[chunk.choices[0].index]
        if not found["text"]:
            assert len(told.logprobs.tokens) > len(theirs.prompt_logprobs), "the first chunk has the prompt"
        found["text"] += told.text
        for name, values in (told.logprobs.model_dump() if told.logprobs else {}).items():
            found.setdefault(name, []).extend(values)
    assert streams == [{"text": choice.text, **choice.logprobs.model_dump()} for choice in whole.choices]


@pytest.mark.parametrize("prompts", [["Hello there", "x"], [[5, 6, 7], [8]]], ids=["texts", "token ids"])
def test_prompts_are_scored_and_nothing_is_said_behind_them_where_that_is_asked_for(
    door: Trio, prompts: list[Any]
) -> None:
    fields: dict[str, Any] = {"n": 2, "echo": True, "logprobs": 1, "extra_body": {"return_token_ids": True}}
    alone, longer = (by_http(door, prompts, max_tokens=most, **fields) for most in (0, 1))
    assert alone.usage.completion_tokens == 0
    assert alone.usage.prompt_tokens == longer.usage.prompt_tokens
    for choice, more in zip(alone.choices, longer.choices, strict=True):
        assert (choice.token_ids, choice.finish_reason, choice.prompt_token_ids) == (
            [],
            "length",
            more.prompt_token_ids,
        )
        assert len(choice.logprobs.tokens) == len(choice.prompt_token_ids)
        for name, values in choice.logprobs.model_dump().items():
            assert values == more.logprobs.model_dump()[name][:-1]
        assert more.text.startswith(choice.text)
        assert "".join(choice.logprobs.tokens) == choice.text
    chunks = list(by_http(door, prompts, max_tokens=0, stream=True, **fields))
    assert sorted(chunk.choices[0].index for chunk in chunks) == [0, 1, 2, 3]
    for chunk in chunks:
        whole = alone.choices[chunk.choices[0].index]
        assert (chunk.choices[0].text, chunk.choices[0].logprobs) == (whole.text, whole.logprobs)
        assert chunk.choices[0].finish_reason == "length"
    plain = by_http(door, prompts, max_tokens=0, echo=True)
    assert [choice.text for choice in plain.choices] == [choice.text for choice in alone.choices[::2]]
    assert door.post("/v1/completions", {"prompt": "x", "max_tokens": 0}).error["param"] == "max_tokens"


def test_an_answer_whose_length_is_not_said_has_sixteen_tokens(door: Trio) -> None:
    for fields in ({}, {"max_tokens": None}, {"prompt": ["x", "y"], "n": 2}):
        told = json.loads(door.post("/v1/completions", {"prompt": "x", "ignore_eos": True, **fields}).body)
        assert {each["finish_reason"] for each in told["choices"]} == {"length"}
        assert told["usage"]["completion_tokens"] == 16 * len(told["choices"])


@pytest.mark.parametrize("echo", [False, True])
def test_tokens_of_a_completion_are_named_by_their_ids_where_that_is_asked_for(door: Trio, echo: bool) -> None:
    fields: dict[str, Any] = {"logprobs": 1, "echo": echo}
    named = {"extra_body": {"return_tokens_as_token_ids": True, "return_token_ids": True}}
    plain = by_http(door, [5, 6, 7], **fields).choices[0].logprobs
    choice = by_http(door, [5, 6, 7], **fields, **named).choices[0]
    ids = [*([5, 6, 7] if echo else []), *choice.token_ids]
    streams: dict[str, list[Any]] = {}
    for chunk in by_http(door, [5, 6, 7], **fields, **named, stream=True):
        for name, values in (chunk.choices[0].logprobs.model_dump() if chunk.choices[0].logprobs else {}).items():
            streams.setdefault(name, []).extend(values)
    assert streams == choice.logprobs.model_dump()
    assert choice.logprobs.tokens == [f"token_id:{token}" for token in ids]
    assert (choice.logprobs.text_offset, choice.logprobs.token_logprobs) == (plain.text_offset, plain.token_logprobs)
    likeliest = zip(choice.logprobs.top_logprobs, plain.top_logprobs, strict=True)
    assert all(sorted((each or {}).values()) == sorted((other or {}).values()) for each, other in likeliest)


def test_scores_of_prompts_are_with_their_choices(door: Trio) -> None:
    prompts = [[5, 6, 7], [8, 9]]
    whole = by_http(door, prompts, n=2, extra_body={"prompt_logprobs": 0})
    for choice in whole.choices:
        ids = prompts[choice.index // 2]
        theirs = by_grpc(door, v1.TokensInput(ids=ids), prompt_logprobs=0).prompt_logprobs
        assert choice.prompt_logprobs[0] is None
        assert [
            found[str(token)]["logprob"] for found, token in zip(choice.prompt_logprobs[1:], ids[1:], strict=True)
        ] == [each.logprob for each in theirs]
    first: dict[int, Any] = {}
    for chunk in by_http(door, prompts, n=2, extra_body={"prompt_logprobs": 0}, stream=True):
        told = chunk.choices[0]
        assert hasattr(told, "prompt_logprobs") is (told.index not in first)
        first.setdefault(told.index, getattr(told, "prompt_logprobs", None))
    assert first == {choice.index: choice.prompt_logprobs for choice in whole.choices}
    both = {"prompt": "x", "prompt_logprobs": 1, "echo": True, "logprobs": 2}
    assert door.post("/v1/completions", both).error["code"] == "BAD_FIELD"


@pytest.mark.parametrize("prompts", [["Hello", "Näh"], [[5, 6, 7], [8, 9]]], ids=["texts", "token ids"])
def test_a_completion_has_the_ids_of_its_tokens_where_that_is_asked_for(door: Trio, prompts: list[Any]) -> None:
    asked_for = {"n": 2, "seed": 3, "temperature": 1, "extra_body": {"return_token_ids": True}}
    whole = by_http(door, prompts, **asked_for)
    for choice in whole.choices:
        prompt = prompts[choice.index // 2]
        ids = door.services.text.tokenize(prompt, allow_special=True) if isinstance(prompt, str) else prompt
        assert choice.prompt_token_ids == ids
        assert len(choice.token_ids) == 6
        assert door.services.text.detokenize(*choice.token_ids).startswith(choice.text.rstrip("\ufffd"))
    streams: list[dict[str, list[int]]] = [{"prompt_token_ids": [], "token_ids": []} for _ in range(4)]
    for chunk in by_http(door, prompts, stream=True, **asked_for):
        for name, ids in streams[chunk.choices[0].index].items():
            ids += getattr(chunk.choices[0], name, ())
    assert streams == [
        {"prompt_token_ids": choice.prompt_token_ids, "token_ids": choice.token_ids} for choice in whole.choices
    ]
    assert not hasattr(by_http(door, "Hello").choices[0], "token_ids")


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"prompt": []}, "prompt", "TOO_MANY_PROMPTS"),
        ({"prompt": ["x"] * 2049}, "prompt", "TOO_MANY_PROMPTS"),
        ({"prompt": [[5], "x"]}, "prompt[1]", "BAD_FIELD"),
        ({"prompt": {"a": 1}}, "prompt", "BAD_FIELD"),
        ({"prompt": "x", "echo": True, "logprobs": 1, "prompt_logprobs": 2, "stream": True}, None, "BAD_FIELD"),
        ({"prompt": [[5], [1 << 20]], "echo": True}, "prompt", "TOKEN_OUT_OF_RANGE"),
        ({"prompt": "x", "suffix": "y"}, "suffix", "FIELD_NOT_SERVED"),
        ({"prompt": "x", "best_of": 2}, "best_of", "FIELD_NOT_SERVED"),
        ({"prompt": ["x", ""]}, "prompt", "EMPTY_PROMPT"),
    ],
)
def test_a_completion_that_cannot_be_served_is_refused(
    door: Trio, fields: dict[str, Any], param: str | None, code: str
) -> None:
    reply = door.post("/v1/completions", fields)
    assert reply.status == 400
    assert reply.error["code"] == code
    if code != "EMPTY_PROMPT":
        assert reply.error["param"] == param


def test_models_are_listed_by_the_name_that_requests_may_give(door: Trio) -> None:
    (model,) = door.client.models.list().data
    assert (model.id, model.owned_by) == (door.model, "twinlens")
    assert door.client.models.retrieve(door.model) == model


def test_tokens_are_those_of_the_llm_service(door: Trio) -> None:
    ids = door.services.text.tokenize("Hello <|im_end|>", allow_special=True)
    reply = json.loads(door.post("/tokenize", {"prompt": "Hello <|im_end|>"}).body)
    assert reply == {"count": len(ids), "max_model_len": 4096, "tokens": ids}
    chat = json.loads(door.post("/tokenize", {"messages": [said("Hello")]}).body)
    assert (
        chat["count"]
        == door.client.chat.completions.create(
            model=door.model, messages=[{"role": "user", "content": "Hello"}], max_tokens=1
        ).usage.prompt_tokens
    )  # type: ignore[union-attr]
    refused = door.post("/tokenize", {"messages": [said(image())]})
    assert (refused.status, refused.error["code"]) == (400, "MEDIA_IN_TOKENIZE")
    assert door.post("/tokenize", {}).error["code"] == "BAD_FIELD"


def test_tokens_of_a_prompt_or_of_its_text_alone(door: Trio) -> None:
    for add in (True, False):
        ids = door.services.text.tokenize("Hello", add_special_tokens=add)
        reply = json.loads(door.post("/tokenize", {"prompt": "Hello", "add_special_tokens": add}).body)
        assert reply["tokens"] == ids
    chat = {"messages": [said("Hello")], "add_generation_prompt": True, "continue_final_message": False}
    plain = json.loads(door.post("/tokenize", chat).body)
    assert plain == json.loads(door.post("/tokenize", {**chat, "add_special_tokens": False}).body)
    assert plain == json.loads(door.post("/tokenize", {**chat, "chat_template_kwargs": {"thinking": False}}).body)


def test_tokens_of_messages_without_the_beginning_of_an_answer_and_their_texts(door: Trio) -> None:
    asked = {"messages": [said("Hello 図")], "return_token_strs": True}
    whole, alone = (
        json.loads(door.post("/tokenize", {**asked, "add_generation_prompt": begun}).body) for begun in (True, False)
    )
    assert alone["count"] < whole["count"]
    assert whole["tokens"][: alone["count"]] == alone["tokens"]
    assert door.services.text.detokenize(*alone["tokens"]).rstrip().endswith("Hello 図<|im_end|>")
    assert alone["token_strs"] == [door.services.text.detokenize(token) for token in alone["tokens"]]
    text = json.loads(door.post("/tokenize", {"prompt": "Hello", "add_generation_prompt": False}).body)
    assert "token_strs" not in text
    both = {**asked, "add_generation_prompt": True, "continue_final_message": True}
    assert door.post("/tokenize", both).error["code"] == "BAD_FIELD"


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "NO_TOOLS"),
        ({"chat_template_kwargs": {"reasoning_effort": "low"}}, "reasoning_effort", "NO_THINKING"),
        ({"add_special_tokens": True}, None, "BAD_FIELD"),
    ],
)
def test_what_tokens_cannot_be_asked_with_is_refused(
    door: Trio, fields: dict[str, Any], param: str | None, code: str
) -> None:
    reply = door.post("/tokenize", {"messages": [said("Hello")], **fields})
    assert (reply.status, reply.error["param"], reply.error["code"]) == (400, param, code)


BAD = "((("
BAD_SCHEMA = {"type": "nonsense"}
BAD_FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": BAD_SCHEMA}}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_json": BAD_SCHEMA}, "guided_json"),
        ({"guided_regex": BAD}, "guided_regex"),
        ({"regex": BAD}, "regex"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"guided_grammar": BAD}, "guided_grammar"),
        ({"ebnf": BAD}, "ebnf"),
        ({"structured_outputs": {"regex": BAD}}, "structured_outputs"),
        ({"response_format": BAD_FORMAT}, "response_format"),
    ],
)
def test_a_form_that_cannot_be_followed_is_refused_by_the_field_that_has_it(
    door: Trio, fields: dict[str, Any], param: str, stream: bool
) -> None:
    given = {**fields, "max_tokens": 4, "stream": stream}
    reply = door.post("/v1/completions", {"prompt": "x", **given})
    assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "BAD_STRUCTURE", param)
    reply = door.chat(**given)
    assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "BAD_STRUCTURE", param)


def test_health_and_the_release(door: Trio) -> None:
    assert {door.get(path).status for path in ("/health/live", "/health/ready", "/health", "/ping")} == {200}
    assert door.post("/ping", b"").status == 200
    assert json.loads(door.get("/version").body) == {"version": __version__}


def test_requests_are_counted(door: Trio) -> None:
    name = 'requests_total{status="200",surface="models"}'
    before = door.metric(name)
    door.get("/v1/models")
    assert door.metric(name) == before + 1
    assert door.metric("llm_services_usable") == 1
