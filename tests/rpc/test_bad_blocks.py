"""Pixels, rows and keys that contradict themselves, over real gRPC: refused, whatever was kept before."""

from __future__ import annotations

import numpy as np
import pytest

from tests.rpc.encoder_client import IMAGE, VIDEO, image
from tests.rpc.refusals import INFINITY, NAN, NOT_FOUND, Bad, good
from twinlens.v1 import media_pb2

Grid = media_pb2.Grid


def rows(modality: int = IMAGE, **fields: object) -> media_pb2.Media:
    """A picture's four rows for a model of width 64."""
    given = {
        "data": bytes(4 * 64 * 4),
        "dtype": media_pb2.DATA_TYPE_FLOAT32,
        "count": 4,
        "levels": 1,
        "width": 64,
        "grid": Grid(t=1, h=4, w=4),
        **fields,
    }
    return media_pb2.Media(modality=modality, embedding=media_pb2.EmbeddingBlock(**given))


def pixels(modality: int = IMAGE, **fields: object) -> media_pb2.Media:
    given = {"data": b"\0" * (56 * 56 * 3), "frames": 1, "height": 56, "width": 56, **fields}
    return media_pb2.Media(modality=modality, pixels=media_pb2.PixelBlock(**given))


def with_options(media: media_pb2.Media, **options: object) -> media_pb2.Media:
    media.options.MergeFrom(media_pb2.MediaOptions(**options))
    return media


def filled(value: float) -> bytes:
    data = np.ones(256, "<f4")
    data[200] = value
    return data.tobytes()


