"""Both real services over tiny checkpoints: a caller gets what transformers computes and the contract says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from PIL import Image

from testkit import reference
from testkit.checkpoints import SPECIAL_IDS, VOCABULARY
from tests import pictures
from tests.rpc.pairs import Pair, about, answer, asked, greedy, pair, tokens
from tests.waiting import until
from twinlens import Answer, TwinlensError, image, user, v1, video

TOKENS = 64
SERVING = health_pb2.HealthCheckResponse.SERVING
PADS = {SPECIAL_IDS["<|image_pad|>"], SPECIAL_IDS["<|video_pad|>"]}


def picture(seed: int, width: int, height: int) -> Image.Image:
    """Coarse colours, so that two pictures differ in what can be seen of them."""
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


@cache
def new_picture(name: str) -> bytes:
    """A picture that no other test has."""
    return pictures.encoded(pictures.noise(64, 96, 7_000 + sum(map(ord, name))))


CLIP = pictures.video(pictures.frames(24, 64, 64, seed=3), fps=8)

Part = str | Image.Image | bytes
PROMPTS: dict[str, list[Part]] = {
    "text alone": ["Tell me about two red circles."],
    "one image": [picture(1, 120, 90), "What is in the picture?"],
    "three images of different sizes": [picture(2, 64, 64), picture(3, 200, 100), picture(4, 90, 150), "Which is red?"],
    "image, text, image": [picture(5, 100, 100), "is left of", picture(6, 70, 140), "and why?"],
    "a video": ["Look: ", CLIP, "What happens?"],
}


def request(name: str) -> v1.GenerateRequest:
    """A prompt as a client sends it."""
    return asked(user(*map(_sent, PROMPTS[name])), greedy(TOKENS))


def _sent(part: Part) -> str | v1.Media:
    if isinstance(part, bytes):
        return video(part)
    return part if isinstance(part, str) else image(pictures.encoded(part))


@cache
def expected(checkpoint: Path, name: str) -> tuple[list[int], list[int]]:
    """transformers' prompt ids and greedy tokens."""
    parts = PROMPTS[name]
    kinds = {str: "text", bytes: "video"}
    content = [{"type": kinds.get(type(p), "image"), **({"text": p} if isinstance(p, str) else {})} for p in parts]
    stills = [part for part in parts if isinstance(part, Image.Image)]
    clips = [reference.Video.read(part) for part in parts if isinstance(part, bytes)]
    inputs = reference.reference_inputs(checkpoint, [{"role": "user", "content": content}], stills, clips)
    return inputs["input_ids"][0].tolist(), reference.reference_generate(checkpoint, inputs, TOKENS)


def media_runs(ids: list[int]) -> list[tuple[int, int]]:
    """(start, count) of each run of placeholders in a prompt."""
    runs: list[tuple[int, int]] = []
    for place, token in enumerate(ids):
        if token not in PADS:
            continue
        if runs and sum(runs[-1]) == place:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((place, 1))
    return runs


@pytest.fixture(
    scope="module",
    params=[
        "qwen3_vl",
        "qwen3_5",
        *(pytest.param(each, marks=pytest.mark.soak) for each in ("qwen2_vl", "qwen2_5_vl")),
    ],
)
def both(request: pytest.FixtureRequest, checkpoints: Callable[..., Path]) -> Iterator[Pair]:
    """Both services over a checkpoint of each family in turn."""
    if request.param == "qwen3_vl":
        yield request.getfixturevalue("qwen3")
    else:
        with pair(checkpoints(request.param), light=False) as running:
            yield running


@pytest.mark.parametrize("name", PROMPTS)
def test_token_counts_spans_and_greedy_tokens_are_the_references(both: Pair, name: str) -> None:
    said = answer(both.text, request(name))
    ids, wanted = expected(both.checkpoint, name)
    assert said.choices[0].token_ids == wanted
    assert said.started.prompt_tokens == said.usage.prompt_tokens == len(ids)
    assert said.usage.completion_tokens == TOKENS
    runs = media_runs(ids)
    assert sum(span.rows for span in said.started.spans) == sum(count for _, count in runs)
    if "video" in name:
        (span,) = said.started.spans
        assert (span.start, span.start + span.length) == (runs[0][0], sum(runs[-1]))
    else:
        assert [(span.start, span.length) for span in said.started.spans] == runs


