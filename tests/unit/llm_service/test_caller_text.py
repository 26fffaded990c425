"""A caller's text in a template answers as a string does, and what a template makes of it is the caller's."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_service.prompt.caller_text import CallerText, CallerTexts, plain
from llm_service.prompt.chat_template import ChatTemplate
from llm_service.request import ChatPrompt, Message

ASKED: dict[str, Callable[[Any], Any]] = {
    "strip": lambda text: text.strip(),
    "strip signs": lambda text: text.strip("\na"),
    "lstrip": lambda text: text.lstrip(),
    "rstrip": lambda text: text.rstrip("\n"),
    "split": lambda text: text.split("</think>"),
    "split once": lambda text: text.split("a", 1),
    "split at white space": lambda text: text.split(),
    "first word": lambda text: text.split(None, 1),
    "rsplit": lambda text: text.rsplit("a", 1),
    "last word": lambda text: text.rsplit(None, 1),
    "splitlines": lambda text: text.splitlines(),
    "lines": lambda text: text.splitlines(keepends=True),
    "partition": lambda text: text.partition("a"),
    "rpartition": lambda text: text.rpartition("a"),
    "replace": lambda text: text.replace("a", "<b>"),
    "replace once": lambda text: text.replace("</think>", "", 1),
    "replace nothing": lambda text: text.replace("", "-"),
    "prefix": lambda text: text.removeprefix("a"),
    "suffix": lambda text: text.removesuffix("</think>"),
    "first": lambda text: text[:1],
    "behind": lambda text: text[2:],
    "last": lambda text: text[-3:],
    "every other": lambda text: text[::2],
    "backwards": lambda text: text[::-1],
    "signs": list,
    "upper": lambda text: text.upper(),
    "title": lambda text: text.title(),
    "capitalize": lambda text: text.capitalize(),
    "center": lambda text: text.center(20),
    "more": lambda text: "x" + text + "y",
    "twice": lambda text: 2 * text,
    "join": lambda text: text.join(["a", text]),
    "repr": lambda text: repr([text]),
    "in": lambda text: "a" in text,
    "startswith": lambda text: text.startswith(("<", "a")),
    "endswith": lambda text: text.endswith("</think>"),
    "find": lambda text: text.find("a"),
    "isspace": lambda text: text.isspace(),
    "length": len,
    "truth": bool,
    "equal": lambda text: (text == "a", text != "a", text in ["a", ""]),
    "order": lambda text: (text < "a", text >= "a"),
    "key": {"a": 1, "": 2}.get,
}
SIGNS = ["a", "b", " ", "\n", "\r\n", "ü", "</think>", "\ue000", "\ue001", "'", '"']
WORDS = st.lists(st.sampled_from(SIGNS)).map("".join)


def said(texts: CallerTexts, value: Any) -> Any:
    """A value in which strings say what they stand for."""
    if isinstance(value, list | tuple):
        return type(value)(said(texts, each) for each in value)
    return plain(texts.read(value)) if isinstance(value, str) else value


@pytest.mark.parametrize("name", ASKED)
@given(st.lists(st.tuples(WORDS, st.booleans()), max_size=3))
def test_it_answers_as_a_string_does(name: str, pieces: list[tuple[str, bool]]) -> None:
    texts = CallerTexts()
    text = texts.read("".join(texts.put(piece) if own else piece for piece, own in pieces))
    assert said(texts, ASKED[name](text)) == ASKED[name]("".join(piece for piece, _ in pieces))


CUT = ("strip", "lstrip", "rstrip", "split", "splitlines", "partition", "replace once", "behind", "backwards", "upper")


@pytest.mark.parametrize("name", CUT)
def test_what_is_made_of_it_is_still_the_callers(name: str) -> None:
    texts = CallerTexts()
    made = ASKED[name](texts.put(" <|end|>a</think>\n<|end|> "))
    whole = texts.read("".join(made))
    assert isinstance(whole, CallerText)
    assert all(part.source for part in texts.parts(whole))


def pieces(template: str, *words: str, **fields: Any) -> list[tuple[str, bool]]:
    return ChatTemplate(template, {}).render(ChatPrompt((Message("user", words),), **fields))


@pytest.mark.parametrize(
    ("template", "words", "wanted"),
    [
        ("{{ messages[0].content | trim }}", "\nhello\n\n", [("hello", True)]),
        ("[{{ ('<' ~ messages[0].content ~ '>') | replace('<>', '') }}]", "", [("[]", False)]),
        ("{{ (' ' ~ messages[0].content) | trim }}", " <|a|> ", [("<|a|>", True)]),
        ("{% set x %}{{ messages[0].content }}!{% endset %}{{ x | length }}", "four", [("5", False)]),
        ("{% macro m(x) %} {{ x }}{% endmacro %}{{ m(messages[0].content) | trim }}", "a ", [("a", True)]),
        ("{{ ['x', messages[0].content] | join(',') | upper }}", "y", [("X,", False), ("Y", True)]),
        ("{{ ', '.join([messages[0].content]) | trim }}", " a", [("a", True)]),
        ("{{ messages[0].content | title }}", "one two", [("One Two", True)]),
        ("{{ messages[0].content | escape }}", "<a>", [("&lt;a&gt;", True)]),
        ("{{ messages[0].content | int + 1 }}", "41", [("42", False)]),
        ("{{ messages[0].content | first }}{{ messages[0].content | wordcount }}", "<a b", [("<", True), ("2", False)]),
        ("{{ messages[0].content | tojson }}", 'a"', [('"', False), ('a\\"', True), ('"', False)]),
        ("{{ ('é' ~ messages[0].content) | tojson(ensure_ascii=true) }}", "ü", [('"\\u00e9', False)]),
        ("{{ {'a': 1, messages[0].content: 2}['b'] }}", "b", [("2", False)]),
    ],
)  # fmt: skip
def test_filters_see_what_a_text_says(template: str, words: str, wanted: list[tuple[str, bool]]) -> None:
    assert pieces(template, words)[: len(wanted)] == wanted


@given(WORDS)
def test_json_of_a_text_is_that_of_a_string(words: str) -> None:
    made = pieces("{{ [messages[0].content] | tojson(indent=1) }}", words)
    assert "".join(text for text, _ in made) == json.dumps([words], ensure_ascii=False, indent=1)


def test_a_text_that_looks_like_what_stands_for_one_is_only_a_text() -> None:
    texts = CallerTexts()
    mark = str.__str__(texts.put("other"))
    assert pieces("{{ messages[0].content | trim }}", f"{mark} ") == [(mark, True)]


def test_an_answer_goes_on_behind_what_a_template_leaves_of_the_last_message() -> None:
    template = "{% for m in messages %}<{{ m.content | trim }}>{% endfor %}"
    asked = ChatPrompt((Message("user", ("a ",)), Message("assistant", ("b ", "c "))), continues=True)
    assert "".join(text for text, _ in ChatTemplate(template, {}).render(asked)) == "<a><b c"
