"""The first place where a request is checked: every limit, and the field that the answer names."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from common.errors import InvalidInput, NotFound, TwinlensError, Unsupported
from common.media.item import Embedding, Key, Modality, Pixels, Url
from llm_service.config import LlmConfig
from llm_service.convert.requests import RequestReader
from llm_service.generation_config import SamplingDefaults, sampling_defaults
from llm_service.request import (
    ChatPrompt,
    MediaItem,
    MediaSlot,
    PiecesPrompt,
    ResumedChoice,
    SamplingParams,
    SoundLength,
)
from twinlens import v1
from twinlens.v1 import llm_pb2

CONTEXT, VOCABULARY = 512, 600
IMAGE = v1.Media(modality=v1.MODALITY_IMAGE, data=b"file")
VIDEO = v1.Media(modality=v1.MODALITY_VIDEO, data=b"file")


def requests(defaults: dict[str, Any] | None = None, most: int | None = None, **options: Any) -> RequestReader:
    known = SamplingDefaults(sampling_defaults(defaults or {}), most)
    return RequestReader(LlmConfig(model="folder", **options), ("tiny",), VOCABULARY, known)


def message(**sampling: Any) -> v1.GenerateRequest:
    return v1.GenerateRequest(text=v1.TextInput(prompt="hello"), sampling=v1.SamplingParams(**sampling))


def refusal(request: v1.GenerateRequest, reader: RequestReader | None = None) -> TwinlensError:
    with pytest.raises(TwinlensError) as error:
        (reader or requests()).read(request, None, CONTEXT)
    return error.value


def chat(*parts: v1.ChatPart) -> v1.GenerateRequest:
    return v1.GenerateRequest(chat=v1.ChatInput(messages=[v1.ChatMessage(role="user", parts=parts)]))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 101.0),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_k", -1),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("presence_penalty", 2.1),
        ("presence_penalty", -2.1),
        ("frequency_penalty", 2.1),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("min_tokens", -1),
        ("n", 0),
        ("n", 9),
        ("logprobs", -1),
        ("logprobs", 21),
        *[
            (name, bad)
            for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
            for bad in (float("nan"), float("inf"), float("-inf"))
        ],
    ],
)
def test_a_sampling_value_out_of_range_is_refused_by_name(name: str, value: float) -> None:
    error = refusal(message(**{name: value}))
    assert isinstance(error, InvalidInput)
    assert (error.reason, error.field) == ("OUT_OF_RANGE", f"sampling.{name}")
    assert name in error.message


@pytest.mark.parametrize("bias", [float("nan"), float("inf"), 101.0, -101.0])
def test_a_bias_out_of_range_is_refused(bias: float) -> None:
    assert refusal(message(logit_bias={3: bias})).field == "sampling.logit_bias"


@pytest.mark.parametrize("field", ["stop_token_ids", "logit_bias"])
def test_token_ids_outside_the_vocabulary_are_refused(field: str) -> None:
    value: Any = [VOCABULARY] if field == "stop_token_ids" else {VOCABULARY: 1.0}
    error = refusal(message(**{field: value}))
    assert (error.reason, error.field) == ("TOKEN_OUT_OF_RANGE", f"sampling.{field}")


@pytest.mark.parametrize(
    ("stop", "reason"),
    [([""], "BAD_STOP"), (["x" * 257], "BAD_STOP"), (["ё" * 129], "BAD_STOP"), (["x"] * 9, "TOO_MANY_STOPS")],
)
def test_stop_texts_are_few_short_and_not_empty(stop: list[str], reason: str) -> None:
    assert refusal(message(stop=stop)).reason == reason


def test_the_largest_values_allowed_are_taken() -> None:
    read = requests().read(
        message(
            temperature=100.0, top_p=1.0, top_k=1 << 30, min_p=1.0, presence_penalty=2.0, frequency_penalty=-2.0,
            max_tokens=2**31 - 1, n=8, logprobs=20, stop=["x" * 256] * 8, stop_token_ids=[VOCABULARY - 1],
            logit_bias={0: -100.0}, seed=2**64 - 1,
        ),
        None,
        CONTEXT,
    )  # fmt: skip
    assert (read.sampling.max_tokens, read.sampling.seed, read.sampling.n) == (CONTEXT, 2**64 - 1, 8)
    assert len(read.stop) == 8


def test_more_least_tokens_than_most_are_refused() -> None:
    assert refusal(message(max_tokens=3, min_tokens=4)).field == "sampling.min_tokens"


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_no_more_likely_tokens_are_taken_than_there_are_whatever_is_allowed(name: str) -> None:
    reader = requests(max_logprobs=100_000)
    assert refusal(message(**{name: VOCABULARY + 1}), reader).field == f"sampling.{name}"
    assert getattr(reader.read(message(**{name: VOCABULARY}), None, CONTEXT).sampling, name) == VOCABULARY


@pytest.mark.parametrize("top_k", [20, 20.0, True, None, "20"])
def test_however_a_checkpoint_writes_its_numbers_the_engine_can_read_them(top_k: object) -> None:
    sampling = requests({"top_k": top_k, "temperature": 1}).read(message(), None, CONTEXT).sampling
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sampling), type=SamplingParams) == sampling
    assert sampling.top_k == (20 if type(top_k) in (int, float) else 0)


def test_a_sessions_name_is_read() -> None:
    request = message()
    request.session_id = "s"
    assert requests().read(request, None, 100).session == "s"


@pytest.mark.parametrize(("asked", "allowed"), [(None, 3), (0, 0), (2, 2), (9, 3)])
def test_a_request_outlives_no_more_engines_than_the_service_lets_it(asked: int | None, allowed: int) -> None:
    request = message()
    if asked is not None:
        request.max_handovers = asked
    assert requests(max_handovers=3).read(request, None, CONTEXT).max_handovers == allowed


def test_no_request_outlives_less_than_no_engine() -> None:
    request = message()
    request.max_handovers = -1
    error = refusal(request)
    assert (error.reason, error.field) == ("OUT_OF_RANGE", "max_handovers")


def test_what_exists_of_an_answer_is_read() -> None:
    request = message(n=3)
    request.resume.add(index=2, token_ids=[5, 6])
    request.resume.add(index=0, finished=True)
    read = requests().read(request, None, CONTEXT).resume
    assert read == (ResumedChoice(2, (5, 6)), ResumedChoice(0, (), finished=True))


def test_audio_is_not_served_yet() -> None:
    audio = refusal(chat(v1.ChatPart(media=v1.Media(modality=v1.MODALITY_AUDIO, data=b"x"))))
    assert isinstance(audio, Unsupported)
    assert audio.field == "chat.messages[0].parts[0].media.modality"


def test_another_model_is_not_found_and_none_is_whichever_is_served() -> None:
    request = message()
    request.model = "other"
    assert isinstance(refusal(request), NotFound)
    for name in ("", "tiny"):
        request.model = name
        assert requests().read(request, None, CONTEXT).prompt


@pytest.mark.parametrize(
    ("request_", "reason", "field"),
    [
        (v1.GenerateRequest(), "EMPTY_PROMPT", "input"),
        (chat(v1.ChatPart(text="a"), v1.ChatPart()), "EMPTY_PART", "chat.messages[0].parts[1]"),
        (chat(v1.ChatPart(media=v1.Media(data=b"x"))), "BAD_MODALITY", "chat.messages[0].parts[0].media.modality"),
        (chat(v1.ChatPart(media=v1.Media(modality=77, data=b"x"))), "BAD_MODALITY", None),  # type: ignore[arg-type]
        (chat(v1.ChatPart(media=v1.Media(modality=v1.MODALITY_IMAGE))), "NO_SOURCE", None),
        (chat(*[v1.ChatPart(media=IMAGE)] * 17), "TOO_MANY_ITEMS", "media"),
        (chat(*[v1.ChatPart(media=VIDEO)] * 3), "TOO_MANY_ITEMS", "media"),
        (chat(v1.ChatPart(text="x" * (1 << 20)), v1.ChatPart(text="x")), "PROMPT_TOO_LONG", "chat.messages"),
        (v1.GenerateRequest(text=v1.TextInput(prompt="é" * (1 << 19) + "x")), "PROMPT_TOO_LONG", "text.prompt"),
    ],
)
def test_bad_inputs_are_refused_with_reason_and_field(
    request_: v1.GenerateRequest, reason: str, field: str | None
) -> None:
    error = refusal(request_)
    assert isinstance(error, InvalidInput)
    assert error.reason == reason
    assert field is None or error.field == field


def test_items_are_numbered_in_prompt_order_over_all_messages() -> None:
    request = v1.GenerateRequest(
        chat=v1.ChatInput(
            messages=[
                v1.ChatMessage(role="user", parts=[v1.ChatPart(media=IMAGE), v1.ChatPart(text="and")]),
                v1.ChatMessage(role="user", parts=[v1.ChatPart(media=VIDEO), v1.ChatPart(media=IMAGE)]),
            ]
        )
    )
    read = requests().read(request, None, CONTEXT)
    assert [(item.index, item.modality) for item in read.media] == [(0, "image"), (1, "video"), (2, "image")]


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ({"url": "https://example.org/x.png", "known_key": b"k" * 32}, Url),
        ({"key": b"k" * 32}, Key),
        ({"pixels": v1.PixelBlock(data=b"123", frames=1, height=1, width=1)}, Pixels),
        ({"embedding": v1.EmbeddingBlock(count=1)}, Embedding),
    ],
)
def test_every_source_is_carried_on(source: dict[str, Any], kind: type) -> None:
    options = v1.MediaOptions(min_pixels=5, fps=0.5)
    media = v1.Media(modality=v1.MODALITY_VIDEO, options=options, mime_type="video/mp4", **source)
    (item,) = requests().read(chat(v1.ChatPart(media=media)), None, CONTEXT).media
    assert isinstance(item, MediaItem)
    assert isinstance(item.source, kind)
    assert (item.options.min_pixels, item.options.max_pixels, item.options.fps) == (5, None, 0.5)
    assert item.mime_type == "video/mp4"


@pytest.mark.parametrize(
    ("media", "rate"),
    [
        (v1.Media(modality=v1.MODALITY_VIDEO, data=b"film"), 0.75),
        (v1.Media(modality=v1.MODALITY_VIDEO, data=b"film", options=v1.MediaOptions(video_pruning_rate=0.0)), 0.0),
        (v1.Media(modality=v1.MODALITY_VIDEO, data=b"film", options=v1.MediaOptions(kept_rows=b"\1")), None),
        (v1.Media(modality=v1.MODALITY_VIDEO, data=b"film", options=v1.MediaOptions(with_sound=True)), None),
        (v1.Media(modality=v1.MODALITY_VIDEO, key=b"k" * 32), None),
        (v1.Media(modality=v1.MODALITY_VIDEO, embedding=v1.EmbeddingBlock(count=1)), None),
        (v1.Media(modality=v1.MODALITY_IMAGE, data=b"picture"), None),
    ],
    ids=["unset", "none", "rows", "sound", "a key", "ready-made", "a picture"],
)
def test_videos_are_pruned_as_the_service_is_told_where_a_request_says_nothing(
    media: v1.Media, rate: float | None
) -> None:
    (item,) = requests(video_pruning_rate=0.75).read(chat(v1.ChatPart(media=media)), None, CONTEXT).media
    assert item.options.video_pruning_rate == rate


def test_unset_sampling_is_the_checkpoints_and_what_is_given_wins() -> None:
    reader = requests({"temperature": 0.6, "top_k": 20, "top_p": None, "repetition_penalty": 1.05, "do_sample": True})
    unset = reader.read(message(), None, CONTEXT).sampling
    assert (unset.temperature, unset.top_k, unset.top_p, unset.repetition_penalty) == (0.6, 20, 1.0, 1.05)
    assert unset.max_tokens == CONTEXT
    given = reader.read(message(temperature=0.0, top_k=0, max_tokens=7), None, CONTEXT).sampling
    assert (given.temperature, given.top_k, given.max_tokens, given.greedy) == (0.0, 0, 7, True)


def test_a_checkpoint_s_length_is_for_who_states_none_and_the_operator_s_bounds_all() -> None:
    def most(reader: RequestReader, **fields: Any) -> int:
        return reader.read(message(**fields), None, CONTEXT).sampling.max_tokens

    stated = requests({"max_new_tokens": 9})
    assert [most(stated), most(stated, max_tokens=20)] == [9, 20]
    bounded = requests({"max_new_tokens": 9}, 9)
    assert [most(bounded), most(bounded, max_tokens=20), most(bounded, max_tokens=4)] == [9, 9, 4]
    assert most(requests({"max_new_tokens": CONTEXT + 1})) == CONTEXT


@pytest.mark.parametrize(
    "stated",
    [{"top_k": -1}, {"top_p": 0.0}, {"min_p": -0.1}, {"repetition_penalty": 0}, {"temperature": math.inf}],
    ids=str,
)
def test_what_a_checkpoint_states_out_of_range_is_nothing(stated: dict[str, Any]) -> None:
    (name,) = stated
    found = requests({"temperature": 0.6, **stated}).read(message(), None, CONTEXT).sampling
    assert getattr(found, name) == getattr(SamplingParams(max_tokens=1), name)


def test_a_checkpoint_that_does_not_sample_is_greedy_until_a_temperature_is_given() -> None:
    reader = requests({"do_sample": False, "temperature": 0.7})
    assert reader.read(message(), None, CONTEXT).sampling.greedy
    assert reader.read(message(temperature=0.5), None, CONTEXT).sampling.temperature == 0.5


def test_limits_are_options() -> None:
    reader = requests(max_images=1, max_choices=2, max_prompt_bytes=3)
    few = requests(
        max_parts=1, max_token_ids=1, max_stop_texts=0, max_bad_words=0, max_logprobs=0, max_structure_bytes=2
    )
    assert refusal(chat(v1.ChatPart(text="a"), v1.ChatPart(text="b")), few).reason == "TOO_MANY_PARTS"
    assert refusal(message(stop_token_ids=[1, 2]), few).reason == "TOO_MANY_TOKEN_IDS"
    assert refusal(message(logit_bias={1: 1.0, 2: 1.0}), few).reason == "TOO_MANY_TOKEN_IDS"
    assert refusal(message(allowed_token_ids=[1, 2]), few).reason == "TOO_MANY_TOKEN_IDS"
    assert refusal(message(stop=["x"]), few).reason == "TOO_MANY_STOPS"
    assert refusal(message(bad_words=["x"]), few).reason == "TOO_MANY_BAD_WORDS"
    assert refusal(message(logprobs=1), few).reason == "OUT_OF_RANGE"
    assert refusal(message(regex="abc"), few).reason == "STRUCTURE_TOO_LARGE"
    assert refusal(chat(v1.ChatPart(media=IMAGE), v1.ChatPart(media=IMAGE)), reader).reason == "TOO_MANY_ITEMS"
    assert refusal(message(), reader).reason == "PROMPT_TOO_LONG"


def filmed(**source: Any) -> v1.GenerateRequest:
    return chat(v1.ChatPart(media=v1.Media(modality=v1.MODALITY_VIDEO, **source)))


MANY = 300_000
FLOODS: dict[str, tuple[Callable[[], v1.GenerateRequest], str]] = {
    "messages": (lambda: v1.GenerateRequest(chat=v1.ChatInput(messages=[v1.ChatMessage()] * MANY)), "TOO_MANY_PARTS"),
    "empty parts": (lambda: chat(*[v1.ChatPart()] * MANY), "TOO_MANY_PARTS"),
    "pictures in a text": (
        lambda: v1.GenerateRequest(text=v1.TextInput(prompt="x", media=[IMAGE] * MANY)),
        "TOO_MANY_ITEMS",
    ),
    "pictures of no kind": (
        lambda: v1.GenerateRequest(tokens=v1.TokensInput(ids=[1], media=[v1.Media()] * MANY)),
        "TOO_MANY_ITEMS",
    ),
    "token ids": (lambda: v1.GenerateRequest(tokens=v1.TokensInput(ids=[VOCABULARY] * MANY)), "PROMPT_TOO_LONG"),
    "times of frames": (lambda: filmed(pixels=v1.PixelBlock(timestamps=[0.5] * MANY)), "TOO_MANY_TIMES"),
    "times of rows": (lambda: filmed(embedding=v1.EmbeddingBlock(timestamps=[0.5] * MANY)), "TOO_MANY_TIMES"),
    "stop texts": (lambda: message(stop=[""] * MANY), "TOO_MANY_STOPS"),
    "bad words": (lambda: message(bad_words=[""] * MANY), "TOO_MANY_BAD_WORDS"),
    "stop tokens": (lambda: message(stop_token_ids=[VOCABULARY] * MANY), "TOO_MANY_TOKEN_IDS"),
    "biases": (
        lambda: message(logit_bias=dict.fromkeys(range(VOCABULARY, VOCABULARY + MANY), 1.0)),
        "TOO_MANY_TOKEN_IDS",
    ),
    "choices": (lambda: message(choice=v1.Choice(options=[""] * MANY)), "STRUCTURE_TOO_LARGE"),
}


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_is_counted_and_not_read(name: str) -> None:
    """Each of its members is bad in itself, which is not what is said; and the answer comes in few steps."""
    made, reason = FLOODS[name]
    request, steps = made(), 0

    def trace(*_: object) -> None:
        nonlocal steps
        steps += 1

    sys.setprofile(trace)
    try:
        error = refusal(request)
    finally:
        sys.setprofile(None)
    assert error.reason == reason
    assert steps < 1000


def test_the_longest_conversation_that_is_allowed_is_read() -> None:
    read = requests().read(chat(*[v1.ChatPart(text="x")] * 4096), None, CONTEXT)
    assert isinstance(read.prompt, ChatPrompt)
    assert len(read.prompt.messages[0].parts) == 4096
    assert refusal(chat(*[v1.ChatPart(text="x")] * 4097)).reason == "TOO_MANY_PARTS"


# --- prompts for other services ---------------------------------------------------------------------------------------

KEYED = v1.Media(modality=v1.MODALITY_IMAGE, key=bytes(32))
SLOT = llm_pb2.PromptPiece(slot=llm_pb2.MediaSlot(token=7))


def prefill(*pieces: llm_pb2.PromptPiece, **fields: Any) -> llm_pb2.PrefillRequest:
    return llm_pb2.PrefillRequest(pieces=pieces, **fields)


def test_a_prompt_of_another_service_is_taken_as_it_was_cut() -> None:
    ids = llm_pb2.PromptPiece(ids=llm_pb2.TokenIds(ids=[1, 2]))
    token, text = llm_pb2.PromptPiece(token=3), llm_pb2.PromptPiece(text="Hi")
    length = llm_pb2.PromptPiece(length_of=0)
    asked = prefill(token, text, SLOT, length, ids, media=[KEYED], cache_salt="ours", priority=2, request_id="one")
    read = requests().read_prefill(asked, None, CONTEXT)
    assert read.prompt == PiecesPrompt((3, "Hi", MediaSlot(0, Modality.IMAGE, 7), SoundLength(0), [1, 2]))
    assert (read.sampling.max_tokens, read.salt, read.priority, read.id) == (1, "ours", 2, "one")
    assert [item.source for item in read.media] == [Key(bytes(32))]


@pytest.mark.parametrize(
    ("asked", "reason", "field"),
    [
        (prefill(first_block=-1), "OUT_OF_RANGE", "first_block"),
        (prefill(SLOT, media=[IMAGE]), "NO_SOURCE", "media[0]"),
        (prefill(SLOT), "EMPTY_PART", "pieces[0]"),
        (prefill(llm_pb2.PromptPiece()), "EMPTY_PART", "pieces[0]"),
        (prefill(llm_pb2.PromptPiece(length_of=0)), "EMPTY_PART", "pieces[0]"),
        (prefill(media=[KEYED]), "PLACEHOLDER_MISMATCH", "pieces"),
        (prefill(llm_pb2.PromptPiece(token=VOCABULARY)), "TOKEN_OUT_OF_RANGE", "pieces[0]"),
        (
            prefill(llm_pb2.PromptPiece(ids=llm_pb2.TokenIds(ids=[1, VOCABULARY]))),
            "TOKEN_OUT_OF_RANGE",
            "pieces[0]",
        ),
        (
            prefill(llm_pb2.PromptPiece(slot=llm_pb2.MediaSlot(token=VOCABULARY)), media=[KEYED]),
            "TOKEN_OUT_OF_RANGE",
            "pieces[0]",
        ),
        (prefill(llm_pb2.PromptPiece(ids=llm_pb2.TokenIds(ids=[1] * CONTEXT))), "PROMPT_TOO_LONG", "pieces"),
        (prefill(model="another"), "UNKNOWN_MODEL", "model"),
    ],
)
def test_what_no_service_would_send_is_refused(asked: llm_pb2.PrefillRequest, reason: str, field: str) -> None:
    with pytest.raises(TwinlensError) as error:
        requests().read_prefill(asked, None, CONTEXT)
    assert (error.value.reason, error.value.field) == (reason, field)
