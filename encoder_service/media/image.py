"""Pictures in the decode process: Pillow, held to the formats that were named by their first bytes."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from PIL import AvifImagePlugin, Image, UnidentifiedImageError
from PIL.ImageFile import ImageFile as PillowFile

from encoder_service.item import Inspection
from encoder_service.media import chunks, heif, tiff
from encoder_service.media.chunks import JpegLayout
from encoder_service.media.complexity import UnusualKind
from encoder_service.media.messages import Bounds, DecoderSettings
from encoder_service.media.sniff import IMAGES, format_of

Image.MAX_IMAGE_PIXELS = None  # dimensions are checked against our own limits before anything is decoded

_ORIENTATION = 0x0112
_TO_UPRIGHT: Final[dict[object, Image.Transpose]] = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What is done to a picture of each EXIF orientation; of 1, and of what is none, nothing."""
_SIDEWAYS = (5, 6, 7, 8)
_WORDS = (b"eXIf", b"iTXt", b"tEXt", b"zTXt")

_ONES = b"\xff\x00"
"""Eight bits that are set, as they stand in entropy-coded data. No code has ones alone, so that even an empty block
takes more than one such byte; behind the data, it is nothing at all."""
_AHEAD = 8
"""How many of them a decoder may read ahead of what it needs: as many as its buffer of 64 bits holds."""
_STEPS = 16
_END = b"\xff\xd9"


class ImageFile:
    """A picture's file in the decode process (`__main__.OpenFile`)."""

    def __init__(self, data: bytes, settings: DecoderSettings) -> None:
        self._data = data
        self._bounds = settings.bounds

    @staticmethod
    def prepare() -> None:
        """Loads all that Pillow would otherwise load when it first meets a format. An AVIF is decoded by one thread."""
        Image.init()
        AvifImagePlugin.DEFAULT_MAX_THREADS = 1
        if "HEIF" in IMAGES:
            heif.register()

    def inspect(self) -> Inspection:
        return inspect(self._data, self._bounds)

    def decode(self, _: Sequence[int], out: np.ndarray) -> Iterator[int]:
        decode(self._data, out, self._bounds)
        return iter(())  # all of it is there at once


def inspect(data: bytes, bounds: Bounds) -> Inspection:
    """A picture's dimensions once its EXIF orientation is applied; pixels are decoded only where it stands behind them.

    Of a picture of more pixels than are taken, the dimensions come back as they stand in the file. Raises TooComplex
    and UnusualKind.
    """
    with _open(data, bounds) as image:
        width, height = image.size
        if width * height <= bounds.image_area and _orientation(image, data, bounds) in _SIDEWAYS:
            width, height = height, width
    return Inspection(width=width, height=height)


def decode(data: bytes, out: np.ndarray, bounds: Bounds) -> None:
    """Writes the picture, upright and as RGB, into `out`, [1, height, width, 3] uint8.

    Of an animation the first frame is taken, and of a TIFF the first page. Raises ValueError where the size is not the
    one that was announced, or pixels are missing, and TooComplex and UnusualKind.
    """
    name = format_of(data[:512], IMAGES)
    if name == "PNG":
        with _open(data, bounds) as image:
            image.verify()  # reading its pixels would not look at every checksum
    page = tiff.first_page(data, bounds) if name == "TIFF" else None
    if page is not None:
        page.check_whole()
    with _open(data, bounds) as image:
        if name == "JPEG":
            _load_jpeg(image, data, chunks.read_jpeg(data, bounds))
        orientation = image.getexif().get(_ORIENTATION) if page is None else page.orientation
        upright = _rgb(_upright(image, orientation), inverted=page is not None and page.is_inverted)
    if (upright.height, upright.width) != out.shape[1:3]:
        raise ValueError("the picture's size changed while it was decoded")
    out[0] = np.asarray(upright)