def test_eight_at_once_say_what_each_says_alone(both: Pair) -> None:
    names = [*PROMPTS, "one image", "a video", "text alone"]
    with ThreadPoolExecutor(len(names)) as threads:
        said = list(threads.map(lambda name: tokens(both.text, request(name)), names))
    assert said == [expected(both.checkpoint, name)[1] for name in names]


def test_two_pictures_are_answered_differently(both: Pair) -> None:
    seen = [tokens(both.text, asked(about(pictures.encoded(picture(n, 120, 90))), greedy(32))) for n in (11, 12)]
    assert seen[0] != seen[1]


def test_the_same_picture_again_runs_no_second_pass_of_the_tower(qwen3: Pair) -> None:
    calls = qwen3.media.get_load().vit_calls
    first = answer(qwen3.text, asked(about(new_picture("twice"))))
    assert qwen3.media.get_load().vit_calls == calls + 1
    again = answer(qwen3.text, asked(about(new_picture("twice"), "Another question?")))
    same = answer(qwen3.text, asked(about(new_picture("twice"))))
    assert qwen3.media.get_load().vit_calls == calls + 1
    assert same.choices[0].token_ids == first.choices[0].token_ids
    assert {said.started.spans[0].key for said in (first, again, same)} == {first.started.spans[0].key}
    answer(qwen3.text, asked(about(new_picture("another"))))
    assert qwen3.media.get_load().vit_calls == calls + 2


def test_many_requests_for_one_new_picture_run_one_pass(qwen3: Pair) -> None:
    before = qwen3.media.get_load()
    asking = [asked(about(new_picture("crowd"), f"Question {n}?")) for n in range(16)]
    with ThreadPoolExecutor(16) as threads:
        list(threads.map(lambda each: tokens(qwen3.text, each), asking))
    after = qwen3.media.get_load()
    assert after.vit_calls == before.vit_calls + 1
    assert after.encoded_items == before.encoded_items + 1


def test_a_picture_twice_in_one_request_is_two_spans_of_one_key(qwen3: Pair) -> None:
    calls = qwen3.media.get_load().vit_calls
    double = user(image(new_picture("double")), "and", image(new_picture("double")), "?")
    said = answer(qwen3.text, asked(double))
    first, second = said.started.spans
    assert first.key == second.key
    assert second.start >= first.start + first.length
    assert qwen3.media.get_load().vit_calls == calls + 1


def test_another_tenant_shares_neither_prefix_nor_picture(qwen3: Pair) -> None:
    ours = asked(about(new_picture("tenant")), cache_salt="ours")
    theirs = asked(about(new_picture("tenant")), cache_salt="theirs")
    calls = qwen3.media.get_load().vit_calls
    first, again, other = (answer(qwen3.text, each) for each in (ours, ours, theirs))
    assert again.usage.cached_tokens > 0
    assert other.usage.cached_tokens == 0
    assert other.started.spans[0].key != first.started.spans[0].key
    assert other.choices[0].token_ids == first.choices[0].token_ids
    assert qwen3.media.get_load().vit_calls == calls + 2


def test_a_prompt_that_begins_alike_is_taken_from_the_cache_with_the_same_answer(qwen3: Pair) -> None:
    said = [answer(qwen3.text, asked(about(new_picture("prefix"), "What is this? " * 8))) for _ in range(2)]
    assert said[0].choices[0].token_ids == said[1].choices[0].token_ids
    assert said[1].usage.cached_tokens > said[1].started.spans[0].start + said[1].started.spans[0].length
    assert said[1].started.cached_tokens == said[1].usage.cached_tokens


