"""Answers of a prescribed form, from a model that would never give them by itself."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from common.checkpoints.checkpoint import Checkpoint
from llm_service.prompt.builder import PromptBuilder
from tests.launch import llm_server
from tests.rpc.pairs import LLM_FLAGS, Pair, answer, asked, greedy, refusal, tokens
from tests.waiting import until
from twinlens import LlmClient, TwinlensError, user, v1

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "blue"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["colour", "count"],
        "additionalProperties": False,
    }
)
QUESTION = user("What is there?")


def shaped(both: Pair, max_tokens: int = 200, **structure: object) -> v1.GenerateRequest:
    """A request for an answer of some form, sampled at a temperature that gives everything a chance."""
    sampling = v1.SamplingParams(max_tokens=max_tokens, temperature=1.5, seed=7, n=3, **structure)  # type: ignore[arg-type]
    return asked(QUESTION, sampling)


def test_a_schema_gives_json_that_fits_it(qwen3: Pair) -> None:
    for choice in answer(qwen3.text, shaped(qwen3, json_schema=SCHEMA)).choices:
        value = json.loads(choice.text)
        assert set(value) == {"colour", "count"}
        assert value["colour"] in ("red", "blue")
        assert 0 <= value["count"] <= 99


@pytest.mark.parametrize("pattern", ["[a-c]{5}-[0-9]{3}", "(yes|no)!", "é+ü"])
def test_a_regex_is_matched_whole(qwen3: Pair, pattern: str) -> None:
    for choice in answer(qwen3.text, shaped(qwen3, regex=pattern)).choices:
        assert re.fullmatch(pattern, choice.text)


def test_a_choice_is_one_of_the_options_and_ends_by_itself(qwen3: Pair) -> None:
    options = ["left of it", 'the "right"', "above\nor below"]
    found = answer(qwen3.text, shaped(qwen3, choice=v1.Choice(options=options))).choices
    assert all(choice.text in options for choice in found)
    assert {choice.reason for choice in found} <= {v1.FINISH_REASON_STRUCTURE, v1.FINISH_REASON_STOP}


def test_a_grammar_is_followed(qwen3: Pair) -> None:
    grammar = 'start: NUMBER ("+" NUMBER){2}\nNUMBER: /[1-9][0-9]?/'
    for choice in answer(qwen3.text, shaped(qwen3, grammar=grammar)).choices:
        assert re.fullmatch(r"[1-9][0-9]?(\+[1-9][0-9]?){2}", choice.text)


def test_a_grammar_in_the_other_form_is_followed(qwen3: Pair) -> None:
    grammar = """
