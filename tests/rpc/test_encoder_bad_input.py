"""Every bad picture, video and option, over real gRPC: the status, the reason, and a service that goes on as before."""

from __future__ import annotations

import base64
import io
import itertools
import re
import struct
import zlib
from collections.abc import Callable, Iterator

import grpc
import numpy as np
import pytest
from PIL import Image

from tests import pictures
from tests.launch import Service, encoder_server
from tests.rpc.encoder_client import IMAGE, VIDEO, Client, image, video
from twinlens.v1 import media_pb2

INVALID, NOT_FOUND, FORBIDDEN, UNIMPLEMENTED = 3, 5, 7, 12
PIXELS = media_pb2.PixelBlock
NAN = float("nan")


@pytest.fixture(scope="module")
def service(checkpoints) -> Iterator[Service]:
    with encoder_server(checkpoints("qwen2_5_vl"), decode_processes=1, max_frames=64) as running:
        yield running


@pytest.fixture(scope="module")
def client(service) -> Iterator[Client]:
    with Client(service) as calls:
        yield calls


_seed = itertools.count(1000)


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width: int, height: int, body: bytes = b"", *, extra: bytes = b"") -> bytes:
    """A PNG file whose header says 8-bit RGB of this size, whatever its body holds."""
    header = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + extra + _chunk(b"IDAT", body) + _chunk(b"IEND", b"")


def with_bad_checksum() -> bytes:
    whole = bytearray(pictures.encoded(pictures.noise(64, 64)))
    whole[whole.index(b"IEND") - 5] ^= 0xFF  # the last byte of the data chunk's checksum
    return bytes(whole)


def text_bomb() -> bytes:
    packed = zlib.compress(b"a" * (80 << 20), 9)
    return png(64, 64, zlib.compress(b"\0" * (64 * 193)), extra=_chunk(b"zTXt", b"Comment\0\0" + packed))


def tiff(kind: str = "TIFF") -> bytes:
    return pictures.encoded(pictures.noise(32, 32), kind)


def sound_alone() -> bytes:
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as out:
        stream = out.add_stream("pcm_s16le", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), format="s16", layout="mono")
        frame.rate = 8000
        out.mux(stream.encode(frame))
        out.mux(stream.encode())
    return file.getvalue()


def without_index() -> bytes:
    whole = pictures.video(pictures.frames(10))
    return whole[: whole.index(b"moov") - 4]


def claims_many_frames(count: int = 10**9) -> bytes:
    """An MP4 whose tables of sample sizes and times claim `count` frames of one size."""
    whole = bytearray(pictures.video(pictures.frames(10)))
    sizes, times = whole.index(b"stsz"), whole.index(b"stts")
    struct.pack_into(">II", whole, sizes + 8, 100, count)
    struct.pack_into(">I", whole, times + 12, count)
    return bytes(whole)


def huge_frames() -> bytes:
    return pictures.video(np.zeros((2, 4320, 7680, 3), np.uint8))


def embedding(modality: int = IMAGE, **fields: object) -> media_pb2.Media:
    """A picture's four rows for a model of width 64."""
    given = {
        "data": bytes(4 * 64 * 4),
        "dtype": media_pb2.DATA_TYPE_FLOAT32,
        "count": 4,
        "levels": 1,
        "width": 64,
        "grid": media_pb2.Grid(t=1, h=4, w=4),
        **fields,
    }
    return media_pb2.Media(modality=modality, embedding=media_pb2.EmbeddingBlock(**given))


def pixels(modality: int = IMAGE, **fields: object) -> media_pb2.Media:
    given = {"data": b"\0" * (56 * 56 * 3), "frames": 1, "height": 56, "width": 56, **fields}
    return media_pb2.Media(modality=modality, pixels=PIXELS(**given))


def as_data_url(data: bytes, mime_type: str) -> str:
    return f"data:{mime_type};base64,{base64.b64encode(data).decode()}"


def good(**fields: object) -> media_pb2.Media:
    return media_pb2.Media(modality=IMAGE, data=pictures.encoded(pictures.noise(40, 40)), **fields)


