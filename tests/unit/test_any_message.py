"""Whatever bytes a message is made of, it is read, or refused with one of our errors: nothing else ever comes out."""

from __future__ import annotations

import contextlib
from typing import Any

from google.protobuf.message import DecodeError
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.errors import TwinlensError
from common.media.item import Modality
from encoder_service import convert
from encoder_service.media import checks, limits
from llm_service.config import LlmConfig
from llm_service.convert.requests import RequestReader
from llm_service.generation_config import SamplingDefaults
from tests import pictures
from twinlens import v1
from twinlens.v1 import encoder_pb2

PICTURE = pictures.encoded(pictures.noise(8, 8))
MEDIA = [
    v1.Media(modality=v1.MODALITY_IMAGE, data=PICTURE, options=v1.MediaOptions(min_pixels=1, max_pixels=9)),
    v1.Media(modality=v1.MODALITY_VIDEO, url="https://example.org/a.mp4", known_key=bytes(32), mime_type="video/mp4"),
    v1.Media(modality=v1.MODALITY_IMAGE, key=bytes(32)),
    v1.Media(modality=v1.MODALITY_VIDEO, data=b"\0\0\0\x18ftyp", options=v1.MediaOptions(fps=2.5, max_frames=4)),
    v1.Media(
        modality=v1.MODALITY_VIDEO,
        pixels=v1.PixelBlock(data=bytes(96), frames=2, height=4, width=4, timestamps=[0.0, 0.5]),
    ),
    v1.Media(
        modality=v1.MODALITY_IMAGE,
        embedding=v1.EmbeddingBlock(data=bytes(64), dtype=1, count=1, levels=2, width=8, grid=v1.Grid(t=1, h=2, w=2)),
    ),
]
SAMPLING = v1.SamplingParams(
    max_tokens=5, temperature=0.5, top_p=0.9, top_k=3, seed=7, stop=["x"], stop_token_ids=[1], logit_bias={2: 1.0}, n=2,
    logprobs=2, prompt_logprobs=1, json_schema='{"type": "object"}',
)  # fmt: skip
BOUNDS = limits.MediaLimits(max_videos=3)
CONFIG = LlmConfig(model="m", max_videos=3)
PARTS = [v1.ChatPart(text="what?"), *(v1.ChatPart(media=media) for media in MEDIA)]
CHAT = v1.GenerateRequest(
    chat=v1.ChatInput(messages=[v1.ChatMessage(role="user", parts=PARTS)]),
    sampling=SAMPLING,
    cache_salt="s",
    priority=3,
)
TOKENS = v1.GenerateRequest(tokens=v1.TokensInput(ids=[1, 2, 3], media=MEDIA[:1]), sampling=SAMPLING)
ENCODE = encoder_pb2.EncodeRequest(items=MEDIA, accepts=[1, 2], first_rows=[0] * len(MEDIA), priority=1)


@st.composite
def spoilt(draw: Any, *messages: Any) -> bytes:
    """A message's bytes, of which some are others, missing or too many."""
    data = bytearray(draw(st.sampled_from(messages)).SerializeToString())
    for _ in range(draw(st.integers(0, 6))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        match draw(st.sampled_from(["change", "cut", "insert"])):
            case "change":
                data[at : at + 1] = bytes([draw(st.integers(0, 255))])
            case "cut":
                del data[at : at + draw(st.integers(1, 20))]
            case _:
                data[at:at] = draw(st.binary(max_size=8))
    return bytes(data)


@settings(max_examples=500, deadline=None)
@given(spoilt(CHAT, TOKENS))
@example(CHAT.SerializeToString())
def test_the_llm_service_reads_or_refuses_it(data: bytes) -> None:
    with contextlib.suppress(DecodeError, TwinlensError):
        request = RequestReader(CONFIG, ("m",), 600, SamplingDefaults()).read(
            v1.GenerateRequest.FromString(data), None, 512
        )
        assert request.sampling.max_tokens <= 512


@settings(max_examples=500, deadline=None)
@given(spoilt(ENCODE))
@example(ENCODE.SerializeToString())
def test_the_encoder_reads_or_refuses_it(data: bytes) -> None:
    with contextlib.suppress(DecodeError):
        request = encoder_pb2.EncodeRequest.FromString(data)
        with contextlib.suppress(TwinlensError):
            convert.check_items(request.items, BOUNDS)
            convert.check_lists(request)
        for index, media in enumerate(request.items):
            with contextlib.suppress(TwinlensError):
                checks.check_item(convert.read_item(media, index, "", 0, tuple(Modality)), BOUNDS)


def test_what_is_not_spoilt_is_read() -> None:
    """So the tests above get past the first check."""
    assert len(RequestReader(CONFIG, ("m",), 600, SamplingDefaults()).read(CHAT, None, 512).media) == len(MEDIA)
    convert.check_items(ENCODE.items, BOUNDS)
    convert.check_lists(ENCODE)
    for index, media in enumerate(MEDIA):
        checks.check_item(convert.read_item(media, index, "", 0, tuple(Modality)), BOUNDS)