def _upright(image: PillowFile, orientation: object) -> Image.Image:
    """A picture with its orientation applied. The library's own way writes the rest of the EXIF anew, and fails at a
    tag that it can read and cannot write."""
    method = _TO_UPRIGHT.get(orientation)
    return image if method is None else image.transpose(method)


def _orientation(image: Image.Image, data: bytes, bounds: Bounds) -> Any:
    if image.format == "TIFF":
        return tiff.first_page(data, bounds).orientation
    if image.format == "PNG" and not _has_late_words(data):
        return Image.Image.getexif(image).get(_ORIENTATION)  # the PNG class would decode all pixels first
    return image.getexif().get(_ORIENTATION)


def _has_late_words(data: bytes) -> bool:
    """A PNG has metadata behind its pixels."""
    kinds = chunks.png_chunks(data)
    return b"IDAT" in kinds and any(kind in _WORDS for kind in kinds)


def _rgb(image: Image.Image, *, inverted: bool) -> Image.Image:
    """An image as RGB; what is transparent shows white behind it, as browsers have it, and those who serve such models.

    Of 16-bit grey, which may be `inverted`, the upper byte is kept: Pillow alone would show all but the darkest 256
    values as white.
    """
    if image.mode.startswith("I;16"):
        upper = (np.asarray(image) >> 8).astype(np.uint8)
        image = Image.fromarray(~upper if inverted else upper)
    if not image.has_transparency_data:
        return image.convert("RGB")
    shown, whole = image.convert("RGBA"), Image.new("RGB", image.size, "white")
    whole.paste(shown, mask=shown.getchannel("A"))
    return whole


def _open(data: bytes, bounds: Bounds) -> PillowFile:
    name = format_of(data[:512], IMAGES)
    if name is None:
        raise ValueError("not a picture of a supported format")
    chunks.check(data, name, bounds)
    if name != "TIFF":
        return Image.open(io.BytesIO(data), formats=[name])
    try:
        return Image.open(io.BytesIO(tiff.first_page(data, bounds).alone()), formats=[name])
    except UnidentifiedImageError as error:
        raise UnusualKind("a TIFF whose numbers the library does not know") from error


def _load_jpeg(image: PillowFile, data: bytes, layout: JpegLayout) -> None:
    """Decodes the pixels of an opened JPEG. Raises ValueError where the file does not hold all of them, and OSError
    where they cannot be read.

    The library that Pillow decodes with shows grey where a file ends too soon, and tells nobody. So it gets the file
    without its end mark, and then bytes that no picture needs: a decoder that has all of its picture passes over them;
    one that lacks some takes them for the rest of it. Arithmetic coding, which may end anywhere, is read as
    Pillow does.
    """
    if layout.lacking:
        raise ValueError("a component of the picture has no scan")
    if layout.arithmetic:
        image.load()
        return
    feed = _Feed(image)
    feed(data[: layout.end] + _AHEAD * _ONES)
    if layout.by_scans:
        # The last scan's last block is either done, and all that follows is passed over, or a part of it is left, which
        # cannot be taken before there is more.
        for _ in range(_STEPS):
            if feed(_ONES):
                raise ValueError("the picture's last scan is cut off")
        feed(_END)
    if not feed.done:
        raise ValueError("the picture is cut off")
    image.tile = []  # it is loaded


class _Feed:
    """A decoder that is given its bytes by hand. `done` says that the picture is complete."""

    def __init__(self, image: PillowFile) -> None:
        codec, extents, _, settings = image.tile[0]
        image.load_prepare()
        self._decoder = Image._getdecoder(image.mode, codec, settings, image.decoderconfig)
        self._decoder.setimage(image.im, extents)
        self._rest = b""
        self.done = False

    def __call__(self, data: bytes) -> int:
        """Gives it more; returns how many bytes it could not take yet. Raises OSError where they cannot be read."""
        if self.done:
            return 0
        given = self._rest + data
        taken, error = self._decoder.decode(given)
        if error < 0:
            raise OSError("the picture is broken")
        self.done = taken < 0
        self._rest = b"" if self.done else given[taken:]
        return len(self._rest)
