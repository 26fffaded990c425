"""Tokens into text as they come: nothing lost, no broken characters, nothing of a stop text."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from llm_service.prompt.builder import PromptBuilder
from llm_service.prompt.detokenizer import Detokenizer, TokenTexts
from testkit.checkpoints import SPECIAL_IDS, VOCABULARY

FAMILY = "👩‍👩‍👧‍👦 naïve 中文 🇩🇪 ё ✓"


def pieces(builder: PromptBuilder, ids: list[int], stop: tuple[str, ...] = ()) -> tuple[list[str], str | None]:
    """What each token releases, and the rest at the end; the stop text that was met."""
    detokenizer = Detokenizer(builder.tokenizer, stop)
    out = []
    for token in ids:
        out.append(detokenizer.push(token))
        if detokenizer.stopped is not None:
            return out, detokenizer.stopped
    return [*out, detokenizer.finish()], detokenizer.stopped


@given(st.lists(st.integers(0, VOCABULARY - 1), max_size=40))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_the_pieces_join_to_the_decoded_whole_for_any_tokens(builder: PromptBuilder, ids: list[int]) -> None:
    assert "".join(pieces(builder, ids)[0]) == builder.tokenizer.decode(ids, skip_special_tokens=True)


@given(st.lists(st.integers(0, VOCABULARY - 1), max_size=40), st.booleans())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_special_tokens_stand_in_a_text_by_their_names_where_they_are_not_skipped(
    builder: PromptBuilder, ids: list[int], pieces: bool
) -> None:
    tokenizer = of_pieces() if pieces else builder.tokenizer
    marks = [tokenizer.token_to_id("<end>")] if pieces else list(SPECIAL_IDS.values())
    ids = [token for each in ids for token in (each % tokenizer.get_vocab_size(), marks[each % len(marks)])]
    detokenizer = Detokenizer(tokenizer, skip_special=False)
    out = [detokenizer.push(token) for token in ids]
    text = "".join([*out, detokenizer.finish()])
    assert text.replace("\ufffd", "") == tokenizer.decode(ids, skip_special_tokens=False).replace("\ufffd", "")
    assert sum(text.count(tokenizer.id_to_token(mark)) for mark in marks) >= len(ids) // 2


@given(st.text(max_size=30))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_any_text_comes_back_in_whole_characters(builder: PromptBuilder, text: str) -> None:
    ids = builder.encode(text)
    out, _ = pieces(builder, ids)
    assert "".join(out) == builder.tokenizer.decode(ids)
    assert all("�" not in piece for piece in out) or "�" in text


def test_characters_that_take_several_tokens_come_whole(builder: PromptBuilder) -> None:
    ids = builder.encode(FAMILY)
    assert len(ids) > len(FAMILY), "every character is one token: nothing is proved"
    out, _ = pieces(builder, ids)
    assert "".join(out) == FAMILY
    assert not any("�" in piece for piece in out)


def test_a_character_cut_off_by_the_end_is_shown_as_damaged(builder: PromptBuilder) -> None:
    out, _ = pieces(builder, builder.encode("ab👩")[:-1])
    assert "".join(out).startswith("ab")
    assert "".join(out).endswith("�")
    assert "�" not in "".join(out[:-1])


END = SPECIAL_IDS["<|im_end|>"]


def test_a_character_is_whole_though_many_tokens_without_text_stand_inside_it(builder: PromptBuilder) -> None:
    first, *others = builder.encode("👩")
    assert len(others) > 1
    for gap in (1, 15, 16, 17, 200):
        out, _ = pieces(builder, [*builder.encode("a"), first, *[END] * gap, *others, *builder.encode("b")])
        assert "".join(out) == "a👩b"
        assert not any("�" in piece for piece in out)


# Bytes of ☃ (E2 98 83) and of � (EF BF BD) as tokens, one by one and across the ends of characters.
BYTES = ["â", "ĺ", "ĥ", "ĥâ", "ĺĥâĺ", "ĺĥ", "ï¿½", "ï", "½ï", "a", "ĥa", "<end>"]


def of_bytes() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE({word: n for n, word in enumerate(BYTES)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, len(BYTES) - 1), min_size=1, max_size=4), st.integers(1, 30)), max_size=8
    )
)
@settings(max_examples=600, deadline=None, derandomize=True)
def test_long_runs_that_give_no_whole_character_join_to_the_decoded_whole(runs: list[tuple[list[int], int]]) -> None:
    tokenizer, out = of_bytes(), ""
    ids = [token for run, times in runs for token in run * times]
    detokenizer = Detokenizer(tokenizer)
    for token in ids:
        out += detokenizer.push(token)
    assert out + detokenizer.finish() == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("word", ["<end>", "ĥ", "ĥâ"])
def test_a_token_without_text_is_not_decoded_again_with_each_that_follows(word: str) -> None:
    """An end token that is ignored comes again and again; and so may bytes that are no character."""
    tokenizer = of_bytes()
    detokenizer, out, token = Detokenizer(tokenizer), "", tokenizer.token_to_id(word)
    for _ in range(1000):
        out += detokenizer.push(token)
        assert len(detokenizer._window) < 16
    assert len(out) >= 990 * (word != "<end>")


def of_pieces() -> Tokenizer:
    """As Llama's and Gemma's: a space is ▁, and what is no piece falls back to its bytes."""
    words = ["▁", "a", "▁b", "<end>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE({word: n for n, word in enumerate(words)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


@given(st.text("ab ☃é👩🇩中", max_size=40))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_characters_that_fall_back_to_bytes_come_whole(text: str) -> None:
    tokenizer = of_pieces()
    detokenizer = Detokenizer(tokenizer)
    ids = tokenizer.encode(text).ids
    out = [detokenizer.push(token) for token in ids]
    assert ("".join(out), detokenizer.finish()) == (tokenizer.decode(ids), "") == (text, "")


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (b"a\xf0\x9f b", "a�� b"),
        (b"\xe4\xb8\xad\xe4\xb8\xe4\xb8\xad", "中��中"),
        (b"a\xff\xffa", "a��a"),
        (b"\xe4\xb8\xad\xe4\xb8", "中��"),
        (b"\x80\xe4\xb8\xad" * 20, "�中" * 20),
    ],
)
def test_each_byte_that_is_part_of_no_character_is_shown_as_damaged(data: bytes, shown: str) -> None:
    """And none beside it: the library takes a run of bytes with one such for damaged as a whole."""
    tokenizer = of_pieces()
    spelled = {ord("a"): "a", ord("b"): "▁b", ord(" "): "<end>"}
    ids = [tokenizer.token_to_id(spelled.get(byte, f"<0x{byte:02X}>")) for byte in data]
    detokenizer = Detokenizer(tokenizer)
    assert "".join(map(detokenizer.push, ids)) + detokenizer.finish() == shown


def test_a_character_is_whole_though_a_special_token_stands_among_the_bytes_that_it_falls_back_to() -> None:
    tokenizer = of_pieces()
    detokenizer = Detokenizer(tokenizer)
    ids = [tokenizer.token_to_id(word) for word in ("a", "<0xE2>", "<end>", "<0x98>", "<end>", "<end>", "<0x83>", "a")]
    assert "".join(map(detokenizer.push, ids)) + detokenizer.finish() == tokenizer.decode(ids) == "a☃a"


def test_a_stop_text_is_met_that_falls_back_to_bytes() -> None:
    tokenizer = of_pieces()
    detokenizer = Detokenizer(tokenizer, ("☃中",))
    out = [detokenizer.push(token) for token in tokenizer.encode("é☃☃中").ids]
    assert ("".join(out), detokenizer.stopped) == ("é☃", "☃中")


def test_a_token_of_pieces_adds_what_the_tokenizer_makes_of_it_though_it_was_added_to_them() -> None:
    """Gemma has runs of spaces and of lines as added tokens."""
    tokenizer = of_pieces()
    tokenizer.add_tokens(["▁▁", "\n\n", "<b>"])
    texts = TokenTexts(tokenizer)
    ids = [tokenizer.token_to_id(word) for word in ("▁▁", "\n\n", "<b>", "▁b", "<0x41>", "<end>")]
    assert list(map(texts.text_of, ids)) == ["  ", "\n\n", "<b>", " b", "A", "<end>"]
    assert "".join(map(texts.text_of, ids)) == tokenizer.decode(ids, skip_special_tokens=False)


def test_special_tokens_are_not_text(builder: PromptBuilder) -> None:
    ids = [*builder.encode("one "), SPECIAL_IDS["<|vision_start|>"], *builder.encode("two"), SPECIAL_IDS["<|im_end|>"]]
    assert "".join(pieces(builder, ids)[0]) == "one two"


@pytest.mark.parametrize("stop", ["l", "lo w", "o wörl", "👩‍👩‍👧", " wörld", "hello"])
def test_a_stop_text_ends_the_output_before_itself_wherever_tokens_cut_it(builder: PromptBuilder, stop: str) -> None:
    text = "hello wörld 👩‍👩‍👧 and more"
    out, met = pieces(builder, builder.encode(text), (stop,))
    assert met == stop
    assert "".join(out) == text[: text.index(stop)]


def test_the_stop_text_that_begins_first_wins(builder: PromptBuilder) -> None:
    out, met = pieces(builder, builder.encode("one two three four"), ("three", "two thr", "four"))
    assert (met, "".join(out)) == ("two thr", "one ")


def test_what_could_begin_a_stop_text_is_held_back_and_released_when_it_does_not(builder: PromptBuilder) -> None:
    detokenizer = Detokenizer(builder.tokenizer, ("xyz!",))
    out = [detokenizer.push(builder.encode(letter)[0]) for letter in "axyxyz"]
    assert out == ["a", "", "", "xy", "", ""]
    assert detokenizer.finish() == "xyz"
    assert detokenizer.stopped is None


@pytest.mark.parametrize(
    ("least", "shown"),
    [(0, ""), (2, ""), (3, "ab"), (4, "ab"), (5, "abab"), (6, "abab"), (7, "ababab")],
)
def test_no_stop_text_ends_the_output_before_its_least_tokens(builder: PromptBuilder, least: int, shown: str) -> None:
    detokenizer = Detokenizer(builder.tokenizer, ("ab",), least)
    out = ""
    for count, letter in enumerate("ababab", 1):
        out += detokenizer.push(builder.encode(letter)[0])
        if detokenizer.stopped is not None:
            assert count >= least
            assert (detokenizer.stopped, out) == ("ab", shown)
            return
    assert (least, out + detokenizer.finish()) == (7, shown)


def test_a_stop_text_that_was_whole_before_the_least_tokens_stays_text_though_a_longer_one_could_follow(
    builder: PromptBuilder,
) -> None:
    detokenizer = Detokenizer(builder.tokenizer, ("ab", "abc"), 3)
    out = [detokenizer.push(builder.encode(letter)[0]) for letter in "abxab"]
    assert (out, detokenizer.stopped) == (["", "", "abx", "", ""], "ab")


@given(st.text("ab☃", max_size=24), st.lists(st.text("ab☃", min_size=1, max_size=4), max_size=3))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_stopping_is_as_if_the_whole_text_were_known(builder: PromptBuilder, text: str, stops: list[str]) -> None:
    ids = [builder.tokenizer.token_to_id(c) for char in text for c in _bytes(char)]
    out, met = pieces(builder, ids, tuple(stops))
    # A stop text counts from the moment when it is whole, the first to be so; of several, the one that begins first.
    for end in range(len(text) + 1):
        found = [(text[:end].find(stop), stop) for stop in stops if stop in text[:end]]
        if found:
            place, _ = min(found)
            assert "".join(out) == text[:place]
            assert met is not None
            assert text[place:].startswith(met)
            return
    assert (met, "".join(out)) == (None, text)


@given(
    st.text("ab☃", max_size=24),
    st.lists(st.text("ab☃", min_size=1, max_size=4), max_size=3),
    st.integers(0, 12),
)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_a_stop_text_that_is_shown_is_all_that_is_shown_besides_and_nothing_waits_for_it(
    builder: PromptBuilder, text: str, stops: list[str], least: int
) -> None:
    ids = [builder.tokenizer.token_to_id(c) for char in text for c in _bytes(char)]
    free, hidden, shown = (
        Detokenizer(builder.tokenizer, ends, least, shows_stop=shows)
        for ends, shows in (((), False), (stops, False), (stops, True))
    )
    before = after = whole = ""
    for token in ids:
        before, after = before + hidden.push(token), after + shown.push(token)
        assert shown.stopped == hidden.stopped
        if hidden.stopped is not None:
            assert after == before + hidden.stopped
            return
        whole += free.push(token)
        assert after == whole
    assert after + shown.finish() == whole + free.finish()


def _bytes(char: str) -> list[str]:
    """A character as the byte-level tokens that spell it."""
    shown = {**{b: chr(b) for b in range(33, 127)}, 0xE2: "â", 0x98: "ĺ", 0x83: "ĥ"}
    return [shown[byte] for byte in char.encode()]


def test_thousands_of_random_tokens_join_to_the_decoded_whole(builder: PromptBuilder) -> None:
    rng = random.Random(0)
    ids = [rng.randrange(VOCABULARY) for _ in range(3000)]
    assert "".join(pieces(builder, ids)[0]) == builder.tokenizer.decode(ids, skip_special_tokens=True)