root ::= "<" ("a" | pair){2,3} ">" sign?  # behind a pair another
pair ::= [x-z] "\\u0022é" digits
digits ::= [0-9] | [0-9] digits
sign ::= "!"
"""
    found = answer(qwen3.text, shaped(qwen3, grammar=grammar)).choices
    assert any('"é' in choice.text for choice in found)
    for choice in found:
        assert re.match(r'<(a|[x-z]"é[0-9]+){2,3}>!?|<', choice.text)
        if choice.reason != v1.FINISH_REASON_LENGTH:
            assert re.fullmatch(r'<(a|[x-z]"é[0-9]+){2,3}>!?', choice.text)


def test_forms_and_tokens_that_are_named_hold_together_and_beside_each_other(checkpoints: Callable[..., Path]) -> None:
    """In a vocabulary of whole words of 32 bits, as most models have."""
    model = checkpoints("qwen3_vl", vocab_size=608)
    builder = PromptBuilder(Checkpoint(model))
    digits = [token for digit in "0123456789" for token in builder.encode(digit)]
    named = greedy(12, allowed_token_ids=digits)
    formed = greedy(12, regex="[a-d]{3,30}")
    together = greedy(12, regex="[0-9a]{8}", ignore_eos=False, allowed_token_ids=digits)
    with llm_server(model, light=False, **LLM_FLAGS) as server, LlmClient(server.address) as llm:
        (choice,) = answer(llm, asked(QUESTION, together)).choices
        assert re.fullmatch("[0-9]{8}", choice.text)
        requests = [asked(user(f"{number}?"), (named, formed)[number % 2]) for number in range(8)]
        alone = [tokens(llm, request) for request in requests]
        with ThreadPoolExecutor(len(requests)) as pool:
            assert list(pool.map(lambda request: tokens(llm, request), requests)) == alone
        assert all(set(each) <= set(digits) for each in alone[::2])
        texts = [builder.decode(each) for each in alone[1::2]]
        assert all(re.fullmatch(r"[a-d]{3,12}(<\|im_end\|>)?", text) for text in texts), texts


def test_the_company_of_other_requests_changes_no_structured_token(qwen3: Pair) -> None:
    alone = tokens(qwen3.text, asked(QUESTION, greedy(40, ignore_eos=False, json_schema=SCHEMA)))
    with qwen3.text.generate(asked(user("count"), greedy(3000))) as other:
        next(iter(other))
        assert tokens(qwen3.text, asked(QUESTION, greedy(40, ignore_eos=False, json_schema=SCHEMA))) == alone


@pytest.mark.parametrize(
    ("structure", "reason"),
    [
        ({"regex": "((("}, "BAD_STRUCTURE"),
        ({"json_schema": "{"}, "BAD_STRUCTURE"),
        ({"structural_tag": "{"}, "BAD_STRUCTURE"),
        ({"structural_tag": '{"format": {"type": "regex", "pattern": "("}}'}, "BAD_STRUCTURE"),
        ({"structural_tag": '{"format":' * 40 + "{}" + "}" * 40}, "STRUCTURE_TOO_LARGE"),
        ({"json_schema": '{"type": "nonsense"}'}, "BAD_STRUCTURE"),
        ({"json_schema": '{"$ref": "#"}'}, "BAD_STRUCTURE"),
        ({"json_schema": '{"items":' * 40 + "{}" + "}" * 40}, "STRUCTURE_TOO_LARGE"),
        ({"json_schema": json.dumps({"description": "x" * 70_000})}, "STRUCTURE_TOO_LARGE"),
        ({"json_schema": '{"items": {"type": "integer", "multipleOf": 999983}}'}, "STRUCTURE_TOO_LARGE"),
        ({"regex": "(a{1000}){1000}"}, "STRUCTURE_TOO_LARGE"),
        ({"grammar": "start: nowhere"}, "BAD_STRUCTURE"),
        ({"grammar": "root ::= nowhere"}, "BAD_STRUCTURE"),
        ({"grammar": 'root ::= ["] ' + '("a" ' * 140 + '"a"' + " | root)" * 140}, "STRUCTURE_TOO_LARGE"),
        ({"grammar": 'root ::= ["] ("a" "b"{1000}){1000}'}, "STRUCTURE_TOO_LARGE"),
        ({"grammar": "root ::= " + "(" * 5000}, "STRUCTURE_TOO_LARGE"),
        ({"grammar": 'root ::= ["] ' + "(" * 5000}, "BAD_STRUCTURE"),
        ({"choice": v1.Choice()}, "BAD_STRUCTURE"),
        ({"choice": v1.Choice(options=["a", ""])}, "BAD_STRUCTURE"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_its_field(
    qwen3: Pair, structure: dict[str, object], reason: str
) -> None:
    with pytest.raises(TwinlensError) as error:
        answer(qwen3.text, shaped(qwen3, **structure))
    assert error.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert (error.value.reason, error.value.field) == (reason, f"sampling.{next(iter(structure))}")


def test_a_model_whose_tokenizer_structures_do_not_know_is_served_without_any(checkpoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "own")
    settings = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(settings | {"decoder": {"type": "Fuse"}}))
    with llm_server(folder, **LLM_FLAGS) as running, LlmClient(running.address) as client:
        refused = refusal(client, asked(QUESTION, greedy(8, regex="a+")))
        assert (refused.reason, refused.field) == ("BAD_STRUCTURE", "sampling.regex")
        assert len(tokens(client, asked(QUESTION))) == 8


def test_a_structure_that_must_end_before_min_tokens_is_refused_by_that_field(qwen3: Pair) -> None:
    (letter,) = qwen3.text.tokenize("a")
    error = refusal(qwen3.text, shaped(qwen3, regex="a", min_tokens=2, stop_token_ids=[letter]))
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert (error.reason, error.field) == ("MIN_TOKENS_UNREACHABLE", "sampling.min_tokens")
    complete = answer(qwen3.text, shaped(qwen3, regex="a", min_tokens=2)).choices
    assert {(choice.text, choice.reason) for choice in complete} == {("a", v1.FINISH_REASON_STRUCTURE)}


def test_a_structure_that_bad_words_leave_nothing_of_is_refused_by_that_field(qwen3: Pair) -> None:
    error = refusal(qwen3.text, shaped(qwen3, regex="(a|b)c", bad_words=["c"]))
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert (error.reason, error.field) == ("BAD_WORDS_UNAVOIDABLE", "sampling.bad_words")
    complete = answer(qwen3.text, shaped(qwen3, regex="(a|b)c", bad_words=["a"])).choices
    assert {(choice.text, choice.reason) for choice in complete} == {("bc", v1.FINISH_REASON_STRUCTURE)}


def test_a_structure_follows_what_tokens_alone_may_be_chosen(qwen3: Pair) -> None:
    a, b, c = (qwen3.text.tokenize(letter)[0] for letter in "abc")
    found = answer(qwen3.text, shaped(qwen3, regex="(a|b)c", allowed_token_ids=[a, c])).choices
    assert {(choice.text, choice.reason) for choice in found} == {("ac", v1.FINISH_REASON_STRUCTURE)}
    for more in (
        {"regex": "(a|b)c", "allowed_token_ids": [a, b]},
        {"allowed_token_ids": [a], "bad_words": ["aaa"]},
        {"allowed_token_ids": [a], "stop_token_ids": [a], "min_tokens": 2},
    ):
        error = refusal(qwen3.text, shaped(qwen3, **more))
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT
        assert (error.reason, error.field) == ("ALLOWED_TOKENS_UNREACHABLE", "sampling.allowed_token_ids")


EXPLODING = {
    "repetitions of what other rules repeat": {
        "grammar": 'start: A\nA: B{3000}\nB: C{3000}\nC: D{3000}\nD: "a"{3000}',
    },
    "what is in none of several countless sets": {
        "grammar": "start: A\nA: ~/(.*a.{14})|(.*b.{15})|(.*c.{17})/ & /[abc]{40}/",
    },
}


@pytest.mark.parametrize("name", EXPLODING)
def test_an_exploding_structure_is_refused_in_bounded_time_and_holds_nobody_up(qwen3: Pair, name: str) -> None:
    with pytest.raises(TwinlensError):  # the processes that compile are started by the first structure
        answer(qwen3.text, shaped(qwen3, regex="(("))
    with qwen3.text.generate(asked(user("count"), greedy(3000))) as other, ThreadPoolExecutor(1) as thread:
        events = iter(other)
        next(events)
        refused = thread.submit(refusal, qwen3.text, shaped(qwen3, 20, **EXPLODING[name]))
        said = 0
        for event in events:  # it may come to its end first
            said += event.HasField("delta")
            if refused.done():
                break
        error = refused.result()
        assert said > 0, "the others went on meanwhile"
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert error.reason in ("BAD_STRUCTURE", "STRUCTURE_TOO_LARGE"), "the processor decides which bound is met first"
    for choice in answer(qwen3.text, shaped(qwen3, regex="(yes|no)!")).choices:
        assert choice.text in ("yes!", "no!")


@pytest.mark.parametrize("pattern", ["(a{1,1000}){1,1000}b", "(.*a){20}.{300}", ".{0,60000}"])
def test_a_large_regex_that_can_be_followed_is(qwen3: Pair, pattern: str) -> None:
    for choice in answer(qwen3.text, shaped(qwen3, 20, regex=pattern)).choices:
        assert choice.token_ids
    assert len(tokens(qwen3.text, asked(QUESTION))) == 8


@pytest.mark.soak
def test_one_callers_expensive_structures_hold_no_other_up(qwen3: Pair) -> None:
    """Eight that take all of their time, of one tenant; meanwhile another's are compiled and answered."""
    grammars = [f'start: A\nA: B{{3000}}\nB: C{{3000}}\nC: D{{3000}}\nD: "a{n}"{{3000}}' for n in range(8)]

    def ask(grammar: str) -> TwinlensError:
        asking = shaped(qwen3, 5, grammar=grammar)
        asking.cache_salt = "greedy"
        return refusal(qwen3.text, asking)

    with ThreadPoolExecutor(8) as threads:
        refused = [threads.submit(ask, grammar) for grammar in grammars]
        until(lambda: any(each.done() for each in refused), "they are being compiled")
        for number in range(3):
            asking = shaped(qwen3, 5, regex=f"(yes|no){number}")
            asking.cache_salt = "modest"
            assert answer(qwen3.text, asking).choices
        assert not all(each.done() for each in refused)
    found = {each.result().reason for each in refused}
    assert found <= {"BAD_STRUCTURE", "STRUCTURE_TOO_LARGE"}, "of time, or of bytes where the machine is fast"


def test_an_abort_reaches_requests_of_its_own_salt_alone(qwen3: Pair) -> None:
    asking = asked(user("count"), greedy(3000))
    asking.request_id, asking.cache_salt = "whose?", "mine"
    with qwen3.text.generate(asking) as events:
        next(iter(events))
        assert [qwen3.text.abort("whose?", cache_salt=salt) for salt in ("", "yours", "mine")] == [0, 0, 1]
