"""Structural tags: what may be said token by token, of each format, and what is refused by its name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from common.checkpoints.checkpoint import Checkpoint
from common.errors import InvalidInput
from llm_service.engine.structure import Structures
from llm_service.prompt.builder import PromptBuilder
from llm_service.prompt.structural_tag import as_grammar
from llm_service.request import Structure, TextPrompt
from testkit.checkpoints import VOCABULARY

MARKS = {"<tool_call>": False, "</tool_call>": False, "[CALL]": False, "[SAY]": True}
SIZE = VOCABULARY + len(MARKS)
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"], "additionalProperties": False}
OBJECT = {"type": "json_schema", "json_schema": SCHEMA}


@pytest.fixture(scope="module")
def model(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[PromptBuilder, Structures]:
    """A tokenizer with tokens for marks, some of which are special."""
    folder = Path(shutil.copytree(checkpoint, tmp_path_factory.mktemp("tags") / "model"))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    like = tokenizer["added_tokens"][0]
    for number, (mark, special) in enumerate(MARKS.items(), VOCABULARY):
        tokenizer["added_tokens"].append({**like, "id": number, "content": mark, "special": special})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["vocab_size"] = SIZE
    (folder / "config.json").write_text(json.dumps(config))
    return PromptBuilder(Checkpoint(folder)), Structures(Checkpoint(folder), SIZE, [0])


def said(model: tuple[PromptBuilder, Structures], tag: dict[str, Any], text: str) -> str:
    """How much of a text a tag allows, token by token; with a full stop behind it where it may end there."""
    builder, structures = model
    form = builder.form(Structure("structural_tag", json.dumps(tag)), TextPrompt("x"))
    matcher = structures.compile(form)[1]
    ids = builder.encode(text, allow_special=True)
    for place, token in enumerate(ids):
        if not matcher.compute_bitmask()[token // 8] >> token % 8 & 1 or not matcher.consume_token(token):
            return builder.decode(ids[:place])
    return builder.decode(ids) + ("." if matcher.compute_bitmask()[0] & 1 else "")


def tags(*begins: str, end: str = "</tool_call>", **more: Any) -> dict[str, Any]:
    return {
        "type": "triggered_tags",
        "tags": [{"begin": begin, "content": OBJECT, "end": end} for begin in begins],
        **more,
    }


CALL = '<tool_call>f{"a": 1}</tool_call>'
FREE = tags("<tool_call>f", "<tool_call>g", triggers=["<tool_call>"])
OLD = {
    "type": "structural_tag",
    "structures": [{"begin": "<tool_call>f", "schema": SCHEMA, "end": "</tool_call>"}],
    "triggers": ["<tool_call>"],
}
IN_TEXT = tags("<fun=f>", "<fun=g>", end="</fun>", triggers=["<fun="])
PLAIN = tags("[CALL]f", end="\n", triggers=["[CALL]"])
SPECIAL = tags("[SAY]f", end="\n", triggers=["[SAY]"])
SEVERAL = tags("<tool_call>f", "<fun=f>", triggers=["<fun=", "<tool"])
TAG = {"type": "tag", "begin": "<a>", "content": OBJECT, "end": ["</a>", "</b>"]}
QUOTED = {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"}
LISTED = {"type": "tags_with_separator", "tags": [TAG], "separator": ", "}
SEQUENCE = {
    "type": "sequence",
    "elements": [
        {"type": "const_string", "value": "So/\n"},
        {"type": "regex", "pattern": "[0-9]/\\/x"},
        {"type": "or", "elements": [OBJECT, QUOTED]},
        {"type": "any_text"},
    ],
}

CASES: dict[str, tuple[dict[str, Any], list[tuple[str, str]]]] = {
    "tags behind a token": (
        FREE,
        [
            ("Let me see.", "Let me see.."),
            (f"Hm. {CALL} and {CALL.replace('>f', '>g')} done", f"Hm. {CALL} and {CALL.replace('>f', '>g')} done."),
            ("Hm. <tool_call>h", "Hm. <tool_call>"),
            ('<tool_call>f{"a": 3', '<tool_call>f{"a": '),
            ('<tool_call>f{"a": 1}</tool_call>', f"{CALL}."),
        ],
    ),
    "the older form": (OLD, [(f"Hm. {CALL}", f"Hm. {CALL}."), ("<tool_call>g", "<tool_call>")]),
    "tags behind a text": (
        IN_TEXT,
        [
            ('a<fu<fun=g>{"a": 22}</fun> b', 'a<fu<fun=g>{"a": 22}</fun> b.'),
            ("a<fun=h", "a<fun="),
            ("<fun=f>1", "<fun=f>"),
        ],
    ),
    "tags behind a token that is text": (
        PLAIN,
        [('a[CALL]f{"a": 1}\nb', 'a[CALL]f{"a": 1}\nb.'), ("[CALL]g", "[CALL]")],
    ),
    "tags behind a special token": (SPECIAL, [('a[SAY]f{"a": 1}\nb', 'a[SAY]f{"a": 1}\nb.'), ("[SAY]g", "[SAY]")]),
    "several triggers": (SEVERAL, [(f'{CALL}<fun=f>{{"a": 1}}</tool_call>', f'{CALL}<fun=f>{{"a": 1}}</tool_call>.')]),
    "one tag at least": (
        {**FREE, "at_least_one": True},
        [("Hm", ""), (f"{CALL} Hm. {CALL}", f"{CALL} Hm. {CALL}."), ("<tool_call>h", "<tool_call>")],
    ),
    "one tag at most": (
        {**FREE, "stop_after_first": True},
        [("Hm", "Hm."), (f"a{CALL}", f"a{CALL}."), (f"a{CALL}b", f"a{CALL}")],
    ),
    "one tag": (
        {**FREE, "stop_after_first": True, "at_least_one": True},
        [("a", ""), (CALL, f"{CALL}."), (f"{CALL}b", CALL)],
    ),
    "a tag": (TAG, [('<a>{"a": 1}</b>', '<a>{"a": 1}</b>.'), ("<a>[", "<a>")]),
    "a tag around any text": (QUOTED, [("<a>b<c</a>", "<a>b<c</a>."), ("<a>b</a>c", "<a>b</a>")]),
    "tags with a separator": (
        LISTED,
        [("", "."), ('<a>{"a": 1}</a>, <a>{"a": 22}</b>', '<a>{"a": 1}</a>, <a>{"a": 22}</b>.')],
    ),
    "one with a separator": ({**LISTED, "at_least_one": True, "stop_after_first": True}, [("", ""), ("a", "")]),
    "a sequence": (
        SEQUENCE,
        [('So/\n5//x{"a": 1}, yes', 'So/\n5//x{"a": 1}, yes.'), ("So/\n5//x<a>b</a>", "So/\n5//x<a>b</a>."), ("a", "")],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_tag_allows_is_said_and_nothing_else(model: tuple[PromptBuilder, Structures], name: str) -> None:
    form, texts = CASES[name]
    tag = form if "structures" in form else {"type": "structural_tag", "format": form}
    for text, allowed in texts:
        assert said(model, tag, text) == allowed, text


def deep(levels: int) -> dict[str, Any]:
    return OBJECT if not levels else {"type": "sequence", "elements": [deep(levels - 1)]}


@pytest.mark.parametrize(
    ("form", "why"),
    [
        ({"type": "qwen_xml_parameter", "json_schema": {}}, "its type qwen_xml_parameter is not served"),
        ({**FREE, "excludes": ["<think>"]}, "excludes of triggered_tags is not served"),
        ({**OBJECT, "style": "xml"}, "style of json_schema is not served"),
        ({"type": "const_string"}, "value is a text"),
        ({"type": "json_schema", "json_schema": "x"}, "a schema is an object"),
        ({"type": "sequence", "elements": []}, "elements is a list, and not empty"),
        ({"type": "sequence", "elements": [{"type": "any_text"}, OBJECT]}, "has an end where something follows"),
        ({"type": "sequence", "elements": [FREE, OBJECT]}, "has an end where something follows"),
        ({**QUOTED, "end": ""}, "text of any kind ends with one text"),
        ({**QUOTED, "end": ["a", "b"]}, "text of any kind ends with one text"),
        ({**TAG, "end": [5]}, "an end is a text, or a list of texts"),
        ({**FREE, "triggers": ["<other>"]}, "a tag begins with none of the triggers"),
        (tags("a<tool_call>f", triggers=["a<tool_call>"]), "behind a text with a token of its own"),
        ({**FREE, "tags": [{"type": "or", "elements": []}]}, "tags are of the type tag"),
        ({**FREE, "tags": ["x"]}, "a format is a JSON object"),
        (deep(17), "more than 16 formats within each other"),
    ],
)
def test_what_is_not_served_is_refused_by_its_name(form: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidInput, match=why) as error:
        as_grammar(json.dumps({"format": form}), in_pieces)
    assert (error.value.reason, error.value.field) == ("BAD_STRUCTURE", "sampling.structural_tag")


def in_pieces(text: str) -> list[str | int]:
    before, mark, behind = text.partition("<tool_call>")
    return [each for each in (before, 5 if mark else "", behind) if each != ""]


@pytest.mark.parametrize("text", ["", "[]", "{", "NaN", '{"structures": [], "triggers": ["a"]}', '{"structures": [5]}'])
def test_what_is_no_tag_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="cannot be read"):
        as_grammar(text, lambda text: [text])
