"""What the library says of a checkpoint, and whether we can serve it.

As a process, `python -m common.library_models FOLDER`, it writes what `common.library.describe` reads.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from PIL import Image

from common.checkpoint import CheckpointError
from common.library import LibraryModel, Refusal
from common.library_classes import blank_of, config_of, head_of, layers_of_levels, library, missing
from common.library_features import features_of, lacking
from common.library_layouts import RUN, SEAM
from common.library_processors import (
    EXTRACTORS,
    Clip,
    Sound,
    are_filled_up,
    are_padded,
    check_processor,
    frame_of,
    frames_of,
    item_of,
    number_mark,
    placeholder_of,
    processor_of,
    rate_of,
    replaced,
    stand_alone,
)


def describe(folder: Path) -> LibraryModel:
    """What `common.library.describe` tells. Raises CheckpointError, in one sentence, where it is not served."""
    config = config_of(folder)
    model, processor = checked(config), processor_of(folder)
    text = config.get_text_config(decoder=True)
    if row_token(config) >= text.vocab_size:
        raise CheckpointError(f"{config.model_type} has rows at places of a token that its vocabulary has not")
    check_processor(processor)
    taken = [item_of(processor), *(["video"] if takes_videos(model, processor) else [])]
    if "audio" not in taken and takes_sounds(model, processor):
        taken.append("audio")
    ids = {kind: processor.tokenizer.convert_tokens_to_ids(placeholder_of(processor, kind)) for kind in taken}
    return LibraryModel(
        architecture=type(model).__name__,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        max_position=longest_context(text),
        turns_at=turns_at(text),
        pinned=pinned_of(model),
        seam=getattr(processor, SEAM, ""),
        number_mark=number_mark(processor),
        run=getattr(processor, RUN, 0),
        placeholders=ids,
        levels=level_count(config),
        alone=tuple(taken) if _depends_on_others(model, processor) else lacking(config).alone,
        adapters=own_adapters(config, folder),
        video_sound={"video", "audio"} <= {*taken} and takes_video_sound(model, processor),
        frame=frame_of(processor),
        text=text_of(model),
        axes=axes_of(model),
        together=together_of(processor),
        sound_rate=rate_of(processor),
        length_mark=getattr(processor, _LENGTH_MARK, None) or "",
    )


_LENGTH_MARK = "audio_duration_token"
"""What a processor calls a text that it sets the seconds of a sound for."""


def _depends_on_others(model: Any, processor: Any) -> bool:
    """Whether what stands for an item, or its rows, depend on how many a prompt has."""
    if not stand_alone(processor):
        return True
    if item_of(processor) == "audio":
        return are_filled_up(processor)
    return makes_tokens(model.base_model) and are_padded(processor)


def longest_context(text: Any) -> int:
    """The tokens of a context, by a text's configuration. Where some kinds of its layers turn longer sequences by other
    frequencies, no more than it says that these do."""
    rope = getattr(text, "rope_parameters", None) or {}
    first = [_turned_beyond(each, text) for each in rope.values() if isinstance(each, dict)]
    known = getattr(text, "max_position_embeddings", None) or _LONGEST
    return int(min([known, *(length for length in first if length)]))


def turns_at(text: Any) -> int:
    """`LibraryModel.turns_at` of a text's configuration."""
    return _turned_beyond(getattr(text, "rope_parameters", None) or {}, text)


def _turned_beyond(rope: Mapping[str, Any], text: Any) -> int:
    """The longest sequence that is turned by the first frequencies of LongRoPE; 0: it is not by that."""
    found = rope.get(_FIRST) or getattr(text, _FIRST, None) if rope.get("rope_type") == "longrope" else 0
    return int(found or 0)


_FIRST = "original_max_position_embeddings"


def own_adapters(config: Any, folder: Path) -> dict[str, str]:
    """`LibraryModel.adapters` of a checkpoint. Raises CheckpointError where its kind has some, or the configuration
    says so, and the folder has not."""
    found = {"audio": "."} if getattr(config, "has_lora_adapter", False) else lacking(config).adapters
    for kind, path in found.items():
        if not (folder / path / ADAPTER_CONFIG).is_file():
            why = f"{config.model_type} computes prompts with {_SEVERAL[kind]} by an adapter"
            where = f"in {path}" if path != "." else "beside its weights"
            raise CheckpointError(f"{why}, and there is no {ADAPTER_CONFIG} {where}")
    return dict(found)


ADAPTER_CONFIG = "adapter_config.json"
_SEVERAL = {"image": "pictures", "audio": "sounds"}


def together_of(processor: Any) -> tuple[int, ...]:
    """The tokens that a processor says are a picture's, marks around rows among them."""
    return tuple(id for id in getattr(processor, "image_token_ids", None) or () if id is not None)