def test_a_flushed_cache_is_empty_and_fills_again(qwen3: Pair) -> None:
    asking = asked(about(new_picture("flush")))
    first = tokens(qwen3.text, asking)
    until(qwen3.idle, "the request has let go")
    flushed = qwen3.text.flush_cache()
    assert flushed.kv_blocks > 0
    assert flushed.row_bytes > 0
    assert qwen3.text.get_load().row_bytes == 0
    assert qwen3.media.flush_cache().entries > 0
    again = answer(qwen3.text, asking)
    assert (again.usage.cached_tokens, again.choices[0].token_ids) == (0, first)


def test_choices_come_side_by_side_and_each_finishes_once(qwen3: Pair) -> None:
    sampling = v1.SamplingParams(n=3, seed=11, max_tokens=24, temperature=1.0, ignore_eos=True)
    said = answer(qwen3.text, asked(about(new_picture("choices")), sampling))
    assert len({tuple(choice.token_ids) for choice in said.choices}) == 3
    assert [choice.usage.completion_tokens for choice in said.choices] == [24] * 3
    assert [choice.reason for choice in said.choices] == [v1.FINISH_REASON_LENGTH] * 3


def test_greedy_choices_are_all_the_same(qwen3: Pair) -> None:
    said = answer(qwen3.text, asked(user("Tell me."), greedy(12, n=2)))
    assert said.choices[0].token_ids == said.choices[1].token_ids


def test_a_seed_repeats_its_answer_and_another_gives_another(qwen3: Pair) -> None:
    def sample(seed: int) -> list[int]:
        sampling = v1.SamplingParams(seed=seed, max_tokens=24, temperature=1.2, top_p=0.95, ignore_eos=True)
        return tokens(qwen3.text, asked(user("Tell me."), sampling))

    with ThreadPoolExecutor(6) as threads:
        once, twice, other, *_ = threads.map(sample, (1, 1, 2, 3, 4, 5))
    assert once == twice != other


def test_text_is_the_tokens_decoded_and_ends_before_a_stop_text(qwen3: Pair) -> None:
    whole = answer(qwen3.text, asked(user("Tell me."), greedy(48)))
    assert whole.text == reference.processor(qwen3.checkpoint).tokenizer.decode(
        whole.choices[0].token_ids, skip_special_tokens=True
    )
    stop = whole.text[10:14]
    place = whole.text.index(stop)
    (cut,) = answer(qwen3.text, asked(user("Tell me."), greedy(48, stop=["never this", stop]))).choices
    assert (cut.text, cut.stop_text, cut.reason) == (whole.text[:place], stop, v1.FINISH_REASON_STOP)
    assert cut.usage.completion_tokens == len(cut.token_ids) < 48

    shows = greedy(48, stop=["never this", stop], include_stop_str_in_output=True)
    (shown,) = answer(qwen3.text, asked(user("Tell me."), shows)).choices
    assert (shown.text, shown.stop_text, shown.reason) == (whole.text[: place + len(stop)], stop, cut.reason)
    assert shown.token_ids == cut.token_ids


@pytest.mark.parametrize("shows", [False, True])
def test_a_stop_token_ends_a_choice_and_its_text_is_shown_where_that_is_asked_for(qwen3: Pair, shows: bool) -> None:
    whole = tokens(qwen3.text, asked(user("Tell me."), greedy(32)))
    stop = next(token for token in whole[7:] if qwen3.text.detokenize(token).isalnum())
    end = whole.index(stop)
    sampling = greedy(32, stop_token_ids=[stop], include_stop_str_in_output=shows)
    (cut,) = answer(qwen3.text, asked(user("Tell me."), sampling)).choices
    assert cut.token_ids == whole[: end + 1]
    assert (cut.reason, cut.stop_text, cut.stop_token_id) == (v1.FINISH_REASON_STOP, "", stop)
    tokenizer = reference.processor(qwen3.checkpoint).tokenizer
    assert cut.text == tokenizer.decode(whole[: end + shows], skip_special_tokens=True)
    assert cut.text != tokenizer.decode(whole[: end + (not shows)], skip_special_tokens=True)


