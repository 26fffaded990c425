"""The flags of commands for what a model sees: a text, and media in the order of the command line."""

from __future__ import annotations

import argparse
import sys
from functools import partial

from twinlens.prompts import audio, image, system, user, video
from twinlens.v1 import ChatMessage, Media

_PREPROCESSING = {
    "min_pixels": ("image", "video"),
    "max_pixels": ("image", "video"),
    "fps": ("video",),
    "max_frames": ("video",),
    "video_pruning_rate": ("video",),
    "with_sound": ("video",),
}
"""Options, and the kinds of items that each is for."""


def add_media_flags(parser: argparse.ArgumentParser) -> None:
    """Adds flags for media and an instruction."""
    for kind, what in (("image", "an image"), ("video", "a video"), ("audio", "a sound clip")):
        parser.add_argument(
            f"--{kind}",
            dest="media",  # one list for all, so that their order on the command line is kept
            type=partial(_named, kind),
            action="append",
            default=[],
            metavar="F",
            help=f"{what}: a file, or an http(s) address; repeatable",
        )
    parser.add_argument("--system", metavar="TEXT", help="an instruction before the conversation")


def add_preprocessing_flags(parser: argparse.ArgumentParser) -> None:
    """Adds flags for preprocessing media."""
    group = parser.add_argument_group("preprocessing")
    group.add_argument(
        "--min-pixels", type=int, metavar="N", help="least area after resizing; for a video, of all frames"
    )
    group.add_argument("--max-pixels", type=int, metavar="N", help="greatest area, likewise")
    group.add_argument("--fps", type=float, metavar="R", help="frames taken of each second of video")
    group.add_argument("--max-frames", type=int, metavar="N", help="the most frames taken of a video")
    pruning = "share of a video's rows to drop, 0 to below 1: those that change least from frame to frame"
    group.add_argument("--video-pruning-rate", type=float, metavar="R", help=pruning)
    sound = "a video's own sound goes with its frames"
    group.add_argument("--with-sound", action="store_const", const=True, help=sound)


def conversation(text: str | None, arguments: argparse.Namespace) -> list[ChatMessage]:
    """The messages that a command means: media, then the text; -: standard input, None: no text. Raises ValueError for
    an option that nothing given could obey."""
    _check_preprocessing(arguments)
    said = _read_standard_input() if text == "-" else text
    messages = [system(arguments.system)] if arguments.system else []
    media = [_media(kind, source, arguments) for kind, source in arguments.media]
    return [*messages, user(*media, *([] if said is None else [said]))]


def _named(kind: str, source: str) -> tuple[str, str]:
    return kind, source


def _read_standard_input() -> str:
    if sys.stdin is None:
        raise ValueError("there is no standard input to read from")
    return sys.stdin.read()


def _check_preprocessing(arguments: argparse.Namespace) -> None:
    given = {kind for kind, _ in arguments.media}
    for name, kinds in _PREPROCESSING.items():
        if getattr(arguments, name) is not None and given.isdisjoint(kinds):
            raise ValueError(f"--{name.replace('_', '-')} needs {' or '.join(f'--{kind}' for kind in kinds)}")


def _media(kind: str, source: str, arguments: argparse.Namespace) -> Media:
    if kind == "audio":
        return audio(source)
    if kind == "image":
        return image(source, min_pixels=arguments.min_pixels, max_pixels=arguments.max_pixels)
    return video(
        source,
        fps=arguments.fps,
        max_frames=arguments.max_frames,
        min_pixels=arguments.min_pixels,
        max_pixels=arguments.max_pixels,
        pruning_rate=arguments.video_pruning_rate,
        with_sound=bool(arguments.with_sound),
    )