def text_of(model: Any) -> dict[str, Any]:
    """The text's part of a model's configuration as JSON has it, every default filled in; whether its head is its table
    of tokens the model says."""
    text, head = model.config.get_text_config(decoder=True), head_of(model)
    found: dict[str, Any] = msgspec.json.decode(text.to_json_string(use_diff=False))
    found |= _NOT_OF_THE_HEAD.get(model.config.model_type, {})
    return {**found, "tie_word_embeddings": head is not None and head.weight is model.get_input_embeddings().weight}


_NOT_OF_THE_HEAD = {kind: {"logits_scaling": 1.0} for kind in ("granite_speech", "granite_speech_plus")}
"""What a text's configuration states of its head of logits, and the library leaves out of the head of a model around
it: as it is computed, by the kind of model."""


_BLANK_FRAMES, _BLANK_SIDES = 64, (48, 64)
_FEW_FRAMES, _LARGE_SIDES = 8, (160, 224)


def takes_videos(model: Any, processor: Any) -> bool:
    """Whether the processor says what stands for a video of a size, whatever it shows, and the model has a tower for
    it, all of whose rows go into the prompt."""
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
        if one != other:  # what it shows decides how many rows it has, as in VideoLLaMA 3
            return False
    except (AttributeError, ImportError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        return False
    return features_of(model.base_model, "video") is not None


_BLANK_RATE = 8.0


def takes_sounds(model: Any, processor: Any) -> bool:
    """Whether the processor says what stands for a sound, and the model has a tower for it, and no tokens of media see
    each other in its text as its configuration has it. Where it tells modalities apart there, a trial has to show that
    nothing follows from it for a sound."""
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
    """Whether a model is told of each token of a prompt of which modality it is."""
    return any("token_type_ids" in name for name in inspect.signature(model.forward).parameters)


def takes_video_sound(model: Any, processor: Any) -> bool:
    """Whether the processor puts a video's sound between its frames, and the model counts places so, where it has a
    rule of its own."""
    base = model.base_model
    if hasattr(base, "get_rope_index") and _SOUND_IN_VIDEO not in inspect.signature(base.get_rope_index).parameters:
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
    """The tokens at whose places rows go in what stands for an item, by their names: some models have one for all
    modalities, some have marks whose rows the tower gives as well. Raises ValueError where there is none."""
    name = processor.tokenizer.convert_ids_to_tokens
    for kind in dict.fromkeys((modality, "image")):
        token = getattr(config, f"{kind}_token_id", None)
        if token is not None and str(name(token)) in replacement:
            return {str(name(each)): int(each) for each in (token, *marks_of(config))}
    raise ValueError(f"nothing in what stands for a {modality} takes rows")


def longest_run(folder: Path, *, with_marks: bool = False) -> int:
    """Rows of the longest run that a picture has in a prompt, or a frame of a video: the most of blank ones of many
    shapes, and no fewer than the processor states. With marks: tokens of all that stands for one. Raises
    CheckpointError where there is no processor."""
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
"""What a processor calls the most rows of a picture, of which pictures of some shapes alone have all."""


def marks_of(config: Any) -> list[int]:
    """Tokens around a picture whose rows its tower gives, in the tower's order."""
    return list(getattr(config, "visual_indicator_token_ids", None) or ())


def makes_tokens(base: Any) -> bool:
    """Whether a model below its head makes tokens of a picture, whose rows it has in its table of tokens."""
    return hasattr(base, "get_image_tokens")


def checked(config: Any) -> Any:
    """The model of a configuration without weights. Raises CheckpointError for what a class of models alone says that
    we cannot serve."""
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise CheckpointError(f"{kind} has an encoder for its text beside the decoder")
    if getattr(config, "canvas_length", None):
        raise CheckpointError(f"{kind} writes stretches of an answer at once, by diffusion")
    text = config.get_text_config(decoder=True)
    if _INDEXED in (getattr(text, "layer_types", None) or ()) and text.model_type not in _KNOWN_INDICES:
        raise CheckpointError(f"layers of {kind} choose the tokens that they see by an index of their own")
    model = blank_of(config)
    found = {modality: features_of(model.base_model, modality) for modality in EXTRACTORS}
    apart = {modality: compute for modality, compute in found.items() if compute is not None}
    if not apart:
        parts = {name for name, part in vars(config).items() if isinstance(part, library().PreTrainedConfig)}
        media = "sounds" if parts & {"audio_config", "codec_config"} and "vision_config" not in parts else "pictures"
        why = f"does not keep the rows of {media} apart from the rest" if parts else "is for text alone"
        raise CheckpointError(f"{kind} {why}")
    first, compute = next(iter(apart.items()))
    if _OF_A_STREAM in inspect.signature(compute).parameters:
        raise CheckpointError(f"{kind} hears on while it answers, and adds rows to the tokens that it has said")
    if _TOLD_THE_TEXT in inspect.signature(compute).parameters:
        raise CheckpointError(f"{kind} makes rows of a picture by what the prompt says of it")
    if getattr(config, f"{first}_token_id", None) is None:
        raise CheckpointError(f"{kind} does not state the token at whose places rows go")
    return model


_TOLD_THE_TEXT = "qformer_input_ids"
"""What makes rows takes so, if it is told the prompt's text."""
_OF_A_STREAM = "padding_cache"
"""What makes rows takes so, if it goes on with a sound from where the last pass of it ended."""
_INDEXED = "indexed_attention"
"""What a configuration calls layers that score all tokens before one, and attend to the best of them."""
_KNOWN_INDICES = ("mistral_large4_text", "dots3_note_text", "glm5_next_text")
"""Texts whose index is known to the LLM service."""
_LONGEST = 32768
"""Tokens of a context whose bound no configuration states."""


def row_token(config: Any) -> int:
    """The token at whose places a picture's rows go, or a sound's where the model knows no pictures."""
    found = getattr(config, "image_token_id", None)
    return int(config.audio_token_id if found is None else found)


def level_count(config: Any) -> int:
    """Levels of a row: those beyond the first are for the first layers of the text, or all for layers of their own."""
    if layers := layers_of_levels(config):
        return len(layers)
    return 1 + len(getattr(getattr(config, "vision_config", None), "deepstack_visual_indexes", None) or ())


def rope_positions(base: Any, made: Mapping[str, Any], *, sound_in_video: bool = False) -> torch.Tensor:
    """Where a prompt's tokens are in time, height and width, int64 [3, n], by the model's own rule for what its
    processor has made, without an axis on which each is at its own number; `sound_in_video`: of videos, their sound
    is between their frames. Raises CheckpointError where there are other axes than three, ValueError where places are
    not whole numbers."""
    known = inspect.signature(base.get_rope_index).parameters
    named = {**made, **{own: tell(made) for own, (name, tell) in _RENAMED.items() if name in made}}
    if sound_in_video:
        named[_SOUND_IN_VIDEO] = True
    found = base.get_rope_index(**{name: named[name] for name in known if name in named})[0][:, 0]
    if len(found) == _AXES + 1 and torch.equal(found[0], torch.arange(found.shape[1])):
        found = found[1:]
    if len(found) != _AXES:
        raise CheckpointError(f"{type(base).__name__} counts places on {len(found)} axes")
    positions: torch.Tensor = found.long()
    if not torch.equal(positions, found):
        raise ValueError(f"{type(base).__name__} counts places between whole numbers")
    return positions


def pinned_of(model: Any) -> tuple[int, ...]:
    """`LibraryModel.pinned` of a model. Raises CheckpointError where its configuration leaves such tokens out."""
    rule = getattr(model.base_model, "get_rope_index", None)
    if rule is None or CANVAS not in inspect.signature(rule).parameters:
        return ()
    found: tuple[Any, ...] = tuple(getattr(model.config, name, None) for name in _CANVAS_ENDS)
    if None in found:
        raise CheckpointError(f"{model.config.model_type} does not state its {_CANVAS_ENDS[found.index(None)]}")
    return found


def axes_of(model: Any) -> int:
    """The axes on which a model counts places: 1, 3, or 4 where each token's own number is another, before these."""
    if not hasattr(model.base_model, "get_rope_index"):
        return 1
    rope = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    return max(_AXES, len(rope.get("mrope_section") or ()))


_AXES = 3
CANVAS = "target_sizes"
"""What a rule of positions wants that lays slices of a picture out on the whole: the patches of each."""
_CANVAS_ENDS = "image_end_id", "slice_end_id", "newline_id"
"""What a configuration calls tokens that such a rule counts to a picture right before them."""
_SOUND_IN_VIDEO = "use_audio_in_video"
_RENAMED: dict[str, tuple[str, Callable[[Mapping[str, Any]], Any]]] = {
    "audio_seqlens": ("feature_attention_mask", lambda made: made["feature_attention_mask"].sum(-1)),
    "second_per_grids": ("video_second_per_grid", lambda made: torch.as_tensor(made["video_second_per_grid"])),
}
"""What the rule of positions calls otherwise than the processor, and how it is made of that."""


def main(folder: Path) -> None:
    """Writes the description, or why there is none, as a line of JSON."""
    answer: LibraryModel | Refusal
    try:
        answer = describe(folder)
    except CheckpointError as error:
        answer = Refusal(str(error))
    except ImportError as error:
        answer = Refusal(missing(error))
    sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
