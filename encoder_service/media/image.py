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
"""The transposition for each EXIF orientation; orientation 1 and invalid ones need none."""
_SIDEWAYS = (5, 6, 7, 8)
_WORDS = (b"eXIf", b"iTXt", b"tEXt", b"zTXt")

_ONES = b"\xff\x00"
"""Set bits as they appear in entropy-coded data. No code consists of ones only, so even an empty block takes more than
one such byte; behind the data they mean nothing."""
_AHEAD = 8
"""How many of them a decoder may read in advance: as many as its 64-bit buffer holds."""
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
        return iter(())  # decoded all at once


def inspect(data: bytes, bounds: Bounds) -> Inspection:
    """A picture's dimensions after its EXIF orientation; pixels are decoded only if the orientation is stored behind
    them.

    For a picture with too many pixels, the stored dimensions are returned. Raises TooComplex and UnusualKind.
    """
    with _open(data, bounds) as image:
        width, height = image.size
        if width * height <= bounds.image_area and _orientation(image, data, bounds) in _SIDEWAYS:
            width, height = height, width
    return Inspection(width=width, height=height)


def decode(data: bytes, out: np.ndarray, bounds: Bounds) -> None:
    """Writes the picture, upright and as RGB, into `out`, [1, height, width, 3] uint8.

    Of an animation the first frame is taken, of a TIFF the first page. Raises ValueError if the size is not the
    announced one, or pixels are missing, and TooComplex and UnusualKind.
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
    """A picture with its orientation applied. Pillow's own function rewrites the rest of the EXIF, and fails for tags
    that it can read but not write."""
    method = _TO_UPRIGHT.get(orientation)
    return image if method is None else image.transpose(method)


def _orientation(image: Image.Image, data: bytes, bounds: Bounds) -> Any:
    if image.format == "TIFF":
        return tiff.first_page(data, bounds).orientation
    if image.format == "PNG" and not _has_late_words(data):
        return Image.Image.getexif(image).get(_ORIENTATION)  # the PNG class would decode all pixels first
    return image.getexif().get(_ORIENTATION)


def _has_late_words(data: bytes) -> bool:
    """Whether a PNG has metadata behind its pixels."""
    kinds = chunks.png_chunks(data)
    return b"IDAT" in kinds and any(kind in _WORDS for kind in kinds)


def _rgb(image: Image.Image, *, inverted: bool) -> Image.Image:
    """An image as RGB, with transparent parts on white, as in browsers and other servers of such models.

    The upper byte of 16-bit grey, which may be `inverted`, is kept: Pillow would show all but the darkest 256 values as
    white.
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
    """Decodes the pixels of an opened JPEG. Raises ValueError if the file does not hold all of them, and OSError if
    they cannot be read.

    Pillow's library silently shows grey if a file ends too soon. So it gets the file without its end mark, and then
    bytes that no picture needs: a decoder that has its whole picture skips them; one that lacks some takes them for the
    rest. Arithmetic coding, which may end anywhere, is read as Pillow does.
    """
    if layout.lacking:
        raise ValueError("a component of the picture has no scan")
    if layout.arithmetic:
        image.load()
        return
    feed = _Feed(image)
    feed(data[: layout.end] + _AHEAD * _ONES)
    if layout.by_scans:
        # Either the last scan's last block is complete, and everything after it is skipped, or a part of it is missing,
        # and more is needed.
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
        """Feeds more data; returns how many bytes it could not take yet. Raises OSError if they cannot be read."""
        if self.done:
            return 0
        given = self._rest + data
        taken, error = self._decoder.decode(given)
        if error < 0:
            raise OSError("the picture is broken")
        self.done = taken < 0
        self._rest = b"" if self.done else given[taken:]
        return len(self._rest)
