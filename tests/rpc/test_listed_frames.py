"""A video that is sent as a list of pictures gives what it gives decoded: every frame is kept."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from PIL import Image

from tests import pictures
from tests.rpc.encoder_client import Client, film
from tests.rpc.encoder_client import video as sent
from tests.rpc.pairs import Pair, answer, asked, greedy, refusal
from twinlens import user, v1, video

PICTURES = [pictures.encoded(Image.fromarray(each), "JPEG") for each in pictures.frames(5)]
DECODED = np.stack([np.asarray(Image.open(io.BytesIO(each)).convert("RGB")) for each in PICTURES])
ADDRESS = "data:video/jpeg;base64," + ",".join(base64.b64encode(each).decode() for each in PICTURES)


@pytest.mark.parametrize("options", [{}, {"fps": 1.0}, {"max_pixels": 3 * 64 * 64}], ids=str)
def test_rows_and_header_are_those_of_decoded_frames(client: Client, options: dict[str, float]) -> None:
    listed, decoded = client.encode(sent(b"".join(PICTURES), **options), film(DECODED, **options))
    assert listed.header.grid == decoded.header.grid
    assert list(listed.header.timestamps) == list(decoded.header.timestamps)
    assert listed.header.tokens == decoded.header.tokens
    assert np.array_equal(listed.rows, decoded.rows)


def test_frames_may_be_pictures_without_loss(client: Client) -> None:
    raw = pictures.frames(5)
    listed, decoded = client.encode(
        sent(b"".join(pictures.encoded(Image.fromarray(each)) for each in raw)), film(np.stack(list(raw)))
    )
    assert list(listed.header.timestamps) == list(decoded.header.timestamps)
    assert np.array_equal(listed.rows, decoded.rows)


def test_an_address_with_commas_is_such_a_list(qwen3: Pair) -> None:
    given = [
        answer(qwen3.text, asked(user(video(each) if isinstance(each, str) else each, "What moves?"), greedy()))
        for each in (ADDRESS, film(DECODED))
    ]
    assert given[0].choices[0].token_ids == given[1].choices[0].token_ids
    assert given[0].usage.prompt_tokens == given[1].usage.prompt_tokens


@pytest.mark.parametrize(
    ("media", "reason"),
    [
        (video(ADDRESS, max_frames=2), "BAD_OPTION"),
        (video(ADDRESS, mime_type="video/mp4"), "MIME_MISMATCH"),
        (video(ADDRESS + ",?"), "BAD_BASE64"),
        (video("data:video/jpeg;base64," + "," * 10_001), "BAD_BASE64"),
        (v1.Media(modality=v1.MODALITY_VIDEO, data=b"".join(PICTURES)[:-9]), "MEDIA_UNREADABLE"),
    ],
    ids=["a choice of frames", "another type", "no base64", "a flood", "cut off"],
)
def test_what_is_no_such_list_is_refused(qwen3: Pair, media: v1.Media, reason: str) -> None:
    assert refusal(qwen3.text, asked(user(media, "What moves?"))).reason == reason
