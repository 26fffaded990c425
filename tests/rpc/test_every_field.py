"""What a caller may ask for does something: each sampling value, each media option, each RPC."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from itertools import pairwise

import grpc
import pytest

from tests import pictures
from tests.rpc.encoder_client import Client, image, video
from tests.rpc.pairs import Pair, answer, asked, refusal
from twinlens import Answer, user, v1
from twinlens.v1 import encoder_pb2, llm_pb2, media_pb2

FEW = 12


def said(both: Pair, **sampling: object) -> Answer:
    """Up to twelve tokens, the likeliest ones unless told otherwise."""
    given = {"max_tokens": FEW, "temperature": 0.0, "ignore_eos": True, **sampling}
    return answer(both.text, asked(user("Count to ten, please."), v1.SamplingParams(**given)))


def ids(both: Pair, **sampling: object) -> list[int]:
    return said(both, **sampling).choices[0].token_ids


@pytest.fixture(scope="module")
def plain(qwen3: Pair) -> list[int]:
    """The likeliest tokens, one after the other."""
    found = ids(qwen3)
    assert len(found) == FEW
    return found


def drawn(both: Pair, **sampling: object) -> list[int]:
    """Tokens that are drawn by one seed, from a distribution that is nearly flat."""
    return ids(both, **{"temperature": 3.0, "seed": 11, "max_tokens": 48, **sampling})


def check_max_tokens(both: Pair, plain: list[int]) -> None:
    found = said(both, max_tokens=3).choices[0]
    assert (found.token_ids, found.reason) == (plain[:3], v1.FINISH_REASON_LENGTH)


def check_min_tokens(both: Pair, plain: list[int]) -> None:
    first = plain[0]
    assert ids(both, stop_token_ids=[first]) in ([], [first])
    held = ids(both, stop_token_ids=[first], min_tokens=5)
    assert len(held) >= 5
    assert first not in held[:5]


def check_temperature(both: Pair, plain: list[int]) -> None:
    assert ids(both, temperature=1e-9, seed=1) == plain
    assert ids(both, temperature=3.0, seed=1) != plain


def check_top_p(both: Pair, plain: list[int]) -> None:
    assert ids(both, temperature=3.0, seed=1, top_p=1e-9) == plain


def check_top_k(both: Pair, plain: list[int]) -> None:
    assert ids(both, temperature=3.0, seed=1, top_k=1) == plain
    assert ids(both, temperature=3.0, seed=1, top_k=0) == ids(both, temperature=3.0, seed=1)


def check_min_p(both: Pair, plain: list[int]) -> None:
    assert ids(both, temperature=3.0, seed=1, min_p=1.0) == plain


def check_penalty(name: str, strong: float, weak: float) -> Callable[[Pair, list[int]], None]:
    def check(both: Pair, plain: list[int]) -> None:
        assert drawn(both, **{name: weak}) == drawn(both)
        assert drawn(both, **{name: strong}) != drawn(both)

    return check


def check_repetition_penalty(both: Pair, plain: list[int]) -> None:
    """It also falls on the tokens of the prompt, and none is said twice."""
    found = ids(both, repetition_penalty=100.0)
    asked_with = {*both.text.tokenize([user("Count to ten, please.")])}
    assert not asked_with & set(found)
    assert len(set(found)) == FEW


def check_seed(both: Pair, plain: list[int]) -> None:
    assert drawn(both, seed=5) == drawn(both, seed=5) != drawn(both, seed=6)


def check_stop(both: Pair, plain: list[int]) -> None:
    whole = said(both).choices[0].text
    word = whole[len(whole) // 2 :][:2]
    found = said(both, stop=["never said at all", word]).choices[0]
    assert (found.text, found.stop_text, found.reason) == (
        whole[: whole.index(word)],
        word,
        v1.FINISH_REASON_STOP,
    )


def check_include_stop_str_in_output(both: Pair, plain: list[int]) -> None:
    whole = said(both).choices[0].text
    word = whole[len(whole) // 2 :][:2]
    found = said(both, stop=[word], include_stop_str_in_output=True).choices[0]
    assert (found.text, found.stop_text) == (whole[: whole.index(word) + 2], word)


def check_stop_token_ids(both: Pair, plain: list[int]) -> None:
    found = said(both, stop_token_ids=[plain[4]]).choices[0]
    assert found.reason == v1.FINISH_REASON_STOP
    assert found.token_ids[:4] == plain[: plain.index(plain[4])][:4]


def check_ignore_eos(both: Pair, plain: list[int]) -> None:
    end = json.loads((both.checkpoint / "config.json").read_text())["text_config"]["eos_token_id"]
    for go_on, length, reason in ((True, FEW, v1.FINISH_REASON_LENGTH), (False, 1, v1.FINISH_REASON_STOP)):
        found = said(both, logit_bias={end: 100.0}, ignore_eos=go_on).choices[0]
        assert (found.usage.completion_tokens, found.reason) == (length, reason)


def check_logit_bias(both: Pair, plain: list[int]) -> None:
    assert ids(both, logit_bias={7: 100.0}) == [7] * FEW
    assert plain[0] not in ids(both, logit_bias={plain[0]: -100.0})


def check_allowed_token_ids(both: Pair, plain: list[int]) -> None:
    some = sorted({*plain[:2], 100, 200, 300})
    assert {*drawn(both, allowed_token_ids=some)} == {*some}
    assert {*ids(both, allowed_token_ids=[7])} == {7}
    assert plain[0] not in ids(both, allowed_token_ids=some, logit_bias={plain[0]: -100.0})


def check_bad_words(both: Pair, plain: list[int]) -> None:
    """Alone, and as the end of several tokens: those that are made of what was said where one text is two tokens."""
    words = [text for token in plain if both.text.tokenize(text := both.text.detokenize(token)) == [token]]
    banned = ids(both, bad_words=words[:3])
    assert words
    assert not {*banned} & {*both.text.tokenize("".join(words[:1]))}
    pairs = [pair for pair in pairwise(plain) if both.text.tokenize(said_as(both, *pair)) == [*pair]]
    assert pairs
    for first, second in pairs:
        found = ids(both, bad_words=[said_as(both, first, second)])
        at = next(n for n, each in enumerate(pairwise(plain)) if each == (first, second))
        assert found[: at + 1] == plain[: at + 1]
        assert (first, second) not in pairwise(found)


def said_as(both: Pair, *tokens: int) -> str:
    return both.text.detokenize(*tokens)


def check_skip_special_tokens(both: Pair, plain: list[int]) -> None:
    end = json.loads((both.checkpoint / "config.json").read_text())["text_config"]["eos_token_id"]
    given = {"max_tokens": 2, "logit_bias": {end: 100.0}}
    name = both.text.detokenize(end)
    assert name
    assert said(both, **given).text == said(both, **given, skip_special_tokens=True).text == ""
    assert said(both, **given, skip_special_tokens=False).text == 2 * name
    shown = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    assert said(both, **given, **shown, ignore_eos=False).text == name
    assert said(both, **given, **shown, stop=[name[1:3]]).choices[0].text == name[:3]


def check_n(both: Pair, plain: list[int]) -> None:
    found = said(both, n=3, temperature=3.0, seed=1).choices
    assert len({tuple(choice.token_ids) for choice in found}) == 3


def check_logprobs(both: Pair, plain: list[int]) -> None:
    assert not said(both).choices[0].logprobs
    for count in (0, 3, 20):
        found = said(both, logprobs=count).choices[0].logprobs
        assert [len(each.top) for each in found] == [count] * FEW
    assert [each.top[0].token_id for each in found] == plain


def check_prompt_logprobs(both: Pair, plain: list[int]) -> None:
    found = said(both, prompt_logprobs=2)
    assert len(found.prompt_logprobs) == found.started.prompt_tokens - 1
    assert {len(each.top) for each in found.prompt_logprobs} == {2}


def check_thinking_token_budget(both: Pair, plain: list[int]) -> None:
    """Without a mark of reasoning there is nothing to bound; tests/rpc/test_forms_within_answers.py has some."""
    error = refusal(both.text, asked(user("Count to ten, please."), v1.SamplingParams(thinking_token_budget=3)))
    assert (error.reason, error.field) == ("NO_THINKING", "sampling.thinking_token_budget")
    assert plain


def check_structural_tag(both: Pair, plain: list[int]) -> None:
    tag = {"format": {"type": "tag", "begin": "<a>", "content": {"type": "regex", "pattern": "[xy]{3}"}, "end": "</a>"}}
    found = said(both, structural_tag=json.dumps(tag), max_tokens=64, ignore_eos=False).choices[0]
    assert re.fullmatch("<a>[xy]{3}</a>", found.text)
    assert found.reason == v1.FINISH_REASON_STRUCTURE


def check_json_schema(both: Pair, plain: list[int]) -> None:
    found = said(both, json_schema='{"enum": [17, "eighteen"]}', max_tokens=64, ignore_eos=False).choices[0]
    assert json.loads(found.text) in (17, "eighteen")
    assert found.reason == v1.FINISH_REASON_STRUCTURE


def check_regex(both: Pair, plain: list[int]) -> None:
    assert re.fullmatch("[x-z]{4}!", said(both, regex="[x-z]{4}!", ignore_eos=False).choices[0].text)


def check_grammar(both: Pair, plain: list[int]) -> None:
    found = said(both, grammar='start: "a" ("b" | "c") "d"', ignore_eos=False).choices[0].text
    assert found in ("abd", "acd")


def check_choice(both: Pair, plain: list[int]) -> None:
    options = ["naïve 🙂", 'a "quoted" \\ word']
    assert said(both, choice=v1.Choice(options=options), max_tokens=64, ignore_eos=False).choices[0].text in options


SAMPLING: dict[str, Callable[[Pair, list[int]], None]] = {
    **{name.removeprefix("check_"): check for name, check in globals().items() if name.startswith("check_")},
    "presence_penalty": check_penalty("presence_penalty", 2.0, 0.0),
    "frequency_penalty": check_penalty("frequency_penalty", 2.0, 0.0),
}


@pytest.mark.parametrize("name", [field.name for field in llm_pb2.SamplingParams.DESCRIPTOR.fields])
def test_every_sampling_value_acts(qwen3: Pair, plain: list[int], name: str) -> None:
    SAMPLING[name](qwen3, plain)


def test_nothing_is_said_to_be_unimplemented_and_nothing_is(qwen3: Pair) -> None:
    assert list(qwen3.text.get_info().unimplemented) == []
    assert list(qwen3.text.get_info().unimplemented_sampling) == []
    assert list(qwen3.media.get_info().unimplemented) == []
    for server, service in ((qwen3.llm, "LlmService"), (qwen3.encoder, "EncoderService")):
        module = llm_pb2 if service == "LlmService" else encoder_pb2
        with grpc.insecure_channel(server.address) as channel:
            for method in module.DESCRIPTOR.services_by_name[service].methods:
                call = channel.unary_stream(f"/twinlens.v1.{service}/{method.name}")(b"", timeout=180)
                with contextlib.suppress(grpc.RpcError):
                    list(call)
                taken = {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT}
                if "Adapter" in method.name or method.name == "Prefill":  # no folder of them; prompts are not lent
                    taken |= {grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.NOT_FOUND}
                assert call.code() in taken, method.name


PICTURE = pictures.encoded(pictures.noise(320, 256, 77))
FILM = pictures.video(pictures.frames(40, 160, 128), fps=10)
OPTIONS: dict[str, tuple[media_pb2.Media, media_pb2.Media]] = {
    "min_pixels": (image(PICTURE), image(PICTURE, min_pixels=500_000)),
    "max_pixels": (image(PICTURE), image(PICTURE, max_pixels=20_000)),
    "clamp_max_pixels": (image(PICTURE, max_pixels=10**6), image(PICTURE, max_pixels=10**6, clamp_max_pixels=True)),
    "fps": (video(FILM), video(FILM, fps=5.0)),
    "max_frames": (video(FILM), video(FILM, max_frames=4)),
    "video_pruning_rate": (video(FILM), video(FILM, video_pruning_rate=0.5)),
    "kept_rows": (video(FILM), video(FILM, kept_rows=bytes([1, *bytes(4)]))),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_media_option_acts_and_is_part_of_the_key(client: Client, name: str) -> None:
    plain, changed = client.encode(*OPTIONS[name])
    assert plain.error is changed.error is None
    assert plain.header.tokens != changed.header.tokens == len(changed.rows)
    assert plain.header.key != changed.header.key


def test_these_are_all_media_options() -> None:
    elsewhere = {"with_sound"}  # no model of a family takes it; tests/rpc/test_video_sound.py has one that does
    assert {field.name for field in media_pb2.MediaOptions.DESCRIPTOR.fields} == {*OPTIONS, *elsewhere}
