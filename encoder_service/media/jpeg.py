"""JPEGs in the decode process: decoded as Pillow does, but only where the file holds all of the picture.

The library that Pillow decodes with shows grey where a file ends too soon, and tells nobody. It is asked in another
way: it gets the file without its end mark, and then bytes that no picture needs. A decoder that has all of its picture
passes over them; one that lacks some takes them for the rest of it.
"""

from __future__ import annotations

from PIL import Image, ImageFile

from encoder_service.media.chunks import JpegLayout

_ONES = b"\xff\x00"
"""Eight bits that are set, as they stand in entropy-coded data. No code has ones alone, so that even an empty block
takes more than one such byte; behind the data, it is nothing at all."""
_AHEAD = 8
"""How many of them a decoder may read ahead of what it needs: as many as its buffer of 64 bits holds."""
_STEPS = 16
_END = b"\xff\xd9"


def load(image: ImageFile.ImageFile, data: bytes, layout: JpegLayout) -> None:
    """Decodes the pixels of an opened JPEG. Raises ValueError where the file does not hold all of them, and OSError
    where they cannot be read.

    Arithmetic coding, which may end anywhere, is read as Pillow does.
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

    def __init__(self, image: ImageFile.ImageFile) -> None:
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