def test_an_end_token_that_is_special_has_no_text_to_be_shown(qwen3: Pair) -> None:
    end = SPECIAL_IDS["<|im_end|>"]
    sampling = greedy(10, logit_bias={end: 100.0}, ignore_eos=False, min_tokens=3, include_stop_str_in_output=True)
    (cut,) = answer(qwen3.text, asked(user("Tell me."), sampling)).choices
    assert (cut.token_ids[3:], cut.reason, cut.stop_token_id) == ([end], v1.FINISH_REASON_STOP, None)
    assert cut.text == qwen3.text.detokenize(*cut.token_ids[:3])


def test_a_biased_end_token_ends_at_once_unless_it_is_ignored_or_too_early(qwen3: Pair) -> None:
    end = SPECIAL_IDS["<|im_end|>"]
    ways = [{"ignore_eos": False}, {"ignore_eos": False, "min_tokens": 4}, {"ignore_eos": True}]
    counts = [
        len(tokens(qwen3.text, asked(user("Tell me."), greedy(10, logit_bias={end: 100.0}, **way)))) for way in ways
    ]
    assert counts == [1, 5, 10]


def test_logprobs_are_the_references(qwen3: Pair) -> None:
    text = "What is in the picture?"
    shown = picture(1, 120, 90)
    said = answer(qwen3.text, asked(user(image(pictures.encoded(shown)), text), greedy(6, logprobs=5)))
    content = [{"type": "image"}, {"type": "text", "text": text}]
    inputs = reference.reference_inputs(qwen3.checkpoint, [{"role": "user", "content": content}], [shown])
    wanted = reference.reference_logits(qwen3.checkpoint, inputs)[-1].double().log_softmax(-1)
    (choice,) = said.choices
    assert [len(each.top) for each in choice.logprobs] == [5] * 6
    assert b"".join(each.text_bytes for each in choice.logprobs).decode(errors="replace") == choice.text
    given = choice.logprobs[0]
    assert [top.token_id for top in given.top] == wanted.topk(5).indices.tolist()
    assert [top.logprob for top in given.top] == pytest.approx(wanted.topk(5).values.tolist(), rel=1e-4)
    assert given.logprob == pytest.approx(float(wanted[choice.token_ids[0]]), rel=1e-4)


def test_tokens_and_text_forms_of_a_prompt_say_what_the_chat_says(qwen3: Pair) -> None:
    shown = image(new_picture("forms"))
    chat = answer(qwen3.text, asked(user(shown, "What?")))
    laid = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What?<|im_end|>\n<|im_start|>assistant\n"
    as_text = answer(qwen3.text, asked(v1.TextInput(prompt=laid, media=[shown])))
    ids = qwen3.text.tokenize(laid, allow_special=True)
    as_ids = answer(qwen3.text, asked(v1.TokensInput(ids=ids, media=[shown])))
    assert chat.choices[0].token_ids == as_text.choices[0].token_ids == as_ids.choices[0].token_ids


def test_tokenize_is_the_references_tokenizer(qwen3: Pair) -> None:
    library = reference.processor(qwen3.checkpoint).tokenizer
    for text in ("two red circles, naïve 図 👩‍👧", "<|im_end|> and <0.5 seconds>", "", "   \n\n x"):
        assert qwen3.text.tokenize(text, allow_special=True) == library(text, add_special_tokens=False).input_ids
    chat = [user("What is it?"), v1.ChatMessage(role="assistant", parts=[v1.ChatPart(text="A house.")]), user("Why?")]
    given = [{"role": each.role, "content": each.parts[0].text} for each in chat]
    laid = library.apply_chat_template(given, add_generation_prompt=True, tokenize=False)
    assert qwen3.text.tokenize(chat) == library(laid, add_special_tokens=False).input_ids