BAD: dict[str, tuple[Callable[[], media_pb2.Media], int, str]] = {
    "empty": (lambda: image(b""), INVALID, "MEDIA_EMPTY"),
    "random": (lambda: image(np.random.default_rng(0).bytes(4096)), INVALID, "MEDIA_FORMAT"),
    "HTML": (lambda: image(b"<!DOCTYPE html><html><body>not here</body></html>"), INVALID, "MEDIA_FORMAT"),
    "SVG": (lambda: image(b'<svg xmlns="http://www.w3.org/2000/svg"/>'), INVALID, "MEDIA_FORMAT"),
    "TIFF": (lambda: image(tiff()), INVALID, "MEDIA_FORMAT"),
    "JP2": (lambda: image(tiff("JPEG2000")), INVALID, "MEDIA_FORMAT"),
    "EPS": (lambda: image(tiff("EPS")), INVALID, "MEDIA_FORMAT"),
    "PSD": (lambda: image(b"8BPS\0\x01" + bytes(100)), INVALID, "MEDIA_FORMAT"),
    "a video as a picture": (lambda: image(pictures.video(pictures.frames(4))), INVALID, "MEDIA_FORMAT"),
    "a picture as a video": (lambda: video(pictures.encoded(pictures.noise(40, 40))), INVALID, "MEDIA_FORMAT"),
    "a playlist as a video": (lambda: video(b"#EXTM3U\nfile:///etc/passwd\n"), INVALID, "MEDIA_FORMAT"),
    "magic alone": (lambda: image(b"\xff\xd8\xff"), INVALID, "MEDIA_UNREADABLE"),
    "a random body": (
        lambda: image(b"\xff\xd8\xff" + np.random.default_rng(1).bytes(999)),
        INVALID,
        "MEDIA_UNREADABLE",
    ),
    "truncated JPEG": (
        lambda: image(pictures.encoded(pictures.photograph(), "JPEG")[:9000]),
        INVALID,
        "MEDIA_UNREADABLE",
    ),
    "truncated PNG": (lambda: image(pictures.encoded(pictures.photograph())[:9000]), INVALID, "MEDIA_UNREADABLE"),
    "truncated WebP": (
        lambda: image(pictures.encoded(pictures.photograph(), "WEBP")[:9000]),
        INVALID,
        "MEDIA_UNREADABLE",
    ),
    "bad checksum": (lambda: image(with_bad_checksum()), INVALID, "MEDIA_UNREADABLE"),
    "text bomb": (lambda: image(text_bomb()), INVALID, "MEDIA_UNREADABLE"),
    "another MIME type": (lambda: good(mime_type="image/jpeg"), INVALID, "MIME_MISMATCH"),
    "a MIME type of nothing": (lambda: good(mime_type="text/html"), INVALID, "MIME_MISMATCH"),
    "0 by 0": (lambda: image(png(0, 0)), INVALID, ""),
    "1 by 1": (lambda: image(pictures.encoded(pictures.noise(1, 1))), INVALID, "IMAGE_TOO_SMALL"),
    "1 by 10000": (lambda: image(pictures.encoded(pictures.noise(1, 10000))), INVALID, "IMAGE_TOO_SMALL"),
    "4 by 1000": (lambda: image(pictures.encoded(pictures.noise(4, 1000))), INVALID, "IMAGE_RATIO"),
    "a header of 50000 by 50000": (lambda: image(png(50000, 50000)), INVALID, "IMAGE_TOO_LARGE"),
    "a header of 50000 by 50000 with pixels": (
        lambda: image(png(50000, 50000, zlib.compress(bytes(1 << 20)))),
        INVALID,
        "IMAGE_TOO_LARGE",
    ),
    "88 MP in 10 KB": (
        lambda: image(pictures.encoded(Image.new("1", (11000, 8000)))),
        INVALID,
        "IMAGE_TOO_LARGE",
    ),
    "21 MiB": (lambda: image(b"\xff\xd8\xff" + bytes(21 << 20)), INVALID, "IMAGE_TOO_LARGE"),
    "an empty video": (lambda: video(b""), INVALID, "MEDIA_EMPTY"),
    "sound alone": (lambda: video(sound_alone()), INVALID, "MEDIA_UNREADABLE"),
    "a video without an index": (lambda: video(without_index()), INVALID, "MEDIA_UNREADABLE"),
    "a video of a billion frames": (lambda: video(claims_many_frames()), INVALID, ""),
    "a video that ends its decoder": (
        lambda: video(pictures.video(pictures.frames(4), container="avi")[:20]),
        INVALID,
        "MEDIA_UNREADABLE",
    ),
    "8K frames": (lambda: video(huge_frames()), INVALID, "IMAGE_TOO_LARGE"),
    "fps not a number": (lambda: video(pictures.video(pictures.frames(8)), fps=NAN), INVALID, "BAD_OPTION"),
    "negative fps": (lambda: video(pictures.video(pictures.frames(8)), fps=-1.0), INVALID, "BAD_OPTION"),
    "endless fps": (lambda: video(pictures.video(pictures.frames(8)), fps=float("inf")), INVALID, "BAD_OPTION"),
    "no frames": (lambda: video(pictures.video(pictures.frames(8)), max_frames=0), INVALID, "BAD_OPTION"),
    "too many frames": (lambda: video(pictures.video(pictures.frames(8)), max_frames=65), INVALID, "BAD_OPTION"),
    "fps of a picture": (lambda: image(b"\xff\xd8\xff", fps=2.0), INVALID, "BAD_OPTION"),
    "no pixels": (lambda: image(b"\xff\xd8\xff", min_pixels=0), INVALID, "BAD_OPTION"),
    "endless pixels": (lambda: image(b"\xff\xd8\xff", max_pixels=1 << 60), INVALID, "BAD_OPTION"),
    "bounds upside down": (lambda: image(b"\xff\xd8\xff", min_pixels=9000, max_pixels=8000), INVALID, "BAD_OPTION"),
    "pruning": (
        lambda: video(pictures.video(pictures.frames(8)), video_pruning_rate=0.5),
        UNIMPLEMENTED,
        "NO_PRUNING",
    ),
    "no modality": (lambda: media_pb2.Media(data=b"x"), INVALID, "BAD_MODALITY"),
    "audio": (lambda: media_pb2.Media(modality=media_pb2.MODALITY_AUDIO, data=b"x"), UNIMPLEMENTED, "NO_AUDIO"),
    "no source": (lambda: media_pb2.Media(modality=IMAGE), INVALID, "NO_SOURCE"),
    "rows of a video without times": (lambda: embedding(VIDEO), INVALID, "BAD_EMBEDDING"),
    "rows of a video: too many times": (
        lambda: embedding(VIDEO, timestamps=[0, 1], seconds_per_grid=1),
        INVALID,
        "BAD_EMBEDDING",
    ),
    "rows of a video: a time that is no number": (
        lambda: embedding(VIDEO, timestamps=[NAN], seconds_per_grid=1),
        INVALID,
        "BAD_EMBEDDING",
    ),
    "rows of a video: no step": (lambda: embedding(VIDEO, timestamps=[0]), INVALID, "BAD_EMBEDDING"),
    "rows of a video: backwards": (
        lambda: embedding(VIDEO, grid=media_pb2.Grid(t=2, h=2, w=4), timestamps=[1, 0], seconds_per_grid=1),
        INVALID,
        "BAD_EMBEDDING",
    ),
    "rows of a picture with times": (lambda: embedding(timestamps=[0], seconds_per_grid=1), INVALID, "BAD_EMBEDDING"),
    "rows of a picture with two frame groups": (
        lambda: embedding(grid=media_pb2.Grid(t=2, h=2, w=4)),
        INVALID,
        "BAD_EMBEDDING",
    ),
    "rows: too few bytes": (lambda: embedding(data=bytes(4 * 64 * 4 - 1)), INVALID, "BAD_EMBEDDING"),
    "rows: no type": (lambda: embedding(dtype=0), INVALID, "BAD_EMBEDDING"),
    "rows: another type": (lambda: embedding(dtype=media_pb2.DATA_TYPE_FLOAT16), INVALID, "BAD_EMBEDDING"),
    "rows: another width": (lambda: embedding(width=32, count=8), INVALID, "BAD_EMBEDDING"),
    "rows: other levels": (lambda: embedding(levels=4, count=1), INVALID, "BAD_EMBEDDING"),
    "rows: another count": (lambda: embedding(count=5, data=bytes(5 * 64 * 4)), INVALID, "BAD_EMBEDDING"),
    "rows: a negative count": (lambda: embedding(count=-4), INVALID, "BAD_EMBEDDING"),
    "rows: no grid": (lambda: embedding(grid=media_pb2.Grid()), INVALID, "BAD_EMBEDDING"),
    "rows: a negative grid": (lambda: embedding(grid=media_pb2.Grid(t=1, h=-4, w=-4)), INVALID, "BAD_EMBEDDING"),
    "rows: a grid that overflows": (
        lambda: embedding(grid=media_pb2.Grid(t=1, h=1 << 30, w=1 << 30)),
        INVALID,
        "BAD_EMBEDDING",
    ),
    "rows: not numbers": (
        lambda: embedding(grid=media_pb2.Grid(t=1, h=2, w=8), count=4, data=np.full(256, NAN, "<f4").tobytes()),
        INVALID,
        "BAD_EMBEDDING",
    ),
    "rows: infinite": (lambda: embedding(data=np.full(256, np.inf, "<f4").tobytes()), INVALID, "BAD_EMBEDDING"),
    "rows with options": (
        lambda: media_pb2.Media(
            modality=IMAGE, embedding=embedding().embedding, options=media_pb2.MediaOptions(max_pixels=9999)
        ),
        INVALID,
        "BAD_OPTION",
    ),
    "a short key": (lambda: media_pb2.Media(modality=IMAGE, key=b"abc"), INVALID, "BAD_KEY"),
    "a key that is not here": (lambda: media_pb2.Media(modality=IMAGE, key=b"k" * 32), NOT_FOUND, "KEY_NOT_FOUND"),
    "a key with options": (
        lambda: media_pb2.Media(modality=IMAGE, key=b"k" * 32, options=media_pb2.MediaOptions(max_pixels=9999)),
        INVALID,
        "BAD_OPTION",
    ),
    "pixels: too few bytes": (lambda: pixels(height=57), INVALID, "BAD_PIXELS"),
    "pixels: a negative side": (lambda: pixels(height=-56, width=-56), INVALID, "BAD_PIXELS"),
    "pixels: overflow": (lambda: pixels(frames=1 << 30, height=1 << 30, width=1 << 30), INVALID, "BAD_PIXELS"),
    "pixels: two frames of a picture": (lambda: pixels(frames=2, height=28), INVALID, "BAD_PIXELS"),
    "pixels: times that are not numbers": (lambda: pixels(VIDEO, timestamps=[NAN]), INVALID, "BAD_PIXELS"),
    "pixels: too many times": (lambda: pixels(VIDEO, timestamps=[0, 1]), INVALID, "BAD_PIXELS"),
    "pixels: too small": (lambda: pixels(height=1, width=1, data=b"abc"), INVALID, "IMAGE_TOO_SMALL"),
    **{
        url: (lambda url=url: media_pb2.Media(modality=IMAGE, url=url), FORBIDDEN, "FETCH_FORBIDDEN")
        for url in (
            "https://example.com/a.png",
            "http://127.0.0.1/a.png",
            "http://[::1]/a.png",
            "http://2130706433/a.png",
            "http://0x7f.1/",
            "http://169.254.169.254/latest/meta-data",
            "file:///etc/passwd",
            "http://localhost:22/",
            "http://10.0.0.1/",
            "http://[::ffff:10.0.0.1]/",
            "http://[64:ff9b::7f00:1]/",
            "http://0177.0.0.1/",
        )
    },
    **{
        f"address {url!r}": (lambda url=url: media_pb2.Media(modality=IMAGE, url=url), INVALID, "BAD_URL")
        for url in (
            "",
            "ftp://example.com/a.png",
            "http://user@example.com/a.png",
            "http://example.com\\@127.0.0.1/a.png",
            "http://example.com/a\r\nb",
        )
    },
    "a data address that is not base64": (
        lambda: media_pb2.Media(modality=IMAGE, url="data:image/png;base64,@@"),
        INVALID,
        "BAD_BASE64",
    ),
    "a data address of another type": (
        lambda: media_pb2.Media(modality=IMAGE, url=as_data_url(good().data, "image/jpeg")),
        INVALID,
        "MIME_MISMATCH",
    ),
    "a known key without a url": (lambda: good(known_key=b"k" * 32), INVALID, "BAD_OPTION"),
    "a short known key": (
        lambda: media_pb2.Media(modality=IMAGE, url="http://example.com/", known_key=b"k"),
        INVALID,
        "BAD_KEY",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_media_is_refused_and_nothing_else_changes(client, service, name):
    make, code, reason = BAD[name]
    found = client.one(make())
    assert found.error is not None
    assert (found.error.code, found.error.reason or reason) == (code, reason or found.error.reason)
    assert found.error.field.startswith("items[0]")
    _says_nothing_of_the_host(found.error.message)
    _still_right(client)
    assert service.process.poll() is None


def test_a_bad_item_leaves_its_neighbours_alone(client):
    fine = pictures.encoded(pictures.noise(60, 60, next(_seed)))
    first, bad, last = client.encode(image(fine), image(b"junk"), image(fine))
    assert bad.error.code == INVALID
    assert bad.error.field.startswith("items[1]")
    assert np.array_equal(first.rows, last.rows)


def test_forbidden_addresses_all_get_one_text(client):
    urls = [make for make, code, _ in BAD.values() if code == FORBIDDEN]
    assert len(urls) > 10
    assert len({client.one(make()).error.message for make in urls}) == 1


def _upright(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return pictures.encoded(pictures.photograph("coffee").resize((120, 80)), "PNG", exif=exif)


def _palette() -> bytes:
    paletted = pictures.photograph("coffee").resize((120, 80)).quantize(32)
    return pictures.encoded(paletted, "PNG", transparency=3)


def _animation() -> bytes:
    frames = [pictures.photograph(name).resize((120, 80)).quantize(64) for name in ("coffee", "chelsea")]
    return pictures.encoded(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=100)


def _deep() -> bytes:
    grey = np.asarray(pictures.photograph("coffee").resize((120, 80)).convert("L")).astype(np.uint16)
    return pictures.encoded(Image.fromarray(grey * 256 + 17))


UNUSUAL: dict[str, Callable[[], bytes]] = {
    "CMYK": lambda: pictures.encoded(pictures.photograph("coffee").resize((120, 80)).convert("CMYK"), "JPEG"),
    "16-bit": _deep,
    "palette with transparency": _palette,
    "grey and alpha": lambda: pictures.encoded(pictures.photograph("coffee").resize((120, 80)).convert("LA")),
    "colour and alpha": lambda: pictures.encoded(pictures.photograph("coffee").resize((120, 80)).convert("RGBA")),
    "bilevel": lambda: pictures.encoded(pictures.photograph("coffee").resize((120, 80)).convert("1")),
    "animation": _animation,
    "BMP": lambda: pictures.encoded(pictures.photograph("coffee").resize((120, 80)), "BMP"),
    "WebP": lambda: pictures.encoded(pictures.photograph("coffee").resize((120, 80)), "WEBP"),
    "progressive JPEG": lambda: pictures.encoded(
        pictures.photograph("coffee").resize((120, 80)), "JPEG", progressive=True
    ),
    **{f"orientation {number}": (lambda number=number: _upright(number)) for number in range(1, 9)},
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_pictures_give_the_rows_of_what_they_show(client, name):
    data = UNUSUAL[name]()
    shown = _shown(data, grey16=name == "16-bit")
    ours, plain = client.encode(image(data), image(pictures.encoded(shown)))
    assert ours.error is None
    assert ours.header.grid == plain.header.grid
    assert np.array_equal(ours.rows, plain.rows)


@pytest.mark.parametrize("container", ["mp4", "mov", "matroska", "avi", "mpegts"])
def test_every_usual_container_is_read(client, container):
    codec = "mpeg2video" if container == "mpegts" else "mpeg4"
    found = client.one(video(pictures.video(pictures.frames(20), 25, container, codec)))
    assert found.error is None
    assert (found.header.grid.t, len(found.rows)) == (2, found.header.tokens)


def _shown(data: bytes, *, grey16: bool) -> Image.Image:
    """The picture as the library loads it: upright, RGB; of 16-bit grey, the upper byte."""
    from PIL import ImageOps

    picture = Image.open(io.BytesIO(data))
    if grey16:
        return Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8)).convert("RGB")
    return ImageOps.exif_transpose(picture).convert("RGB")


def test_calls_that_ask_for_nothing_or_too_much_are_refused(client):
    def code_of(items: list[media_pb2.Media], **fields: object) -> grpc.StatusCode:
        with pytest.raises(grpc.RpcError) as refused:
            list(client.start(items, **fields))
        _says_nothing_of_the_host(refused.value.details())
        return refused.value.code()

    assert code_of([]) is grpc.StatusCode.INVALID_ARGUMENT
    assert code_of([good()] * 17) is grpc.StatusCode.INVALID_ARGUMENT
    assert code_of([video(b"x")] * 3) is grpc.StatusCode.INVALID_ARGUMENT
    assert code_of([good()], request_id="x" * 129) is grpc.StatusCode.INVALID_ARGUMENT
    assert code_of([good()], cache_salt="x" * 129) is grpc.StatusCode.INVALID_ARGUMENT
    assert code_of([good()], accepts=[2, 3]) is grpc.StatusCode.FAILED_PRECONDITION
    assert code_of([good()], timeout=0.000001) is grpc.StatusCode.DEADLINE_EXCEEDED
    _still_right(client)


def _still_right(client: Client) -> None:
    """A new picture gets its rows, which are what another request for its pixels gets."""
    picture = pictures.noise(40, 60, next(_seed))
    block = PIXELS(data=np.asarray(picture).tobytes(), frames=1, height=60, width=40)
    ours, same = client.encode(image(pictures.encoded(picture)), media_pb2.Media(modality=IMAGE, pixels=block))
    assert ours.error is None
    assert ours.header.tokens == len(ours.rows) > 0
    assert np.isfinite(ours.rows).all()
    assert np.array_equal(ours.rows, same.rows)


def _says_nothing_of_the_host(text: str) -> None:
    assert text
    assert not re.search(r"/\w+/|\w+\.py|0x[0-9a-f]{6,}|Error|Exception|Traceback|PIL|decord|torch", text), text
