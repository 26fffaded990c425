"""Which media a transformers model takes, which tokens its rows go to, and how many there are."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from common.hf.classes import config_of, layers_of_levels
from common.hf.features import features_of
from common.hf.positions import SOUND_IN_VIDEO
from common.hf.processors import (
    Clip,
    Sound,
    frames_of,
    processor_of,
    rate_of,
    replaced,
)


def together_of(processor: Any) -> tuple[int, ...]:
    """The tokens that a processor says are a picture's, marks around rows among them."""
    return tuple(id for id in getattr(processor, "image_token_ids", None) or () if id is not None)


_BLANK_FRAMES, _BLANK_SIDES = 64, (48, 64)
_FEW_FRAMES, _LARGE_SIDES = 8, (160, 224)
_BLANK_RATE = 8.0


def takes_videos(model: Any, processor: Any) -> bool:
    """Whether the processor tells the layout of a video by its size alone, and the model has a tower for videos, all of
    whose rows go into the prompt."""
    if not isinstance(getattr(processor, "video_token", None), str) or not getattr(processor, "video_processor", None):
        return False
    if getattr(model.config, "video_pruning_rate", None):  # its forward leaves rows out that say little new
        return False
    try:
        numbers = tuple(frames_of(processor, _BLANK_FRAMES, _BLANK_RATE))
        frames = np.zeros((len(numbers), *_BLANK_SIDES, 3), np.uint8)
        text = replaced(processor, "video", Clip(frames, numbers, _BLANK_FRAMES, _BLANK_RATE).given())
        row_tokens(model.config, processor, "video", text)
        black = np.zeros((_FEW_FRAMES, *_LARGE_SIDES, 3), np.uint8)
        noise = np.random.default_rng(0).integers(0, 256, black.shape, dtype=np.uint8)
        clips = [Clip(frames, tuple(range(_FEW_FRAMES)), _FEW_FRAMES, _BLANK_RATE) for frames in (black, noise)]
        one, other = (replaced(processor, "video", clip.given()) for clip in clips)
        if one != other:  # its content decides how many rows it has, as in VideoLLaMA 3
            return False
    except (AttributeError, ImportError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        return False
    return features_of(model.base_model, "video") is not None


def takes_sounds(model: Any, processor: Any) -> bool:
    """Whether the processor tells the layout of a sound, the model has a tower for sounds, and media tokens do not see
    each other in its text, as configured. If it distinguishes modalities there, a trial must show that this does not
    matter for sounds."""
    if not isinstance(getattr(processor, "audio_token", None), str) or features_of(model.base_model, "audio") is None:
        return False
    if getattr(model.config, "audio_config", "") is None:  # one of several sizes, without a tower for sounds
        return False
    text = model.config.get_text_config(decoder=True)
    if tells_apart(model) and getattr(text, "use_bidirectional_attention", None):
        return False
    try:
        text = replaced(processor, "audio", Sound(np.zeros(rate_of(processor), np.float32)).given())
        row_tokens(model.config, processor, "audio", text)
    except (AttributeError, ImportError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        return False
    return True


def tells_apart(model: Any) -> bool:
    """Whether a model is told the modality of each prompt token."""
    return any("token_type_ids" in name for name in inspect.signature(model.forward).parameters)


def takes_video_sound(model: Any, processor: Any) -> bool:
    """Whether the processor puts a video's sound between its frames, and the model's own rule of positions, if it has
    one, supports that."""
    base = model.base_model
    if hasattr(base, "get_rope_index") and SOUND_IN_VIDEO not in inspect.signature(base.get_rope_index).parameters:
        return False
    frames, silence = np.zeros((_FEW_FRAMES, *_BLANK_SIDES, 3), np.uint8), np.zeros(rate_of(processor), np.float32)
    clip = Clip(frames, tuple(range(_FEW_FRAMES)), _FEW_FRAMES, _BLANK_RATE, silence)
    try:
        text = replaced(processor, "video", clip.given())
        tokens = [row_tokens(model.config, processor, kind, text) for kind in ("video", "audio")]
    except (AttributeError, ImportError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        return False
    return tokens[0] != tokens[1]


def row_tokens(config: Any, processor: Any, modality: str, replacement: str) -> dict[str, int]:
    """The tokens at whose places rows go in an item's layout, by name: some models have one for all modalities, some
    have marks whose rows also come from the tower. Raises ValueError if there is none."""
    name = processor.tokenizer.convert_ids_to_tokens
    for kind in dict.fromkeys((modality, "image")):
        token = getattr(config, f"{kind}_token_id", None)
        if token is not None and str(name(token)) in replacement:
            return {str(name(each)): int(each) for each in (token, *marks_of(config))}
    raise ValueError(f"nothing in what stands for a {modality} takes rows")


def longest_run(folder: Path, *, with_marks: bool = False) -> int:
    """Rows of the longest run of a picture, or of a video frame, in a prompt: the most over blank pictures of many
    shapes, and at least what the processor states. With marks: tokens of a whole layout. Raises CheckpointError if
    there is no processor."""
    config, processor = config_of(folder), processor_of(folder)
    found = [0]
    for sides in _SHAPES:
        frames = np.zeros((2, *sides, 3), np.uint8)
        clip = Clip(frames, (0, 1), len(frames), _BLANK_RATE).given()
        for modality, shown in (("image", {"images": [Image.fromarray(frames[0])]}), ("video", clip)):
            try:
                text = replaced(processor, modality, shown)
                tokens = row_tokens(config, processor, modality, text)
            except (AttributeError, ImportError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
                continue  # it takes none of this shape, or modality
            if with_marks:
                found.append(len(processor.tokenizer(text, add_special_tokens=False)["input_ids"]))
                continue
            run = f"(?:{'|'.join(map(re.escape, tokens))})"
            found += [len(re.findall(run, each[0])) for each in re.finditer(f"{run}+", text)]
    parts = (getattr(processor, f"{kind}_processor", None) for kind in ("image", "video"))
    return max(*found, *(int(getattr(part, _STATED_ROWS, 0) or 0) for part in parts))


_SHAPES = [(side, other) for side in (224, 672, 1568) for other in (224, 672, 1568)]
_STATED_ROWS = "max_soft_tokens"
"""A processor's attribute: the most rows of a picture, which only pictures of some shapes have."""


def marks_of(config: Any) -> list[int]:
    """Tokens around a picture whose rows come from its tower, in the tower's order."""
    return list(getattr(config, "visual_indicator_token_ids", None) or ())


def makes_tokens(base: Any) -> bool:
    """Whether a model turns a picture into tokens, whose rows are in its token table."""
    return hasattr(base, "get_image_tokens")


def row_token(config: Any) -> int:
    """The token at whose places a picture's rows go, or a sound's if the model takes no pictures."""
    found = getattr(config, "image_token_id", None)
    return int(config.audio_token_id if found is None else found)


def level_count(config: Any) -> int:
    """Levels of a row: those beyond the first are for the first layers of the text, or all are for certain layers."""
    if layers := layers_of_levels(config):
        return len(layers)
    return 1 + len(getattr(getattr(config, "vision_config", None), "deepstack_visual_indexes", None) or ())
