"""Mistral's own form of a tokenizer: the same tokens and chats as by the rule that it stands for, and by its maker's
package where that is installed."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from common.checkpoints import tekken
from common.checkpoints.checkpoint import Checkpoint, CheckpointError

MARKS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]", "[AUDIO]"),
    *("[PREFIX]", "[MIDDLE]", "[SUFFIX]"),
)
TOKENS = (*(bytes([byte]) for byte in range(256)), b"ab", b"ba", b"bab", b"abab", b"aa", b" a", b"aaa", b"\xc3\xa9")
FILE: dict[str, Any] = {
    "config": {
        "pattern": r"\s?\S+|\s+",
        "num_vocab_tokens": len(TOKENS),
        "default_num_special_tokens": len(MARKS) + 2,
        "default_vocab_size": len(MARKS) + 2 + len(TOKENS) - 1,
        "version": "v7",
    },
    "vocab": [
        {"rank": at, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for at, token in enumerate(TOKENS)
    ],
    "special_tokens": [{"rank": at, "token_str": mark, "is_control": True} for at, mark in enumerate(MARKS)],
}
FIRST = len(MARKS) + 2
KNOWN = TOKENS[:-1]  # the last is beyond the size of the vocabulary


def by_turns(text: str) -> Iterator[int]:
    """Pairs become one token, those first whose token comes first, until none does."""
    for word in re.findall(FILE["config"]["pattern"], text):
        parts = [bytes([byte]) for byte in word.encode()]
        while True:
            pairs = [parts[at] + parts[at + 1] for at in range(len(parts) - 1)]
            known = [KNOWN.index(pair) for pair in pairs if pair in KNOWN]
            if not known:
                break
            at = pairs.index(KNOWN[min(known)])
            parts[at : at + 2] = [pairs[at]]
        yield from (FIRST + KNOWN.index(part) for part in parts)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_str(json.dumps(tekken.tokenizer_settings(FILE)))


@given(text=st.text(alphabet="ab \né日", max_size=40))
def test_tokens_are_those_of_the_file(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).ids
    assert ids == [1, *by_turns(text)]
    assert tokenizer.decode(ids) == text


def test_special_tokens_come_first_those_without_a_name_among_them(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_to_id(mark) for mark in MARKS] == list(range(len(MARKS)))
    assert tokenizer.token_to_id(f"<SPECIAL_{len(MARKS) + 1}>") == len(MARKS) + 1
    assert tokenizer.encode("ab[INST]ab", add_special_tokens=False).ids == [FIRST + 256, 3, FIRST + 256]
    assert tokenizer.get_vocab_size() == FIRST + len(KNOWN)


def test_a_checkpoint_has_the_tokenizer_that_it_is_stored_with(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"has no tokenizer.json"):
        Checkpoint(tmp_path).tokenizer()
    (tmp_path / "tekken.json").write_text(json.dumps({"config": {}}))
    with pytest.raises(CheckpointError, match=r"tekken.json is not in a known form"):
        Checkpoint(tmp_path).tokenizer()
    (tmp_path / "tekken.json").write_text(json.dumps(FILE))
    assert json.loads(Checkpoint(tmp_path).tokenizer()) == tekken.tokenizer_settings(FILE)
    (tmp_path / "tokenizer.json").write_text('{"its": "own"}')
    assert Checkpoint(tmp_path).tokenizer() == '{"its": "own"}'


CHAT = [
    {"role": "system", "content": "be short"},
    {"role": "user", "content": " a  b "},
    {"role": "assistant", "content": "bab"},
    {"role": "user", "content": "aa"},
]


def rendered(messages: list[dict[str, Any]]) -> str:
    template = tekken.chat_template(FILE)
    assert template is not None
    text: str = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(template).render(messages=messages)
    return text


def test_a_chat_stands_between_marks() -> None:
    system = "<s>[SYSTEM_PROMPT]be short[/SYSTEM_PROMPT]"
    assert rendered(CHAT) == f"{system}[INST] a  b [/INST]bab</s>[INST]aa[/INST]"
    heard = [{"type": "audio"}, {"type": "text", "text": "a"}]
    assert rendered([{"role": "user", "content": heard}]) == "<s>[INST][AUDIO]a[/INST]"


@pytest.mark.parametrize("version", ["v3", "v2", None])
def test_older_chats_are_not_known(version: str | None) -> None:
    assert tekken.chat_template({"config": {"version": version}}) is None
    assert tekken.chat_template({}) is None


def test_tokens_and_chats_are_those_of_its_maker_s_package(tokenizer: Tokenizer, tmp_path: Path) -> None:
    mistral = pytest.importorskip("mistral_common.tokens.tokenizers.mistral")
    requests = pytest.importorskip("mistral_common.protocol.instruct.request")
    (tmp_path / "tekken.json").write_text(json.dumps(FILE))
    theirs = mistral.MistralTokenizer.from_file(tmp_path / "tekken.json")
    said = theirs.encode_chat_completion(requests.ChatCompletionRequest.from_openai(messages=CHAT)).tokens
    assert tokenizer.encode(rendered(CHAT), add_special_tokens=False).ids == said
    words = theirs.instruct_tokenizer.tokenizer
    for text in ("", "abab bab", " é aaa\n\naab", "日本"):
        assert tokenizer.encode(text).ids == words.encode(text, bos=True, eos=False)
