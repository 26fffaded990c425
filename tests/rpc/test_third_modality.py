"""A modality is a row of two tables, the module of its decoder, and a family that takes it: with those, an encoder
serves a third one in all of its processes, and an LLM service believes its headers."""

from __future__ import annotations

import numpy as np

from common.media.convert import read_header
from common.media.item import HEADER_SHAPES, Modality
from llm_service.encoders.stream import is_consistent
from tests.launch import encoder_server
from tests.rpc.encoder_client import Client, image, new_picture
from tests.toy_sound import SHAPE, encoded
from twinlens.v1 import media_pb2

AUDIO = media_pb2.MODALITY_AUDIO


def sound(data: bytes, **fields: str) -> media_pb2.Media:
    return media_pb2.Media(modality=AUDIO, data=data, **fields)


def test_without_its_row_it_is_not_served(client):
    assert client.one(sound(encoded(bytes(64)))).error.reason == "NO_AUDIO"


def test_a_third_modality_is_told_planned_decoded_and_computed(checkpoints, monkeypatch):
    rising, falling = bytes(range(0, 256, 2)), bytes(range(254, -1, -2))
    with encoder_server(checkpoints("qwen3_vl"), module="tests.toy_sound") as running, Client(running) as client:
        assert list(client.info().modalities) == [1, 2, AUDIO]
        first, second = client.one(sound(encoded(rising))), client.one(sound(encoded(falling)))
        for found in (first, second):
            assert (found.header.modality, found.header.tokens) == (AUDIO, len(rising) // 16)
            assert list(found.header.timestamps) == [float(second) for second in range(len(rising) // 16)]
            header, _ = read_header(found.header)
            assert not is_consistent(header, 2), "an LLM service without its row refuses it"
            with monkeypatch.context() as patched:
                patched.setitem(HEADER_SHAPES, Modality.AUDIO, SHAPE)
                assert is_consistent(header, 2)
        rows = first.rows, second.rows
        assert not np.allclose(*rows)
        assert np.allclose(rows[0], client.one(sound(encoded(rising), mime_type="audio/x-toy")).rows)
        assert client.one(sound(encoded(rising))).header.cached

        assert client.one(image(new_picture())).error is None
        assert client.one(sound(new_picture())).error.reason == "MEDIA_FORMAT"
        assert client.one(sound(encoded(rising), mime_type="image/png")).error.reason == "MIME_MISMATCH"
        assert client.one(sound(encoded(bytes(1 << 20)))).error.reason == "VIDEO_TOO_LARGE"
