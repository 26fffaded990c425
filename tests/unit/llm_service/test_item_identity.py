"""Keys of items, whatever they are given as: the encoder's very keys, so that a repeat is known without asking it."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidInput
from common.media.convert import write_media
from common.media.item import Modality
from encoder_service import convert as encoders
from encoder_service.engine.admission import Admission
from encoder_service.engine.content import Contents
from encoder_service.media.fetch import FetchConfig, Fetcher
from encoder_service.media.limits import MediaLimits
from llm_service.config import LlmConfig
from llm_service.convert.requests import RequestReader
from llm_service.encoders.item_identity import Identity, identify
from llm_service.generation_config import SamplingDefaults
from llm_service.request import MediaItem
from twinlens import v1
from twinlens.v1 import encoder_pb2

DIGEST = "the digest"
PIXELS = v1.PixelBlock(data=bytes(48), frames=1, height=4, width=4)
ROWS = v1.EmbeddingBlock(
    data=bytes(64), dtype=v1.DATA_TYPE_FLOAT32, count=1, levels=2, width=8, grid=v1.Grid(t=1, h=2, w=2)
)
numbers = st.integers(0, 2**31 - 1)
times = st.lists(st.floats(0, 1e6), max_size=3)
options = st.builds(
    v1.MediaOptions, min_pixels=st.none() | numbers, fps=st.none() | st.floats(0, 10), max_frames=st.none() | numbers
)
pixels = st.builds(
    v1.PixelBlock, data=st.binary(max_size=8), frames=numbers, height=numbers, width=numbers, timestamps=times
)
rows = st.builds(
    v1.EmbeddingBlock,
    data=st.binary(max_size=8),
    dtype=st.sampled_from([v1.DATA_TYPE_FLOAT32, v1.DATA_TYPE_BFLOAT16, v1.DATA_TYPE_FLOAT16]),
    count=numbers,
    levels=numbers,
    width=numbers,
    grid=st.builds(v1.Grid, t=numbers, h=numbers, w=numbers),
    timestamps=times,
    seconds_per_grid=st.floats(0, 1e6),
)
modalities = st.sampled_from([v1.MODALITY_IMAGE, v1.MODALITY_VIDEO])
media = (
    st.builds(v1.Media, modality=modalities, data=st.binary(min_size=1, max_size=8), options=options)
    | st.builds(v1.Media, modality=modalities, pixels=pixels, options=options)
    | st.builds(v1.Media, modality=modalities, embedding=rows)
)


def read(message: v1.Media) -> MediaItem:
    """The item of a request, as the LLM service reads it."""
    request = v1.GenerateRequest(text=v1.TextInput(prompt="x", media=[message]))
    requests = RequestReader(LlmConfig(model="m"), ("m",), 1000, SamplingDefaults())
    return requests.read(request, None, 1000).media[0]


def sent(item: MediaItem) -> v1.Media:
    """The item as an encoder reads it."""
    return encoder_pb2.EncodeRequest.FromString(b"".join(write_media(item))).items[0]


def identity(salt: str = "", **fields: Any) -> Identity:
    return asyncio.run(identify(read(v1.Media(**{"modality": v1.MODALITY_IMAGE, **fields})), DIGEST, salt))


@given(media, st.text(max_size=4))
def test_a_key_is_the_one_that_the_encoder_computes(message: v1.Media, salt: str) -> None:
    ours = asyncio.run(identify(read(message), DIGEST, salt))
    theirs = encoders.read_item(sent(read(message)), 0, salt, 0, tuple(Modality))
    known = asyncio.run(Contents(Fetcher(FetchConfig()), MediaLimits(), DIGEST, Admission(1, 1)).key(theirs))
    assert ours.key == ours.affinity == ours.recalled == known


@given(media)
def test_an_item_reaches_the_encoder_as_it_was_given(message: v1.Media) -> None:
    item = sent(read(message))
    message.options.SetInParent()  # options that state nothing are none
    item.options.SetInParent()
    assert item == message


def test_content_is_a_piece_as_it_is_and_not_a_copy() -> None:
    for message in (v1.Media(data=bytes(9)), v1.Media(pixels=PIXELS), v1.Media(embedding=ROWS)):
        message.modality = v1.MODALITY_IMAGE
        item = read(message)
        content = item.source if isinstance(item.source, bytes) else item.source.data
        assert any(piece is content for piece in write_media(item))


def test_everything_that_is_stated_of_rows_and_pixels_is_part_of_the_key() -> None:
    def changed(block: Any, **fields: Any) -> Any:
        return type(block).FromString(block.SerializeToString() + type(block)(**fields).SerializeToString())

    pixel_blocks = [PIXELS, *(changed(PIXELS, **{name: 9}) for name in ("frames", "height", "width"))]
    pixel_blocks += [changed(PIXELS, data=bytes(47)), changed(PIXELS, timestamps=[0.5])]
    row_blocks = [ROWS, *(changed(ROWS, **{name: 9}) for name in ("count", "levels", "width"))]
    row_blocks += [changed(ROWS, grid=v1.Grid(**{name: 9})) for name in "thw"]
    row_blocks += [changed(ROWS, dtype=v1.DATA_TYPE_FLOAT16), changed(ROWS, seconds_per_grid=1.0)]
    row_blocks += [changed(ROWS, data=bytes(63)), changed(ROWS, timestamps=[0.5])]
    keys = [identity(pixels=block).key for block in pixel_blocks] + [
        identity(embedding=block).key for block in row_blocks
    ]
    assert len(set(keys)) == len(keys) == 17
    assert identity(pixels=PIXELS, salt="tenant").key not in keys


def test_an_address_has_no_key_of_its_own_and_goes_where_it_went() -> None:
    plain, known = (
        identity(url="https://example.org/x.png"),
        identity(url="https://example.org/x.png", known_key=b"k" * 32),
    )
    assert (plain.key, plain.recalled, known.key) == (None, None, None)
    assert plain.affinity == known.affinity == hashlib.sha256(b"https://example.org/x.png").digest()


def test_what_an_address_gave_is_recalled_for_this_address_and_key_alone() -> None:
    asked: list[dict[str, Any]] = [
        {"url": "https://example.org/x", "known_key": b"k" * 32},
        {"url": "https://example.org/y", "known_key": b"k" * 32},
        {"url": "https://example.org/x", "known_key": b"l" * 32},
        {"url": "https://example.org/x", "known_key": b"k" * 32, "mime_type": "image/png"},
        {"url": "https://example.org/x", "known_key": b"k" * 32, "options": v1.MediaOptions(max_pixels=9)},
        {"key": b"k" * 32},
    ]
    assert len({identity(**fields).recalled for fields in asked}) == len(asked)
    assert identity(**asked[0]) == identity(**asked[0])


def test_a_stated_type_is_no_part_of_the_key_and_is_recalled_with_it() -> None:
    plain, png, jpeg = (identity(data=b"file", mime_type=kind) for kind in ("", "image/png", "image/jpeg"))
    assert plain.key == png.key == jpeg.key
    assert len({plain.recalled, png.recalled, jpeg.recalled}) == 3


def test_a_data_address_is_known_by_what_is_in_it() -> None:
    body = base64.b64encode(b"file").decode()
    for url, stated in (("data:image/png;base64,", "image/png"), ("DATA:;base64,", "")):
        assert identity(url=url + body) == identity(data=b"file", mime_type=stated)
    assert identity(url=f"data:;base64,{body}", mime_type="image/png") == identity(data=b"file", mime_type="image/png")
    with pytest.raises(InvalidInput) as error:
        identity(url="data:image/png;base64,@@")
    assert (error.value.reason, error.value.field) == ("BAD_BASE64", "text.media[0].url")


@pytest.mark.parametrize(
    "fields",
    [
        {"key": b"k" * 32, "mime_type": "image/png"},
        {"key": b"k" * 32, "options": v1.MediaOptions(fps=1)},
    ],
)
def test_what_an_encoder_has_to_look_at_is_not_recalled(fields: dict[str, Any]) -> None:
    assert identity(**fields).recalled is None
    assert identity(**fields).key is not None
