"""The modalities, one row each, with everything that differs between their files. How a model processes their items,
and whether it takes them, is up to its family (`families.family.Processor`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from common.media.item import Modality, Options
from encoder_service.item import Inspection
from encoder_service.media import sniff
from encoder_service.media.limits import MediaLimits, check_picture, check_sound, check_video

_LONG_SOUND = 1 << 20
"""Bytes of a minute of MP3, which is decoded in 0.2 s; ten minutes of sound take up to 3 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModalitySpec:
    """How items of one modality are recognised, bounded and decoded; `common.media.item.HEADER_SHAPES` has the rest.

    `formats` are accepted. `options` are the options that apply. `has_pixels`: a caller may have decoded it. Files of
    `slow_bytes` or more take long, even to inspect, so they never get all decode processes at once. If there are such
    files, a file opened for inspection stays open for decoding.

    `max_items`, `max_bytes`, `max_area` (pixels of all frames) and `max_frames` name its limits; `too_large` is the
    reason for exceeding them. `check` checks a file's header, before anything else is done with it.

    `decoder` is the class ("module:Class") that reads its files in the decode processes (`__main__.OpenFile`),
    `sound_decoder` the one that reads their sound as well.
    """

    formats: Mapping[str, sniff.Format]
    options: frozenset[str]
    has_pixels: bool
    slow_bytes: float
    max_items: Callable[[MediaLimits], int]
    max_bytes: Callable[[MediaLimits], int]
    max_area: Callable[[MediaLimits], int]
    max_frames: Callable[[MediaLimits], int]
    too_large: str
    check: Callable[[Inspection, str, MediaLimits], None]
    decoder: str
    sound_decoder: str = ""

    @property
    def decoders(self) -> set[str]:
        """All of these classes."""
        return {self.decoder, self.sound_decoder} - {""}


SPECS: dict[Modality, ModalitySpec] = {
    Modality.IMAGE: ModalitySpec(
        formats=sniff.IMAGES,
        options=frozenset(("min_pixels", "max_pixels", "clamp_max_pixels")),
        has_pixels=True,
        slow_bytes=math.inf,
        max_items=lambda limits: limits.max_images,
        max_bytes=lambda limits: limits.max_image_bytes,
        max_area=lambda limits: limits.max_image_area,
        max_frames=lambda _: 1,
        too_large="IMAGE_TOO_LARGE",
        check=check_picture,
        decoder="encoder_service.media.image:ImageFile",
    ),
    Modality.VIDEO: ModalitySpec(
        formats=sniff.VIDEOS,
        options=frozenset(Options.__dataclass_fields__) - {"clamp_max_pixels"},
        has_pixels=True,
        slow_bytes=0,
        max_items=lambda limits: limits.max_videos,
        max_bytes=lambda limits: limits.max_video_bytes,
        max_area=lambda limits: limits.max_video_area,
        max_frames=lambda limits: limits.max_frames,
        too_large="VIDEO_TOO_LARGE",
        check=check_video,
        decoder="encoder_service.media.video:VideoFile",
        sound_decoder="encoder_service.media.video_sound:SoundingVideoFile",
    ),
    Modality.AUDIO: ModalitySpec(
        formats=sniff.AUDIOS,
        options=frozenset(),
        has_pixels=False,
        slow_bytes=_LONG_SOUND,
        max_items=lambda limits: limits.max_audios,
        max_bytes=lambda limits: limits.max_audio_bytes,
        max_area=lambda _: 0,
        max_frames=lambda _: 1,
        too_large="AUDIO_TOO_LARGE",
        check=check_sound,
        decoder="encoder_service.media.audio:AudioFile",
    ),
}
