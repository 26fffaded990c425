"""Prompts for the comparison of models: texts, pictures, videos and sounds."""

from __future__ import annotations

import wave
from dataclasses import dataclass
from io import BytesIO

import numpy as np
from PIL import Image

from common.hf.processors import SOUND_RATE
from encoder_service.media.audio import read_track
from encoder_service.media.limits import MediaLimits
from tools.demo_media import film


@dataclass(frozen=True, slots=True)
class Film:
    """A video as a file, shown with its sound or without, and with so many frames of each second, or as the model has
    it."""

    file: bytes
    with_sound: bool = False
    fps: float | None = None

    def heard(self) -> np.ndarray:
        """Its sound, as `Tones.heard`."""
        found = read_track(self.file, MediaLimits().bounds)
        assert found is not None, "it has a track"
        return found[1]


@dataclass(frozen=True, slots=True)
class Tones:
    """A sound: samples [n] int16, `rate` of them a second."""

    samples: np.ndarray
    rate: int = SOUND_RATE

    def file(self) -> bytes:
        """As WAV."""
        out = BytesIO()
        with wave.open(out, "wb") as wav:
            wav.setnchannels(1)
            wav.setsampwidth(2)
            wav.setframerate(self.rate)
            wav.writeframes(self.samples.tobytes())
        return out.getvalue()

    def heard(self) -> np.ndarray:
        """What becomes of the file: float32, full scale is 1."""
        return self.samples.astype(np.float32) / 32768


Part = str | Image.Image | Film | Tones
Prompt = list[Part]


def picture(seed: int, width: int, height: int) -> Image.Image:
    """Coarse colours, so that two pictures differ in what can be seen of them."""
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def tones(seed: int, seconds: float) -> Tones:
    """A note a quarter of a second, each with overtones of its own, so that two sounds differ in what can be heard."""
    draw = np.random.default_rng(seed)
    at = np.arange(round(seconds * SOUND_RATE)) / SOUND_RATE
    pitch = draw.uniform(120, 900, (len(at) // 4000 + 1, 3))[np.arange(len(at)) // 4000]
    samples = np.sin(2 * np.pi * pitch * at[:, None]).mean(1) + draw.normal(0, 0.02, len(at))
    return Tones((12_000 * samples).astype(np.int16))


VIDEO = "a video"
SOUND = "a sound"
TWO_SOUNDS = "two sounds"
TWO = "two of different sizes"
PROMPTS: dict[str, Prompt] = {
    "text": ["Tell me about two red circles."],
    "one picture": [picture(1, 120, 90), "What is in the picture?"],
    TWO: ["Left: ", picture(2, 64, 150), " and right: ", picture(3, 200, 60), "\n\nWhich is red?"],
}


def film_prompt(fps: float | None = None) -> Prompt:
    """A question about a video, of which so many frames a second are shown, or as many as the model has it."""
    return ["First this: ", Film(film(), fps=fps), " What moves?"]


def sound_prompts() -> dict[str, Prompt]:
    """Questions about one sound, and about two of different length."""
    return {
        SOUND: [tones(1, 1.3), "What is said?"],
        TWO_SOUNDS: ["First: ", tones(2, 0.9), " then: ", tones(3, 1.9), " Which is higher?"],
    }


FILM_WITH_SOUND = "a video with its sound"


def sounding_film(seed: int, seconds: float, heard: float, rate: int = 8, fps: float | None = None) -> Film:
    """A video of so many seconds, with a sound of its own of `heard` seconds, and so many `fps` to be shown."""
    return Film(film(seconds, rate, tones(seed, heard).samples), with_sound=True, fps=fps)


def sounding_prompts() -> dict[str, Prompt]:
    """Questions about videos with their sound: alone, with texts around, beside a picture and another sound, and where
    there is more, or less, to be heard than seen."""
    return {
        FILM_WITH_SOUND: [sounding_film(4, 0.5, 0.6), "Tell me what you hear, and who says it."],
        "a video with more sound": ["See ", sounding_film(5, 0.25, 4.7), " and say: what moves?"],
        "two frames a second, and less sound": [
            "See ",
            sounding_film(6, 2.0, 0.8, fps=2.0),
            " and say: what is heard?",
        ],
        "a video with its sound in company": [
            *("First ", tones(7, 0.8), " then ", picture(7, 90, 60), " and "),
            *(sounding_film(8, 0.25, 2.1), " and again ", sounding_film(9, 0.5, 1.0, rate=4), "\n\nWhich is louder?"),
        ],
    }


def kind_of(part: Part) -> str:
    """Of what is no text: its modality, as transformers calls it."""
    return "video" if isinstance(part, Film) else "audio" if isinstance(part, Tones) else "image"
