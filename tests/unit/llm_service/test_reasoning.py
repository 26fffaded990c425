"""How many tokens of an answer are reasoning: as the whole text says, wherever tokens cut it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.checkpoints.checkpoint import Checkpoint
from llm_service.prompt.builder import PromptBuilder
from llm_service.prompt.detokenizer import Detokenizer
from llm_service.prompt.output_marks import THINK, ToolFormat
from llm_service.prompt.reasoning import CallSign, ReasoningCounter
from testkit.checkpoints import VOCABULARY

MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


def by_the_text(builder: PromptBuilder, ids: list[int], *, thinking: bool) -> int:
    """The tokens up to the one with which the text has the end of its reasoning; all, where it has none."""
    texts = [builder.decode(ids[:length]) for length in range(len(ids) + 1)]
    said = texts[-1].lstrip()
    if not thinking and not said.startswith("<think>"):
        return 0
    opened = 0 if thinking else len(texts[-1]) - len(said) + len("<think>")
    ends = (length for length, text in enumerate(texts) if "</think>" in text[opened:])
    return next(ends, len(ids))


def counted(builder: PromptBuilder, ids: list[int], *, thinking: bool) -> int:
    counter = ReasoningCounter(builder.texts, THINK, thinking=thinking)
    for token in ids:
        counter.push(token)
    return counter.tokens


BITS = st.sampled_from(["<think>", "</think>", "<thi", "nk>", "</", "think>", " ", "\n", "Hm.", "é", "</think>\n", "x"])


@given(st.lists(BITS, max_size=12), st.booleans())
@example(["<think>", "</think>"], False)
@example(["\n", "<thi", "nk>", "Hm.", "</think>\n", "</think>"], False)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_marks_of_several_tokens_count_as_the_text_says(
    builder: PromptBuilder, bits: list[str], thinking: bool
) -> None:
    ids = [token for bit in bits for token in builder.encode(bit)]
    assert counted(builder, ids, thinking=thinking) == by_the_text(builder, ids, thinking=thinking)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "special"])
def marked(request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> PromptBuilder:
    """A model that has a token for each mark, which its tokenizer calls special, or does not."""
    folder = tmp_path_factory.mktemp("marked")
    for name in ("config.json", "chat_template.jinja", "preprocessor_config.json", "tokenizer_config.json"):
        if (checkpoint / name).exists():
            (folder / name).write_bytes((checkpoint / name).read_bytes())
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    like = {**tokenizer["added_tokens"][0], "special": request.param}
    tokenizer["added_tokens"] += [{**like, "id": VOCABULARY + n, "content": mark} for n, mark in enumerate(MARKS)]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["vocab_size"] = VOCABULARY + len(MARKS)
    (folder / "config.json").write_text(json.dumps(config))
    return PromptBuilder(Checkpoint.resolve(str(folder)))


@pytest.mark.parametrize(
    ("text", "thinking", "tokens"),
    [
        ("<think>zq</think>c", False, 4),
        ("<think></think>c", False, 2),
        ("zq</think>c", True, 3),
        ("c<think>zq</think>", False, 0),
        ("<think>zq", False, 3),
    ],
)
def test_marks_that_are_tokens_count_each_as_one(marked: PromptBuilder, text: str, thinking: bool, tokens: int) -> None:
    ids = marked.encode(text, allow_special=True)
    assert len(ids) == sum(map(len, text.replace("</think>", "2").replace("<think>", "1"))), "a letter is not a token"
    assert counted(marked, ids, thinking=thinking) == tokens


def test_marks_are_in_the_text_though_the_tokenizer_calls_them_special(marked: PromptBuilder) -> None:
    text = "<think>ab</think><tool_call>c</tool_call>"
    detokenizer = Detokenizer(marked.tokenizer)
    said = [detokenizer.push(token) for token in marked.encode(text, allow_special=True)]
    assert "".join((*said, detokenizer.finish())) == text
    end = marked.encode("<|im_end|>", allow_special=True)
    assert (len(end), Detokenizer(marked.tokenizer).push(*end)) == (1, "")


def test_white_space_before_reasoning_is_not_read_again_with_each_token(builder: PromptBuilder) -> None:
    counter = ReasoningCounter(builder.texts, THINK, thinking=False)
    for token in builder.encode(" \n") * 500:
        counter.push(token)
        assert len(counter._said) <= len("<think>")
    before = counter._pushed
    ids = builder.encode("<think>c</think>c")
    for token in ids:
        counter.push(token)
    assert (counter.tokens - before, counter._over) == (len(builder.encode("<think>c</think>")), True)


@pytest.mark.parametrize(
    ("form", "call"),
    [
        (ToolFormat.JSON, '<tool_call>\n{"name": "now"'),
        (ToolFormat.XML, "<tool_call>\n<function=now>"),
        (ToolFormat.XML, '<tool_call>{"name": "now"'),
        (ToolFormat.GLM, "<tool_call>now\n</tool_call>"),
        (ToolFormat.KIMI, "<|tool_calls_section_begin|>"),
        (ToolFormat.GEMMA, "<|tool_call>"),
    ],
)
def test_a_call_ends_reasoning_and_is_none_of_it(builder: PromptBuilder, form: ToolFormat, call: str) -> None:
    thought = "I write <tool_call> {" * 100 + '<tool_call>{"name": "other"} Hm.'
    counter = ReasoningCounter(builder.texts, THINK, thinking=True, call=CallSign.of(form, ["now"]))
    for text in (thought, call, "</think>"):
        for token in builder.encode(text):
            counter.push(token)
    assert counter.tokens == len(builder.encode(thought))


def test_nothing_but_its_end_ends_reasoning_where_nothing_may_be_called(builder: PromptBuilder) -> None:
    assert CallSign.of(ToolFormat.XML, []) is CallSign.of(None, ["now"]) is CallSign.of(ToolFormat.LLAMA, ["a"]) is None
