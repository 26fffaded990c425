"""transformers' processors: what they make of media, and items' layouts in prompts."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from PIL import Image

from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from common.hf.classes import first_line, missing, transformers
from common.hf.description import PromptFrame
from common.hf.layouts import LAYOUTS, SEAM


def processor_of(folder: Path) -> Any:
    """The checkpoint's processor. Raises CheckpointError if it has none that tells the layout of a picture, or of a
    sound for models of sounds alone."""
    layout = LAYOUTS.get(str(Checkpoint(folder).config.get("model_type")))
    try:
        found = (
            layout(folder) if layout else transformers().AutoProcessor.from_pretrained(folder, local_files_only=True)
        )
    except ImportError as error:
        raise CheckpointError(missing(error)) from error
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise CheckpointError(f"transformers has no processor for this model: {first_line(error)}") from error
    kind = item_of(found)
    if not isinstance(getattr(found, f"{kind}_token", None), str) or extractor_of(found, kind) is None:
        raise CheckpointError(f"{type(found).__name__} does not say what stands for a {_WORDS[kind]} in a prompt")
    return found


EXTRACTORS = {"image": ("image_processor",), "audio": ("feature_extractor", "audio_processor")}
"""Processors' attributes that make tensors of an item, by modality."""
_WORDS = {"image": "picture", "video": "video", "audio": "sound"}


def item_of(processor: Any) -> str:
    """A modality that a processor knows: `audio` if it is for sounds alone."""
    alone = extractor_of(processor, "audio") is not None and extractor_of(processor, "image") is None
    return "audio" if alone else "image"


def extractor_of(processor: Any, kind: str) -> Any:
    """What makes tensors of an item; None if it does not take this modality."""
    return next((getattr(processor, name) for name in EXTRACTORS[kind] if hasattr(processor, name)), None)


def placeholder_of(processor: Any, modality: str = "image") -> str:
    """The token that stands for an item in a chat; some processors use another at the places of rows."""
    return str(getattr(processor, f"{modality}_placeholder_token", None) or getattr(processor, f"{modality}_token"))


@dataclass(frozen=True, slots=True)
class Clip:
    """Frames [n, height, width, 3] uint8 with these numbers, of a video with `total` frames at `fps`. `samples` are its
    sound, as in `Sound`, if that goes between them. `asked`: so many frames per second were requested."""

    frames: np.ndarray
    numbers: tuple[int, ...]
    total: int
    fps: float
    samples: np.ndarray | None = None
    asked: float = 0.0

    def given(self) -> dict[str, Any]:
        """The processor's arguments: frames are already chosen."""
        height, width = self.frames.shape[1:3]
        about: dict[str, Any] = {"total_num_frames": self.total, "fps": self.fps, "duration": self.total / self.fps}
        about |= {"height": height, "width": width, "frames_indices": list(self.numbers)}
        named = {"videos": [self.frames], "video_metadata": [about], "do_sample_frames": False, "return_metadata": True}
        if self.samples is not None:
            named |= {"audio": [self.samples], "audio_from_video_indices": [0], "load_audio_from_video": True}
        return {**named, "fps": self.asked} if self.asked else named


@dataclass(frozen=True, slots=True)
class Sound:
    """Samples [n] float32, as many of them a second as the processor's features are made of."""

    samples: np.ndarray

    def given(self) -> dict[str, Any]:
        """The processor's arguments."""
        return {"audio": [self.samples]}


SOUND_RATE = 16_000
"""Samples per second unless stated otherwise."""


def rate_of(processor: Any) -> int:
    """Samples per second of sound, as stated by its feature extractor."""
    return int(getattr(extractor_of(processor, "audio"), "sampling_rate", None) or SOUND_RATE)


def longest_sound(processor: Any) -> int:
    """The samples of a sound beyond which a processor silently ignores it; 0: no such bound."""
    if seconds := getattr(processor, "max_audio_len", None):
        return int(seconds * rate_of(processor))
    extractor = extractor_of(processor, "audio")
    known = int(getattr(extractor, "n_samples", 0)) or _cut_at(extractor)
    if not known:
        return 0
    sounds = [Sound(np.zeros(length, np.float32)) for length in (known, known + rate_of(processor))]
    within, beyond = (replaced(processor, "audio", sound.given()) for sound in sounds)
    return known if within == beyond else 0


def _cut_at(extractor: Any) -> int:
    """The samples at which a feature extractor cuts off a sound by default; 0: it does not."""
    taken = inspect.signature(type(extractor).__call__).parameters
    cuts = "truncation" in taken and taken["truncation"].default is True
    return int((cuts and "max_length" in taken and taken["max_length"].default) or 0)


def wrapped(processor: Any, modality: str) -> str:
    """A placeholder with the text that a processor needs around it."""
    return placeholder_of(processor, modality).join(_wrappers(processor, modality))


def _wrappers(processor: Any, modality: str) -> tuple[str, str]:
    if not hasattr(processor, _WANTS_WRAPPERS):
        return "", ""
    return getattr(processor, f"{modality}_start_token"), getattr(processor, f"{modality}_end_token")


