"""How a bad item must be refused, and what must hold after it, whatever it was."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tests import pictures
from tests.launch import Service
from tests.rpc.encoder_client import IMAGE, Client, image
from twinlens.v1 import media_pb2

INVALID, NOT_FOUND, FORBIDDEN, UNIMPLEMENTED = 3, 5, 7, 12
NAN, INFINITY = float("nan"), float("inf")

HOST_DETAIL = re.compile(r"/\w+/|\w+\.py|0x[0-9a-f]{6,}|Error|Exception|Traceback|PIL|decord|torch")
"""What may not stand in a text that a caller sees."""

_seed = itertools.count(1000)


@dataclass(frozen=True, slots=True)
class Bad:
    """An item that is refused, and with what: `at` is the field, within the item."""

    make: Callable[[], media_pb2.Media]
    reason: str
    at: str = ""
    code: int = INVALID


@dataclass(frozen=True, slots=True)
class Strict:
    """An encoder with one decode process, which takes 64 frames of a video at most."""

    service: Service
    client: Client

    def refuses(self, bad: Bad) -> media_pb2.Status:
        """The item gets its refusal, nothing is left of it, and the next good item is right."""
        found = self.client.one(bad.make())
        assert found.error is not None, "it was taken"
        error = found.error
        at = f"items[0]{'.' * bool(bad.at)}{bad.at}"
        assert (error.code, error.reason, error.field) == (bad.code, bad.reason, at), error
        assert not error.HasField("retry_after_ms")
        says_nothing_of_the_host(error.message)
        self.still_right()
        return error

    def still_right(self) -> None:
        """A new picture gets its rows, which are what another request for its pixels gets; nothing is held."""
        picture = pictures.noise(40, 60, next(_seed))
        block = media_pb2.PixelBlock(data=np.asarray(picture).tobytes(), frames=1, height=60, width=40)
        ours, same = self.client.encode(image(pictures.encoded(picture)), media_pb2.Media(modality=IMAGE, pixels=block))
        assert ours.error is None
        assert ours.header.tokens == len(ours.rows) > 0
        assert np.isfinite(ours.rows).all()
        assert np.array_equal(ours.rows, same.rows)
        load = self.client.load()
        assert (load.queued_items, load.running_items, load.queued_patches, load.leases) == (0, 0, 0, 0)
        assert self.service.process.poll() is None


def says_nothing_of_the_host(text: str) -> None:
    """A text that a caller sees names no path, address, module or class."""
    assert text
    assert not HOST_DETAIL.search(text), text


def good(**fields: object) -> media_pb2.Media:
    """A picture that is fine, with other fields of its message."""
    return media_pb2.Media(modality=IMAGE, data=pictures.encoded(pictures.noise(40, 40)), **fields)
