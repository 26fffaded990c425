"""Forms that begin within an answer: behind the model's reasoning, and behind its mark of a call."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testkit.checkpoints import SPECIAL_IDS, VOCABULARY
from tests.launch import llm_server
from tests.rpc.pairs import LLM_FLAGS, Pair, answer, asked, pair
from tests.rpc.test_resume import check_cut, whole_of
from twinlens import LlmClient, user, v1

MARKS = {
    mark: VOCABULARY + n for n, mark in enumerate(("<think>", "</think>", "<tool_call>", "</tool_call>", "<function="))
}
END = SPECIAL_IDS["<|im_end|>"]
TEMPLATE = """\
{% if tools %}{{ tools | tojson }}{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
{% if enable_thinking %}<think>
{% endif %}{# calls are written as <tool_call><function=f> #}"""
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 22, 333]}},
    "required": ["a"],
    "additionalProperties": False,
}
COUNT = {
    "type": "object",
    "properties": {"of": {"$ref": "#/$defs/shape"}, "at_most": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["of", "at_most"],
    "additionalProperties": False,
    "$defs": {"shape": {"enum": ["circle", "</tool_call>"]}},
}


@pytest.fixture(scope="module")
def marked(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Services of a model that has a token for each mark, and that thinks when it is asked to."""
    folder = Path(shutil.copytree(checkpoint, tmp_path_factory.mktemp("marked") / "model"))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    like = {**tokenizer["added_tokens"][0], "special": False}
    tokenizer["added_tokens"] += [{**like, "id": token, "content": mark} for mark, token in MARKS.items()]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["vocab_size"] = VOCABULARY + len(MARKS)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with pair(folder) as running:
        yield running


def shaped(thinking: bool, **more: Any) -> v1.GenerateRequest:
    """An answer that ends wherever it may, and stops thinking now and then."""
    sampling = v1.SamplingParams(
        max_tokens=400, temperature=1.5, seed=7, n=3, logit_bias={END: 60, MARKS["</think>"]: 6}, **more
    )
    request = asked(user("Count."), sampling)
    request.chat.thinking = thinking
    return request


def test_a_model_that_thinks_does_so_first_and_its_answer_has_the_form_then(marked: Pair) -> None:
    with marked.text.generate(shaped(True, json_schema=json.dumps(SCHEMA))) as stream:
        first, *_ = stream
    assert first.started.thinking
    found = answer(marked.text, shaped(True, json_schema=json.dumps(SCHEMA))).choices
    for choice in found:
        ends = [n for n, token in enumerate(choice.token_ids, 1) if token == MARKS["</think>"]]
        assert choice.usage.reasoning_tokens == ends[0]
    thoughts = [choice.text.partition("</think>") for choice in found]
    assert all(json.loads(said)["a"] in (1, 22, 333) for _, _, said in thoughts)
    assert any(thought for thought, _, _ in thoughts), "it could have ended before it had thought"
    assert {choice.reason for choice in found} <= {v1.FINISH_REASON_STRUCTURE, v1.FINISH_REASON_STOP}


def test_a_model_that_does_not_think_has_the_form_from_its_first_token_on(marked: Pair) -> None:
    request = shaped(False, json_schema=json.dumps(SCHEMA))
    choices = answer(marked.text, request).choices
    assert all(json.loads(choice.text)["a"] for choice in choices)
    assert not any(choice.usage.reasoning_tokens for choice in choices)
    with marked.text.generate(request) as stream:
        assert not next(iter(stream)).started.thinking


def test_a_model_that_thinks_by_itself_is_counted_and_goes_on_with_its_count(marked: Pair) -> None:
    request = asked(user("Count."), v1.SamplingParams(max_tokens=12, temperature=1.5, seed=3, ignore_eos=True))
    request.resume.add(token_ids=[MARKS["<think>"], 5, 6])
    thought = answer(marked.text, request).choices[0]
    assert thought.usage.completion_tokens == 12
    ends = [n for n, token in enumerate(thought.token_ids, 4) if token == MARKS["</think>"]]
    assert thought.usage.reasoning_tokens == (ends or [12])[0]
    request.resume[0].token_ids.extend([7, MARKS["</think>"], 8])
    assert answer(marked.text, request).choices[0].usage.reasoning_tokens == 5


def opening(**more: Any) -> v1.GenerateRequest:
    """A model that likes to open its reasoning itself, and whose answer has a form."""
    request = shaped(False, json_schema=json.dumps(SCHEMA), **more)
    request.chat.ClearField("thinking")
    request.chat.thinks_before_form = True
    request.sampling.logit_bias[MARKS["<think>"]] = 10
    return request


def test_a_model_that_opens_its_reasoning_itself_has_the_form_behind_it(marked: Pair) -> None:
    request = opening()
    request.sampling.n = 8
    choices = answer(marked.text, request).choices
    thoughtful = [choice for choice in choices if choice.token_ids[0] == MARKS["<think>"]]
    assert thoughtful
    for choice in thoughtful:
        assert choice.usage.reasoning_tokens == choice.token_ids.index(MARKS["</think>"]) + 1
        assert json.loads(choice.text.partition("</think>")[2])["a"] in (1, 22, 333)
    request.sampling.logit_bias[MARKS["<think>"]] = -100
    for choice in answer(marked.text, request).choices:
        assert json.loads(choice.text)["a"] in (1, 22, 333)
        assert choice.usage.reasoning_tokens == 0


def test_a_model_that_is_not_to_think_has_the_form_at_once(marked: Pair) -> None:
    silent, by_effort, unasked = opening(), opening(), opening()
    silent.chat.thinking = False
    by_effort.chat.reasoning_effort = "none"
    unasked.chat.thinks_before_form = False
    for request in (silent, by_effort, unasked):
        for choice in answer(marked.text, request).choices:
            assert json.loads(choice.text)["a"] in (1, 22, 333)
    own = opening()
    own.sampling.regex = "[ab]|<think>[0-9]"
    for choice in answer(marked.text, own).choices:
        assert re.fullmatch(own.sampling.regex, choice.text)
        assert choice.usage.reasoning_tokens == 0


def test_reasoning_that_the_model_opens_before_a_form_is_bounded(marked: Pair) -> None:
    request = opening(thinking_token_budget=3)
    request.sampling.logit_bias.update({MARKS["<think>"]: 100, MARKS["</think>"]: -100})
    for choice in answer(marked.text, request).choices:
        assert choice.token_ids.index(MARKS["</think>"]) == 4
        assert json.loads(choice.text.partition("</think>")[2])["a"] in (1, 22, 333)


@pytest.fixture(scope="module")
def drafting(marked: Pair) -> Iterator[LlmClient]:
    """The same model, by a service that verifies drafts."""
    flags = {**LLM_FLAGS, "overlap": "auto", "speculative_tokens": 4}
    with (
        llm_server(marked.checkpoint, marked.encoder.address, **flags) as running,
        LlmClient(running.address) as client,
    ):
        yield client


def test_drafts_cross_the_end_of_reasoning_as_tokens_do(marked: Pair, drafting: LlmClient) -> None:
    """The prompt has reasoning and an answer again and again, so that look-ups draft across both marks."""
    said = f'{"Hm. " * 3}</think>{{"a": 333}}'
    for bias in ({MARKS["<think>"]: 100.0}, {}):
        request = opening()
        request.sampling.logit_bias.update(bias)
        request.chat.messages[0].parts[0].text = said * 4
        expected, drafted = answer(marked.text, request), answer(drafting, request)
        assert [each.token_ids for each in drafted.choices] == [each.token_ids for each in expected.choices]
        assert drafted.usage.accepted_draft_tokens > 0


SILENT = {END: -100, MARKS["</think>"]: -100}
"""Of a model that would think for ever, and never end."""


def thoughtful(budget: int, **more: Any) -> v1.GenerateRequest:
    """A model that thinks without end, and is to think so long."""
    given = {"max_tokens": 24, "temperature": 1.5, "seed": 5, "logit_bias": SILENT, **more}
    request = asked(user("Count."), v1.SamplingParams(thinking_token_budget=budget, **given))
    request.chat.thinking = True
    return request


@pytest.mark.parametrize("budget", [0, 1, 7, 23])
def test_a_model_is_made_to_end_its_reasoning_when_it_has_had_its_tokens(marked: Pair, budget: int) -> None:
    choices = answer(marked.text, thoughtful(budget, n=3)).choices
    for choice in choices:
        assert choice.token_ids.index(MARKS["</think>"]) == budget
        assert len(choice.token_ids) == 24
        assert choice.usage.reasoning_tokens == budget + 1
    assert budget == 0 or len({tuple(choice.token_ids[:budget]) for choice in choices}) == 3


def test_a_bound_that_is_not_met_changes_nothing(marked: Pair) -> None:
    for request in (shaped(True), shaped(False), shaped(True, json_schema=json.dumps(SCHEMA))):
        free = answer(marked.text, request)
        request.sampling.thinking_token_budget = 400
        assert [each.token_ids for each in answer(marked.text, request).choices] == [
            each.token_ids for each in free.choices
        ]


def test_a_form_follows_reasoning_that_was_ended(marked: Pair) -> None:
    request = thoughtful(6, json_schema=json.dumps(SCHEMA), max_tokens=60)
    request.sampling.logit_bias[END] = 60
    choice = answer(marked.text, request).choices[0]
    assert choice.token_ids.index(MARKS["</think>"]) == 6
    assert json.loads(choice.text.partition("</think>")[2])["a"] in (1, 22, 333)


def test_a_call_within_reasoning_is_complete_before_that_ends(marked: Pair) -> None:
    request = thoughtful(2, max_tokens=800)
    request.sampling.logit_bias[MARKS["<tool_call>"]] = 100
    request.chat.tools.extend([STRICT])
    choice = answer(marked.text, request).choices[0]
    assert choice.token_ids[0] == MARKS["<tool_call>"]
    before, mark, _ = choice.text.partition("</think>")
    assert mark
    assert [call["name"] for call in calls(before)] == ["count"]


def test_reasoning_that_the_model_begins_by_itself_is_bounded_as_well(marked: Pair) -> None:
    request = thoughtful(4, max_tokens=12, ignore_eos=True)
    request.chat.thinking = False
    request.resume.add(token_ids=[7, MARKS["<think>"], 5, 6])
    assert answer(marked.text, request).choices[0].token_ids[2] == MARKS["</think>"]


def test_such_reasoning_goes_on_behind_every_cut(marked: Pair) -> None:
    request = thoughtful(9)
    events = whole_of(marked, request)
    for cut in range(1, len(events) + 1, 3):
        check_cut(marked.text, request, events, cut)


def calling(*tools: v1.ToolDefinition) -> v1.GenerateRequest:
    """A model that would call all the time, and write anything there."""
    bias = {MARKS["<tool_call>"]: 12, END: -100}
    sampling = v1.SamplingParams(max_tokens=400, temperature=1.5, seed=11, n=2, logit_bias=bias)
    request = asked(user("Count."), sampling)
    request.chat.tools.extend(tools)
    return request


STRICT = v1.ToolDefinition(name="count", parameters=json.dumps(COUNT), strict=True)
FREE = v1.ToolDefinition(name="note", parameters=json.dumps(SCHEMA))


def calls(text: str) -> list[dict[str, Any]]:
    """Those that are complete, of a text in which a mark may stand within JSON."""
    found = []
    for rest in re.split("<tool_call>", text)[1:]:
        try:
            call, end = json.JSONDecoder().raw_decode(rest.lstrip())
        except json.JSONDecodeError:
            assert "</tool_call>" not in rest.replace('"</tool_call>"', ""), "what is complete is a call"
            continue
        if left := rest.lstrip()[end:].lstrip(" \n"):
            assert left.startswith("</tool_call>")
        found.append(call)
    return found


def test_calls_of_strict_functions_follow_their_parameters_and_words_are_free(marked: Pair) -> None:
    made = [calls(choice.text) for choice in answer(marked.text, calling(STRICT, FREE)).choices]
    assert max(map(len, made)) > 1
    for call in (call for each in made for call in each):
        assert call["name"] in ("count", "note")
        assert isinstance(call["arguments"], dict)
        if call["name"] == "count":
            assert call["arguments"]["of"] in ("circle", "</tool_call>")
            assert 1 <= call["arguments"]["at_most"] <= 9


def test_without_a_strict_function_calls_are_as_the_model_writes_them(marked: Pair) -> None:
    text = answer(marked.text, calling(FREE)).choices[0].text
    assert "<tool_call>" in text
    assert not re.search(r'<tool_call>\s*\{"name"', text)


@pytest.mark.parametrize("request_", [shaped(True, json_schema=json.dumps(SCHEMA)), opening(), calling(STRICT)])
def test_such_an_answer_goes_on_behind_every_cut(marked: Pair, request_: v1.GenerateRequest) -> None:
    request_.sampling.n = 1
    request_.sampling.max_tokens = 60
    events = whole_of(marked, request_)
    for cut in range(1, len(events) + 1, 7):
        check_cut(marked.text, request_, events, cut)
