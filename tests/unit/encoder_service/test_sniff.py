"""What a caller reads whose bytes are no file of the kind that was said: what they are, and which formats are taken."""

from __future__ import annotations

import base64
from collections.abc import Mapping

import pytest

from common.errors import InvalidInput
from encoder_service.media.sniff import AUDIOS, IMAGES, VIDEOS, Format, check
from tests import pictures

LAST = ", TIFF or HEIF" if "HEIF" in IMAGES else " or TIFF"
TAKEN = {
    "image": f"an image is taken as JPEG, PNG, WebP, GIF, BMP, AVIF{LAST}",
    "video": "a video is taken as MP4, Matroska/WebM, AVI, FLV, pictures as frames or MPEG-TS",
    "audio": "audio is taken as WAV, MP3, FLAC, Ogg, MP4 or Matroska/WebM",
}
PNG = pictures.encoded(pictures.noise(8, 8))


def refusal(data: bytes, formats: Mapping[str, Format], modality: str, mime_type: str = "") -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        check(data, formats, modality, mime_type, "items[0].data")
    return caught.value


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"<!DOCTYPE html><html>", "HTML"),
        (b"\xef\xbb\xbf\n <HTML>", "HTML"),
        (b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>', "SVG"),
        (b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', "XML"),
        (b'{"error": "not found"}', "text"),
        (b"%PDF-1.7\n%\xe2\xe3", "PDF"),
        (b"II+\0\x08\0\0\0", "BigTIFF"),
        (b"MM\0+\0\x08\0\0", "BigTIFF"),
        (b"\0\0\0\x18ftyphevc\0\0\0\0msf1hevc", "HEIF"),
        (b"\0\0\0\x0cJXL \r\n\x87\n", "JPEG XL"),
        (b"\xff\x0a\x00\x01", "JPEG XL"),
        (b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG 2000"),
        (b"\0\0\1\0\1\0", "ICO"),
        (b"8BPS\0\1", "PSD"),
        (b"PK\3\4", "ZIP"),
        (b"\x1f\x8b\x08", "gzip"),
        (base64.b64encode(PNG), "base64, as if packed twice"),
        (b"data:image/png;base64,iVBORw0KGgo=", "a data address, as if packed twice"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "a pointer of Git LFS"),
        (b"#EXTM3U\nfile:///etc/passwd\n", "text"),
        (pictures.video(pictures.frames(2)), "a video (MP4)"),
        (b"RIFF\0\0\0\0WAVEfmt ", "audio (WAV)"),
    ],
)
def test_what_was_found_is_told_with_what_is_taken(data: bytes, found: str) -> None:
    said = refusal(data, IMAGES, "image")
    assert said.message == f"the bytes are {found}; {TAKEN['image']}"
    assert (said.reason, said.field) == ("MEDIA_FORMAT", "items[0].data")


@pytest.mark.parametrize("data", [b"\x07\x93\x00\x01" * 99, b"caf\xe9 \x00"])
def test_bytes_of_no_format_that_is_known_are_that(data: bytes) -> None:
    assert refusal(data, IMAGES, "image").message == f"the bytes are of no format that is known; {TAKEN['image']}"


def test_each_modality_names_its_own() -> None:
    gif = pictures.encoded(pictures.noise(8, 8), "GIF")
    assert refusal(gif, VIDEOS, "video").message == f"the bytes are an image (GIF); {TAKEN['video']}"
    assert refusal(PNG, AUDIOS, "audio").message == f"the bytes are an image (PNG); {TAKEN['audio']}"


def test_a_type_that_is_not_that_of_the_bytes_is_refused_with_what_they_are() -> None:
    said = refusal(PNG, IMAGES, "image", "image/jpeg")
    assert (said.message, said.field) == (
        "the MIME type is not that of the bytes, which are PNG",
        "items[0].data.mime_type",
    )


def test_nothing_of_the_bytes_themselves_is_told() -> None:
    """They may come from an address, and be what its host tells nobody else."""
    said = refusal(b"password=hunter2", IMAGES, "image").message + refusal(b"<html>hunter2", VIDEOS, "video").message
    assert "hunter2" not in said
