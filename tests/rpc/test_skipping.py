"""What is not done twice: headers that are known, rows that are here, and spans whose KV is in the prefix cache."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import pictures
from tests.rpc.pairs import LLM_FLAGS, Pair, about, answer, asked, greedy, pair, tokens
from tests.waiting import until
from twinlens import TwinlensError, image, user, v1

FILES = [pictures.encoded(pictures.noise(256, 256, 9_700 + n)) for n in range(12)]  # 64 rows each
QUESTION = "Tell me at great length what can be seen here, and leave nothing out, however small it may be, please."


@pytest.fixture(scope="module")
def forgetful(checkpoint: Path) -> Iterator[Pair]:
    """Room for the rows of one picture, so that asking for another makes it forget the one before."""
    with pair(checkpoint, row_cache_bytes="64KiB") as both:
        yield both


def work(both: Pair) -> tuple[int, int, int]:
    """Rows received and streams opened by the LLM service, items encoded by the encoder, so far."""
    text, media = both.text.get_load(), both.media.get_load()
    return text.rows_received, text.encode_attempts, media.encoded_items


def test_a_repeat_asks_no_encoder_for_anything(qwen3: Pair) -> None:
    file = pictures.encoded(pictures.noise(96, 96, 9_690))
    first = tokens(qwen3.text, asked(about(file, "One?")))
    before, known = work(qwen3), qwen3.text.get_load().headers_known
    assert tokens(qwen3.text, asked(about(file, "One?"))) == first
    assert len(tokens(qwen3.text, asked(about(file, "Another one?")))) == 8
    assert work(qwen3) == before
    assert qwen3.text.get_load().headers_known == known + 2


def test_a_data_address_or_a_stated_type_asks_no_encoder_again_unless_it_is_another_type(qwen3: Pair) -> None:
    file = pictures.encoded(pictures.noise(96, 96, 9_693))
    address = f"data:image/png;base64,{base64.b64encode(file).decode()}"
    first = tokens(qwen3.text, asked(user(image(address), "One?")))
    before = work(qwen3)
    for item in (image(address), image(file, mime_type="image/png"), image(file)):
        assert tokens(qwen3.text, asked(user(item, "One?"))) == first
    assert work(qwen3) == before
    for item in (image(address.replace("png", "jpeg")), image(file, mime_type="image/jpeg")):
        with pytest.raises(TwinlensError) as error:
            answer(qwen3.text, asked(user(item, "One?")))
        assert error.value.reason == "MIME_MISMATCH"


def test_rows_make_room_for_others_once_they_have_been_read_and_not_at_the_end_of_the_answer(forgetful: Pair) -> None:
    long, short = asked(about(FILES[10], QUESTION), greedy(3900)), asked(about(FILES[11], QUESTION))
    with forgetful.text.generate(long, timeout=180) as events:
        next(event for event in events if event.HasField("delta"))
        assert len(tokens(forgetful.text, short)) == 8
        assert forgetful.text.get_load().running, "the long answer goes on"
    until(forgetful.idle, "nothing is held any more")


def given_as_rows(both: Pair, item: v1.Media) -> v1.Media:
    """The rows of an item, as a caller who has them gives them."""
    header, block = v1.EncodeHeader(), v1.EmbeddingBlock()
    for event in both.media.encode(item):
        header.MergeFrom(event.header)
        block.data += event.rows.data
    block.count, block.levels, block.width, block.dtype = header.tokens, header.levels, header.width, header.dtype
    block.grid.CopyFrom(header.grid)
    return v1.Media(modality=item.modality, embedding=block)


@pytest.mark.parametrize("kind", ["pixels", "rows"])
def test_a_repeat_of_pixels_or_of_ready_made_rows_asks_no_encoder_either(qwen3: Pair, kind: str) -> None:
    item = v1.Media(modality=v1.MODALITY_IMAGE)
    item.pixels.MergeFrom(v1.PixelBlock(data=pictures.noise(96, 64, 9_692).tobytes(), frames=1, height=64, width=96))
    item = given_as_rows(qwen3, item) if kind == "rows" else item
    first = answer(qwen3.text, asked(user(item, "One?")))
    before, known = work(qwen3), qwen3.text.get_load().headers_known
    again = answer(qwen3.text, asked(user(item, "One?")))
    assert again.choices[0].token_ids == first.choices[0].token_ids
    assert (work(qwen3), qwen3.text.get_load().headers_known) == (before, known + 1)
    contradicting = v1.Media.FromString(item.SerializeToString())
    if kind == "rows":
        contradicting.embedding.count += 1
    else:
        contradicting.pixels.height += 1
    with pytest.raises(TwinlensError) as error:
        answer(qwen3.text, asked(user(contradicting, "One?")))
    assert error.value.code.name == "INVALID_ARGUMENT"


def test_a_tenant_who_states_anothers_key_is_told_that_there_is_none(qwen3: Pair) -> None:
    file = pictures.encoded(pictures.noise(96, 96, 9_691))
    (started, *_) = qwen3.text.generate(asked(about(file), cache_salt="theirs"))
    stated = asked(about(file), cache_salt="ours")
    stated.chat.messages[0].parts[0].media.CopyFrom(
        v1.Media(modality=v1.MODALITY_IMAGE, key=started.started.spans[0].key)
    )
    with pytest.raises(Exception, match="NOT_FOUND"):
        answer(qwen3.text, stated)


def test_a_span_that_the_prefix_cache_covers_is_neither_encoded_nor_fetched(forgetful: Pair) -> None:
    text = forgetful.text
    alone = [answer(text, asked(about(file, QUESTION))) for file in FILES[:3]]  # the rows of the first are gone now
    before, covered = work(forgetful), text.get_load().items_covered
    for file, right in zip(FILES[:2], alone, strict=False):
        again = answer(text, asked(about(file, QUESTION)))
        assert again.choices[0].token_ids == right.choices[0].token_ids
        assert again.started.cached_tokens > right.started.cached_tokens
    several = answer(text, asked(about(FILES[0], QUESTION), n_greedy(3)))
    assert [choice.token_ids for choice in several.choices] == [alone[0].choices[0].token_ids] * 3
    assert work(forgetful) == before
    assert text.get_load().items_covered == covered + 3


def test_a_prompt_that_is_scored_needs_its_rows_whatever_is_cached(forgetful: Pair) -> None:
    text = forgetful.text
    right = tokens(text, asked(about(FILES[8], QUESTION)))
    tokens(text, asked(about(FILES[9], QUESTION)))
    received, covered = text.get_load().rows_received, text.get_load().items_covered
    scored = v1.SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, prompt_logprobs=0)
    assert tokens(text, asked(about(FILES[8], QUESTION), scored)) == right
    assert (text.get_load().rows_received, text.get_load().items_covered) == (received + 64, covered)


def test_where_the_cache_has_lost_what_it_covered_rows_are_asked_for_again(forgetful: Pair) -> None:
    text = forgetful.text
    right = tokens(text, asked(about(FILES[5], QUESTION)))
    tokens(text, asked(about(FILES[6], QUESTION)))
    text.flush_cache()  # the KV as well, behind the front's back
    before = work(forgetful)
    assert tokens(text, asked(about(FILES[5], QUESTION), n_greedy(2))) == right
    received, attempts, encoded = (now - then for now, then in zip(work(forgetful), before, strict=True))
    assert (received, attempts, encoded) == (64, 1, 0), "fetched once, and not encoded again"


def n_greedy(n: int) -> v1.SamplingParams:
    return v1.SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, n=n)


def test_a_cache_under_pressure_never_has_a_hole(checkpoint: Path) -> None:
    """Guesses that prove wrong all the time: room for the blocks of a few prompts, asked in turn."""
    tight = {**LLM_FLAGS, "kv_cache_bytes": "1MiB", "row_cache_bytes": "64KiB", "max_step_tokens": 64}
    with pair(checkpoint, **tight) as both:
        right = [tokens(both.text, asked(about(file, QUESTION))) for file in FILES]
        for round_ in range(3):
            for number in range(len(FILES)):
                first = (number * 5 + round_) % len(FILES)
                for which in (first, (first + 1) % len(FILES), first):
                    assert tokens(both.text, asked(about(FILES[which], QUESTION))) == right[which]
        assert both.text.get_load().items_covered > 0