_WANTS_WRAPPERS = "_has_wrappers"
"""An attribute of processors that refuse a placeholder without marks around it."""


def marks_around(processor: Any, modality: str) -> tuple[str, str]:
    """The text before and behind a placeholder in a chat, if positions or the processor depend on it."""
    if wanted := _wrappers(processor, modality)[0]:
        return wanted, _wrappers(processor, modality)[1]
    kind = "audio" if modality == "audio" else "vision"
    before, behind = (getattr(processor, f"{kind}_{end}_token", None) for end in ("bos", "eos"))
    return (before, behind) if isinstance(before, str) and isinstance(behind, str) else ("", "")


def frames_of(processor: Any, total: int, fps: float, asked: float = 0.0) -> list[int]:
    """The numbers of the frames that a processor takes of a video: all, if it does not choose; or at so many per
    second. Raises ValueError if it does not take so many."""
    videos = processor.video_processor
    if not (asked or videos.do_sample_frames):
        return list(range(total))
    about = transformers().video_utils.VideoMetadata(total_num_frames=total, fps=fps, duration=total / fps)
    defaults = {name: getattr(videos, name, None) for name in videos.valid_kwargs.__annotations__}
    taken = inspect.signature(videos.sample_frames).parameters
    named = {name: value for name, value in defaults.items() if name in taken and value is not None}
    if asked:
        if "fps" not in taken:
            raise ValueError(f"{type(videos).__name__} does not choose frames by the second")
        named["fps"] = asked
    return [int(number) for number in videos.sample_frames(metadata=about, **named)]


def check_processor(processor: Any) -> None:
    """Raises CheckpointError if it does not tell an item's layout, or not in a form that we have."""
    kind = item_of(processor)
    try:
        replaced(processor, kind, _blanks(kind)[0])
    except (AttributeError, TypeError, ValueError, KeyError, IndexError, RuntimeError) as error:
        name, what = type(processor).__name__, _WORDS[kind]
        if _places_by_itself(processor, kind):
            raise CheckpointError(f"{name} puts a {what} before a text, and nowhere else") from error
        raise CheckpointError(f"{name} does not say what stands for a {what} in a prompt") from error


def _places_by_itself(processor: Any, kind: str) -> bool:
    """Whether a text without a place for an item gets one."""
    try:
        texts = processor.prepare_inputs_layout(text=[_BEFORE], **_blanks(kind)[0])[1]
    except (AttributeError, TypeError, ValueError, KeyError, IndexError, RuntimeError):
        return False
    return placeholder_of(processor, kind) in texts[0]