ROWS = {
    "too few bytes": {"data": bytes(4 * 64 * 4 - 1)},
    "too many bytes": {"data": bytes(4 * 64 * 4 + 4)},
    "no bytes": {"data": b""},
    "no type": {"dtype": 0},
    "a type that is not known": {"dtype": 77},
    "another type": {"dtype": media_pb2.DATA_TYPE_FLOAT16},
    "another width": {"width": 32, "count": 8},
    "a negative width": {"width": -64, "count": -4},
    "other levels": {"levels": 4, "count": 1},
    "another count": {"count": 5, "data": bytes(5 * 64 * 4)},
    "a count that the grid has not": {"count": 5},
    "a negative count": {"count": -4},
    "no grid": {"grid": Grid()},
    "a negative grid": {"grid": Grid(t=1, h=-4, w=-4)},
    "a grid of no whole squares": {"grid": Grid(t=1, h=3, w=5)},
    "a grid that overflows": {"grid": Grid(t=1, h=1 << 30, w=1 << 30)},
    "two frame groups of a picture": {"grid": Grid(t=2, h=2, w=4)},
    "times of a picture": {"timestamps": [0], "seconds_per_grid": 1},
    "a step of a picture": {"seconds_per_grid": 1},
    "not a number": {"data": filled(NAN)},
    "infinite": {"data": filled(INFINITY)},
    "infinite and negative": {"data": filled(-INFINITY)},
}
VIDEO_ROWS = {
    "no times": {},
    "too many times": {"timestamps": [0, 1], "seconds_per_grid": 1},
    "a time that is no number": {"timestamps": [NAN], "seconds_per_grid": 1},
    "a negative time": {"timestamps": [-1], "seconds_per_grid": 1},
    "no step": {"timestamps": [0]},
    "a step that is no number": {"timestamps": [0], "seconds_per_grid": NAN},
    "a time beyond all times": {"timestamps": [1e308], "seconds_per_grid": 1},
    "a step beyond all times": {"timestamps": [0], "seconds_per_grid": 1e308},
    "a negative step": {"timestamps": [0], "seconds_per_grid": -1},
    "backwards": {"grid": Grid(t=2, h=2, w=4), "timestamps": [1, 0], "seconds_per_grid": 1},
    "65 frame groups": {"grid": Grid(t=65, h=2, w=2), "count": 65, "data": bytes(65 * 256)},
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_a_picture_that_contradict_themselves_are_refused_though_good_ones_are_kept(strict, name):
    """The good ones have the same bytes wherever that can be: what is kept never stands for what is bad."""
    assert strict.client.one(rows()).error is None
    at = "embedding.dtype" if ROWS[name].get("dtype") in (0, 77) else "embedding"
    strict.refuses(Bad(lambda: rows(**ROWS[name]), "BAD_EMBEDDING", at))


@pytest.mark.parametrize("name", VIDEO_ROWS)
def test_rows_of_a_video_that_contradict_themselves_are_refused_though_good_ones_are_kept(strict, name):
    assert strict.client.one(rows(VIDEO, timestamps=[0], seconds_per_grid=1)).error is None
    strict.refuses(Bad(lambda: rows(VIDEO, **VIDEO_ROWS[name]), "BAD_EMBEDDING", "embedding"))


PIXELS = {
    "rows with a flood of times": Bad(
        lambda: rows(VIDEO, timestamps=[0.5] * 1_000_000, seconds_per_grid=1), "TOO_MANY_TIMES", "embedding"
    ),
    "too few bytes": Bad(lambda: pixels(height=57), "BAD_PIXELS", "pixels"),
    "no bytes": Bad(lambda: pixels(data=b""), "BAD_PIXELS", "pixels"),
    "no frames": Bad(lambda: pixels(frames=0), "BAD_PIXELS", "pixels"),
    "a negative side": Bad(lambda: pixels(height=-56, width=-56), "BAD_PIXELS", "pixels"),
    "overflow": Bad(lambda: pixels(frames=1 << 30, height=1 << 30, width=1 << 30), "BAD_PIXELS", "pixels"),
    "two frames of a picture": Bad(lambda: pixels(frames=2, height=28), "BAD_PIXELS", "pixels"),
    "65 frames": Bad(lambda: pixels(VIDEO, frames=65, data=bytes(65 * 9408)), "BAD_PIXELS", "pixels"),
    "times of a picture": Bad(lambda: pixels(timestamps=[0]), "BAD_PIXELS", "pixels"),
    "times that are no numbers": Bad(lambda: pixels(VIDEO, timestamps=[NAN]), "BAD_PIXELS", "pixels"),
    "negative times": Bad(lambda: pixels(VIDEO, timestamps=[-1]), "BAD_PIXELS", "pixels"),
    "too many times": Bad(lambda: pixels(VIDEO, timestamps=[0, 1]), "BAD_PIXELS", "pixels"),
    "a flood of times": Bad(lambda: pixels(VIDEO, timestamps=[0.5] * 1_000_000), "TOO_MANY_TIMES", "pixels"),
    "too small": Bad(lambda: pixels(height=1, width=1, data=b"abc"), "IMAGE_TOO_SMALL", "pixels"),
    "too narrow": Bad(lambda: pixels(height=4, width=1000, data=bytes(12000)), "IMAGE_RATIO", "pixels"),
    "a time beyond all times": Bad(lambda: pixels(VIDEO, timestamps=[1e308]), "VIDEO_TOO_LONG"),
    "frames with sound": Bad(lambda: with_options(pixels(VIDEO), with_sound=True), "BAD_OPTION", "options.with_sound"),
    "frames that are ages apart": Bad(lambda: with_options(pixels(VIDEO), fps=1e-300), "VIDEO_TOO_LONG"),
    "a choice of frames": Bad(lambda: with_options(pixels(VIDEO), max_frames=4), "BAD_OPTION", "options.max_frames"),
    "a rate for frames that have times": Bad(
        lambda: with_options(pixels(VIDEO, timestamps=[0]), fps=2), "BAD_OPTION", "options.fps"
    ),
}


@pytest.mark.parametrize("name", PIXELS)
def test_pixels_that_contradict_themselves_are_refused(strict, name):
    strict.refuses(PIXELS[name])


KEYS = {
    "a short key": Bad(lambda: media_pb2.Media(modality=IMAGE, key=b"abc"), "BAD_KEY", "key"),
    "an empty key": Bad(lambda: media_pb2.Media(modality=IMAGE, key=b""), "BAD_KEY", "key"),
    "a key that is not here": Bad(
        lambda: media_pb2.Media(modality=IMAGE, key=b"k" * 32), "KEY_NOT_FOUND", "key", NOT_FOUND
    ),
    "a key with options": Bad(
        lambda: with_options(media_pb2.Media(modality=IMAGE, key=b"k" * 32), max_pixels=9999), "BAD_OPTION", "options"
    ),
    "a key with a type": Bad(
        lambda: media_pb2.Media(modality=IMAGE, key=b"k" * 32, mime_type="image/png"), "BAD_OPTION", "mime_type"
    ),
    "rows with options": Bad(lambda: with_options(rows(), max_pixels=9999), "BAD_OPTION", "options"),
    "a known key without a url": Bad(lambda: good(known_key=b"k" * 32), "BAD_OPTION", "known_key"),
    "a short known key": Bad(
        lambda: media_pb2.Media(modality=IMAGE, url="http://example.com/", known_key=b"k"), "BAD_KEY", "known_key"
    ),
}


@pytest.mark.parametrize("name", KEYS)
def test_keys_and_what_goes_with_them(strict, name):
    strict.refuses(KEYS[name])


def test_an_option_of_zero_is_not_an_option_that_is_unset(strict):
    strict.refuses(Bad(lambda: image(good().data, min_pixels=0), "BAD_OPTION", "options.min_pixels"))
