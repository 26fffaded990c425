"""A small client of the encoder service, for tests: everything that a stream said, checked as it arrives."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from typing import Any, Self

import google_crc32c
import grpc
import numpy as np

from common.shm import local_link
from tests import pictures
from tests.launch import Service, stopped
from twinlens.v1 import encoder_pb2, encoder_pb2_grpc, media_pb2

IMAGE, VIDEO = media_pb2.MODALITY_IMAGE, media_pb2.MODALITY_VIDEO
WORKER, DECODER = "encoder_service.worker", "encoder_service.media"

_seed = itertools.count(5000)


def new_picture(width: int = 60, height: int = 60) -> bytes:
    """A picture that no test has sent before."""
    return pictures.encoded(pictures.noise(width, height, next(_seed)))


def frozen(service: Service, module: str) -> AbstractContextManager[None]:
    """The service's processes of this module stand still for the length of the block."""
    return stopped(*service.children(module))


def handed(offered: encoder_pb2.LocalSocket) -> tuple[socket.socket, local_link.SharedArena]:
    """What a reader of an encoder's memory gets, and the link that has to stay open. It is asked again where the
    encoder has no core to answer in time."""
    while True:
        with suppress(TimeoutError):
            return local_link.connect(offered.name, "", offered.secret)


def floats(data: bytes, dtype: int) -> np.ndarray:
    """Elements as float32."""
    if dtype == media_pb2.DATA_TYPE_BFLOAT16:
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, "<f4" if dtype == media_pb2.DATA_TYPE_FLOAT32 else "<f2").astype(np.float32)


def image(data: bytes, **options: Any) -> media_pb2.Media:
    return media_pb2.Media(modality=IMAGE, data=data, options=media_pb2.MediaOptions(**options))


def video(data: bytes, **options: Any) -> media_pb2.Media:
    return media_pb2.Media(modality=VIDEO, data=data, options=media_pb2.MediaOptions(**options))


def film(frames: np.ndarray, **options: Any) -> media_pb2.Media:
    """A video whose frames [T, H, W, 3] uint8 are decoded already."""
    count, height, width = frames.shape[:3]
    block = media_pb2.PixelBlock(data=frames.tobytes(), frames=count, height=height, width=width)
    return media_pb2.Media(modality=VIDEO, pixels=block, options=media_pb2.MediaOptions(**options))


@dataclass
class Encoded:
    """What one item's stream said: its header, its rows [tokens, levels, width], or its error."""

    header: encoder_pb2.EncodeHeader | None = None
    pieces: list[np.ndarray] = field(default_factory=list)
    done: encoder_pb2.EncodeDone | None = None
    error: media_pb2.Status | None = None
    progress: list[str] = field(default_factory=list)
    headers: int = 0

    @property
    def rows(self) -> np.ndarray:
        return np.concatenate(self.pieces)

    def add(self, event: encoder_pb2.EncodeResponse) -> None:
        match event.WhichOneof("event"):
            case "header":
                self._add_header(event.header)
            case "rows":
                assert self.header is not None, "rows before the header"
                assert event.rows.first_row == sum(map(len, self.pieces)), "rows out of order"
                assert event.rows.crc32c == google_crc32c.value(event.rows.data)
                shape = (event.rows.count, self.header.levels, self.header.width)
                self.pieces.append(floats(event.rows.data, self.header.dtype).reshape(shape))
            case "done":
                self.done = event.done
            case "error":
                self.error = event.error.status
            case "progress":
                self.progress.append(event.progress.stage)

    def _add_header(self, header: encoder_pb2.EncodeHeader) -> None:
        """Of a pruned video there may be a second one: the first, and which rows are kept."""
        if self.header is not None:
            assert self.header.grid_rows > 0, "a second header"
            assert not self.header.kept_rows, "a second header with rows"
            plain = encoder_pb2.EncodeHeader()
            plain.CopyFrom(header)
            plain.kept_rows, plain.crc32c = b"", self.header.crc32c
            assert plain == self.header, "it says something else"
        self.headers += 1
        self.header = header


def follow(stream: Any, event: str, found: Encoded | None = None) -> Encoded:
    """Reads one item's stream up to the first event of this kind."""
    found = found or Encoded()
    for each in stream:
        found.add(each)
        if each.WhichOneof("event") == event:
            return found
    raise AssertionError(f"the stream ended without {event}")


class Client:
    """Calls one encoder."""

    def __init__(self, service: Service | str, token: str = "") -> None:
        address = service if isinstance(service, str) else service.address
        self.channel = grpc.insecure_channel(address, [("grpc.max_send_message_length", -1)])
        self.stub = encoder_pb2_grpc.EncoderServiceStub(self.channel)
        self.metadata = [("authorization", f"Bearer {token}")] if token else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()

    def start(self, items: Sequence[media_pb2.Media], timeout: float | None = 180, **fields: Any) -> Any:
        """The open stream."""
        request = encoder_pb2.EncodeRequest(items=items, **fields)
        return self.stub.Encode(request, timeout=timeout, metadata=self.metadata)

    def encode(self, *items: media_pb2.Media, timeout: float | None = 180, **fields: Any) -> list[Encoded]:
        """What each item's stream said, to its end; every item ends with done or an error."""
        found = [Encoded() for _ in items]
        for event in self.start(items, timeout, **fields):
            found[getattr(event, event.WhichOneof("event")).item].add(event)
        for each in found:
            assert (each.done is None) != (each.error is None), "an item without an end"
        return found

    def one(self, item: media_pb2.Media, **fields: Any) -> Encoded:
        return self.encode(item, **fields)[0]

    def load(self) -> encoder_pb2.EncoderServiceGetLoadResponse:
        return self.stub.GetLoad(encoder_pb2.EncoderServiceGetLoadRequest(), metadata=self.metadata)

    def info(self) -> encoder_pb2.EncoderServiceGetInfoResponse:
        return self.stub.GetInfo(encoder_pb2.EncoderServiceGetInfoRequest(), metadata=self.metadata)