def _blanks(kind: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Two items without content, each alone, and both together."""
    if kind == "audio":
        sounds = [np.zeros(length, np.float32) for length in _LENGTHS]
        return {"audio": sounds[:1]}, {"audio": sounds[1:]}, {"audio": sounds}
    pictures = [Image.new("RGB", size) for size in _SIZES]
    return {"images": pictures[:1]}, {"images": pictures[1:]}, {"images": pictures}


def stand_alone(processor: Any) -> bool:
    """Whether two items in one prompt are laid out as each would be alone, except for their numbers."""
    found = _one_other_and_both(processor)
    if found is None:
        return False
    first, second, both = found
    if mark := number_mark(processor):
        second = second.replace(f"{mark}0", f"{mark}1", 1)
    return first + _between(processor, item_of(processor)) + second == both


def number_mark(processor: Any) -> str:
    """The beginning of an item's text that precedes its number, counted from 0 among those of its modality; empty if
    items are not numbered."""
    if (found := _one_other_and_both(processor)) is None:
        return ""
    first, second, both = found
    begin = len(first) + len(_between(processor, item_of(processor)))
    mark = second.partition("0")[0]
    numbers = (first, "0"), (second, "0"), (both[begin:], "1")
    return mark if all(mark and text.startswith(mark + number) for text, number in numbers) else ""


def _one_other_and_both(processor: Any) -> tuple[str, str, str] | None:
    """The layouts of two items, each alone and both with a word between; None if they are not told."""
    kind = item_of(processor)
    try:
        first, second, both = (
            replaced(processor, kind, each, count) for each, count in zip(_blanks(kind), (1, 1, 2), strict=True)
        )
    except (TypeError, ValueError, KeyError, IndexError, RuntimeError):
        return None
    return first, second, both


def are_padded(processor: Any) -> bool:
    """Whether two pictures of different size are padded to one size; an item's layout then depends on all of its
    pixels."""
    alone, both = _alone_and_both(processor, "image")
    return bool(alone["pixel_values"].shape[-2:] != both["pixel_values"].shape[-2:])


def are_filled_up(processor: Any) -> bool:
    """Whether features of two sounds are padded to one length without a mask: a tower would hear the padding."""
    alone, both = _alone_and_both(processor, "audio")
    if (features := both.get("input_features")) is None or features.shape[1:] == alone["input_features"].shape[1:]:
        return False
    told = [value.shape for name, value in both.items() if "mask" in name and name != "attention_mask"]
    return not any(len(shape) == 2 and shape[-1] in features.shape[1:] for shape in told)


def _alone_and_both(processor: Any, kind: str) -> tuple[Any, Any]:
    """The processor's output for one item, and for it together with another."""
    alone, _, both = (
        processor(text=[_BETWEEN.join([wrapped(processor, kind)] * count)], return_tensors="pt", **each)
        for each, count in zip(_blanks(kind), (1, 1, 2), strict=True)
    )
    return alone, both


_SIZES = (64, 48), (60, 180)
_LENGTHS = 20_000, 30_000
_BETWEEN = " and "


def replaced(processor: Any, modality: str, media: Mapping[str, Any], count: int = 1) -> str:
    """What a processor makes of so many placeholders with a word between them. Raises ValueError if it does not
    tell."""
    text = _BETWEEN.join([wrapped(processor, modality)] * count)
    made = processor(text=[text], return_text_replacement_offsets=True, return_tensors="pt", **media)
    if "text_replacement_offsets" not in made:
        raise ValueError(f"{type(processor).__name__} does not say what stands for a {modality} in a prompt")
    found = made["text_replacement_offsets"][0]
    return _between(processor, modality).join(each["replacement"] for each in found)


def _between(processor: Any, modality: str) -> str:
    """The text between two placeholders, with what is needed around each."""
    before, behind = _wrappers(processor, modality)
    return behind + _BETWEEN + before


def frame_of(processor: Any) -> PromptFrame | None:
    """What a processor adds to prompts besides items' layouts: derived from one prompt, and checked with it and another
    with two items, if it takes two. Raises CheckpointError if it adds something that a frame cannot express. If it
    changes texts beside items (`HfModel.seam`), it adds nothing else."""
    if getattr(processor, SEAM, ""):
        return None
    kind = item_of(processor)
    one, _, two = _blanks(kind)
    made, parts = _laid_out(processor, kind, one, 1)
    own: list[int] = processor.tokenizer("".join(parts))["input_ids"]
    if made == own:
        return None
    decode = processor.tokenizer.decode
    before, item, after = map(re.escape, (parts[0], decode(_plain_ids(processor, parts[1])), parts[2]))
    told = re.fullmatch(f"(.*){before}{item}(.*?){after}(.*)", decode(made), re.DOTALL)
    frame = PromptFrame(told[1], told[2], told[3]) if told else PromptFrame()
    if made == _framed_ids(processor, frame, parts):
        once = _is_set_once(processor, frame, kind, one, made)
        frame = msgspec.structs.replace(frame, always=_is_around_texts(processor, frame), once=once)
        try:
            more, parts = _laid_out(processor, kind, two, 2)
        except (TypeError, ValueError, KeyError, IndexError, RuntimeError):
            return frame  # it takes one
        if more == _framed_ids(processor, frame, parts):
            return frame
    elif decode(made) == decode(own):  # the same, cut otherwise
        return None
    if not (_BEFORE in decode(made) or _AFTER in decode(made)):
        raise CheckpointError(f"{type(processor).__name__} writes prompts by itself, whatever is asked")
    raise CheckpointError(f"{type(processor).__name__} sets something into prompts that is not known here")


def _is_set_once(processor: Any, frame: PromptFrame, kind: str, media: Mapping[str, Any], made: list[int]) -> bool:
    """Whether a text with an item that begins as it would be begun is made into the same."""
    text = frame.begin + _BEFORE + wrapped(processor, kind) + _AFTER
    return bool(frame.begin) and processor(text=[text], return_tensors="pt", **media)["input_ids"][0].tolist() == made


def _is_around_texts(processor: Any, frame: PromptFrame) -> bool:
    """Whether it is set around a text without items too."""
    try:
        made = processor(text=[_BEFORE], return_tensors="pt")["input_ids"][0].tolist()
    except (AttributeError, TypeError, ValueError, KeyError, IndexError, RuntimeError):
        return False
    return bool(made == _plain_ids(processor, f"{frame.begin}{_BEFORE}{frame.end}"))


_BEFORE, _AFTER = "left", "right"


def _laid_out(processor: Any, kind: str, media: Mapping[str, Any], count: int) -> tuple[list[int], list[str]]:
    """The ids that a processor makes of so many items between two words, and our parts of them: a word, the layouts of
    all items with what is between them, a word."""
    text = _BEFORE + _BETWEEN.join([wrapped(processor, kind)] * count) + _AFTER
    before, behind = _wrappers(processor, kind)
    made = processor(text=[text], return_tensors="pt", **media)
    parts = [_BEFORE + before, replaced(processor, kind, media, count), behind + _AFTER]
    return made["input_ids"][0].tolist(), parts


def _framed_ids(processor: Any, frame: PromptFrame, parts: list[str]) -> list[int]:
    before, items, after = parts
    return _plain_ids(processor, f"{frame.begin}{before}{items}{frame.behind}{after}{frame.end}")


def _plain_ids(processor: Any, text: str) -> list[int]:
    """A text's own, and nothing that the tokenizer sets around one."""
    found: list[int] = processor.tokenizer(text, add_special_tokens=False)["input_ids"]
    return found