def test_an_answer_goes_on_behind_a_message_as_the_reference_lays_it_out(qwen3: Pair) -> None:
    library = reference.processor(qwen3.checkpoint).tokenizer
    begun = v1.ChatMessage(role="assistant", parts=[v1.ChatPart(text="It is <|im_end|>"), v1.ChatPart(text=" a")])
    given = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "It is  a"}]
    laid = library.apply_chat_template(given, continue_final_message=True, tokenize=False)
    before, _, behind = laid.partition("It is ")
    wanted = [*library(before).input_ids, *qwen3.text.tokenize(f"It is <|im_end|>{behind}")]
    request = asked(v1.TextInput(prompt="x"), greedy(5))
    request.chat.messages.extend([user("What?"), begun])
    request.chat.continue_final_message = True
    request.return_prompt_token_ids = True
    found = answer(qwen3.text, request)
    assert found.started.prompt_token_ids == wanted
    same = answer(qwen3.text, asked(v1.TokensInput(ids=wanted), greedy(5)))
    assert found.choices[0].token_ids == same.choices[0].token_ids


def test_abort_ends_a_request_by_name_and_tells_its_caller(qwen3: Pair) -> None:
    with qwen3.text.generate(asked(user("count"), greedy(4000), request_id="to be aborted")) as stream:
        events = iter(stream)
        assert next(events).started.request_id == "to be aborted"
        assert qwen3.text.abort("to be aborted", "unknown") == 1
        with pytest.raises(TwinlensError) as error:
            _read(events)
    assert (error.value.code, error.value.reason) == (grpc.StatusCode.CANCELLED, "ABORTED")
    assert qwen3.text.abort("to be aborted") == 0
    until(qwen3.idle, "the request has let go")


def test_two_requests_of_one_name_are_two_requests_and_an_abort_ends_both(qwen3: Pair) -> None:
    request = asked(user("count"), greedy(4000), request_id="twins")
    with qwen3.text.generate(request) as one, qwen3.text.generate(request) as other:
        streams = [iter(one), iter(other)]
        assert [next(events).started.request_id for events in streams] == ["twins"] * 2
        assert qwen3.text.abort("twins", "twins") == 2
        for events in streams:
            with pytest.raises(TwinlensError) as error:
                _read(events)
            assert error.value.reason == "ABORTED"
    until(qwen3.idle, "both have let go")


def test_abort_at_any_moment_tells_its_caller(qwen3: Pair) -> None:
    """Also in the middle of a message to it: many are aborted while their streams are busy."""

    def attempt(number: int) -> tuple[grpc.StatusCode, str]:
        name = f"aborted {number}"
        prompt = about(new_picture("abort"), f"{number}?") if number % 3 == 0 else user(f"count {number}")
        with qwen3.text.generate(asked(prompt, greedy(3000), request_id=name), timeout=180) as stream:
            events = iter(stream)
            for _ in range(number % 7):
                next(events)
            until(lambda: qwen3.text.abort(name), "the request is under way")
            with pytest.raises(TwinlensError) as error:
                _read(events)
        return error.value.code, error.value.reason

    with ThreadPoolExecutor(12) as threads:
        assert set(threads.map(attempt, range(60))) == {(grpc.StatusCode.CANCELLED, "ABORTED")}
    until(qwen3.idle, "all requests have let go")


def _read(events: Iterator[v1.GenerateResponse]) -> None:
    for _ in events:
        pass


def test_what_happened_is_counted(qwen3: Pair) -> None:
    before = qwen3.text.get_load()
    said = answer(qwen3.text, asked(about(new_picture("counted"))))
    after = qwen3.text.get_load()
    assert after.finished_requests == before.finished_requests + 1
    assert after.generated_tokens == before.generated_tokens + 8
    assert after.prompt_tokens == before.prompt_tokens + said.usage.prompt_tokens
    assert after.prefix_hit_tokens == before.prefix_hit_tokens + said.usage.cached_tokens
    assert after.rows_received == before.rows_received + said.started.spans[0].rows
    assert after.kv_blocks_total > 0
    assert {"prompt", "encode_header", "first_token", "decode_tokens"} <= set(said.timings)


def test_stages_lie_where_they_happened(qwen3: Pair) -> None:
    """On the LLM service's clock, the encoder's between the call to it and the last row."""
    stages: dict[str, v1.StageTiming] = {}
    while "encoder_vit" not in stages:  # where the answer was over before the encoder had told of its stages
        last = list(qwen3.text.generate(about(new_picture("timed")), v1.SamplingParams(max_tokens=4)))[-1]
        stages = {timing.stage: timing for timing in last.finished.timings}
    for name, stage in stages.items():
        assert 0 <= stage.start_seconds <= stage.end_seconds, name
        assert stage.seconds <= stage.end_seconds - stage.start_seconds + 1e-6, name
    in_turn = ["encoder_hash", "encoder_inspect", "encoder_decode", "encoder_queue", "encoder_vit", "landing"]
    ends = [stages[name].end_seconds for name in in_turn]
    assert ends == sorted(ends)
    assert stages["encoder_vit"].end_seconds <= stages["first_token"].end_seconds
    assert stages["prefill"].end_seconds <= stages["decode_tokens"].start_seconds
    assert stages["prompt"].start_seconds == 0
    assert stages["decode_tokens"].start_seconds == stages["first_token"].end_seconds


def test_load_has_what_encoders_say_of_theirs(qwen3: Pair) -> None:
    answer(qwen3.text, asked(about(new_picture("loaded"))))

    def told() -> bool:
        theirs, passed_on = qwen3.media.get_load(), qwen3.text.get_load().encoders[0]
        fields = ("vit_calls", "store_hits", "store_misses", "store_bytes", "store_capacity_bytes")
        assert theirs.vit_calls > 0
        return all(getattr(theirs, field) == getattr(passed_on, field) for field in fields)

    until(told, "the LLM service has heard of its encoder's load")


def test_info_describes_model_and_link(qwen3: Pair) -> None:
    info, encoder = qwen3.text.get_info(), qwen3.media.get_info()
    assert info.model == encoder.model == qwen3.checkpoint.name
    assert info.encoder_digest == encoder.digest
    assert (info.vocab_size, info.context_tokens, info.devices) == (VOCABULARY, 4096, ["cpu"])
    assert info.version
    assert info.weights.bytes > 1 << 16
    assert (info.weights.quantization, info.weights.bits) == ("", 0)


@pytest.mark.parametrize("side", ["llm", "encoder"])
def test_health_and_reflection_are_served(qwen3: Pair, side: str) -> None:
    name = {"llm": "twinlens.v1.LlmService", "encoder": "twinlens.v1.EncoderService"}[side]
    with grpc.insecure_channel(getattr(qwen3, side).address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for asked_for in ("", name):
            assert health.Check(health_pb2.HealthCheckRequest(service=asked_for), timeout=180).status == SERVING
        with pytest.raises(grpc.RpcError) as error:
            health.Check(health_pb2.HealthCheckRequest(service="no.such"), timeout=180)
        assert error.value.code() is grpc.StatusCode.NOT_FOUND
        look = reflection_pb2_grpc.ServerReflectionStub(channel)
        asking = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        services = next(look.ServerReflectionInfo(asking, timeout=180)).list_services_response.service
    assert {name, "grpc.health.v1.Health"} <= {service.name for service in services}


def test_a_requests_name_stands_in_the_logs_of_both_services(qwen3: Pair) -> None:
    said: Answer = answer(qwen3.text, asked(about(new_picture("log")), request_id="seen in both logs"))
    assert said.started.request_id == "seen in both logs"
    for service in (qwen3.llm, qwen3.encoder):
        until(lambda: "seen in both logs" in service.log.read_text("utf-8"), "the name is in the log")  # noqa: B023


def test_what_is_said_in_many_tongues_arrives_in_whole_characters(qwen3: Pair) -> None:
    bias: Any = dict.fromkeys(qwen3.text.tokenize("図👩é中"), 20.0)
    said = answer(
        qwen3.text, asked(user("Say."), v1.SamplingParams(seed=3, max_tokens=60, temperature=1.0, logit_bias=bias))
    )
    library = reference.processor(qwen3.checkpoint).tokenizer
    assert said.text == library.decode(said.choices[0].token_ids, skip_special_tokens=True)
