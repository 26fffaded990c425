"""The library's models and processors: which class a checkpoint is of, and no more of it than one service needs.

As a process, `python -m common.library_models FOLDER`, it writes what `common.library.describe` reads.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from PIL import Image
from torch import nn

from common.checkpoint import Checkpoint, CheckpointError
from common.library import LibraryModel, PromptFrame, Refusal

_KEPT: list[torch.library.Library] = []


@cache
def library() -> Any:
    """transformers, loaded.

    Its processors want torchvision, of which there is no CPU build in the ordinary index. Where the ordinary wheel
    stands beside a CPU torch, two compiled operators, whose absence keeps it from being imported, are declared; the
    processors call neither.
    """
    try:
        import torchvision  # type: ignore[import-untyped]  # noqa: F401
    except (ImportError, RuntimeError):  # none, or "operator torchvision::nms does not exist"
        declared = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            declared.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(declared)
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def config_of(folder: Path) -> Any:
    """The checkpoint's configuration, every default filled in; of a model that speaks as well, its thinker's. That
    weights are quantised is left out, since the library reads none that are. Raises CheckpointError where the library
    knows no such model."""
    kind = Checkpoint(folder).config.get("model_type", "?")
    if kind not in library().CONFIG_MAPPING:
        raise CheckpointError(f"{kind} is not supported: neither a family of ours nor the library knows it")
    try:
        found = library().AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, OSError, KeyError) as error:
        raise CheckpointError(f"the library cannot read the configuration of {kind}: {_first_line(error)}") from error
    found = getattr(found, "thinker_config", found)
    for part in (found, found.get_text_config(decoder=True)):
        vars(part).pop("quantization_config", None)
    return found


def class_of(config: Any) -> Any:
    """The class of models that read pictures, or hear sounds, and write text. Raises CheckpointError where there is
    none."""
    for every in (library().AutoModelForImageTextToText, library().AutoModelForMultimodalLM):
        if type(config) in every._model_mapping:
            found = every._model_mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found
    raise CheckpointError(f"{config.model_type} is no model that reads pictures and writes text")


def processor_of(folder: Path) -> Any:
    """The checkpoint's processor. Raises CheckpointError where it has none that says what stands for a picture, or for
    a sound where it is for sounds alone."""
    try:
        found = library().AutoProcessor.from_pretrained(folder, local_files_only=True)
    except (ValueError, OSError, KeyError, ImportError, TypeError) as error:
        raise CheckpointError(f"the library has no processor for this model: {_first_line(error)}") from error
    kind = item_of(found)
    if not isinstance(getattr(found, f"{kind}_token", None), str) or not hasattr(found, _EXTRACTORS[kind]):
        raise CheckpointError(f"{type(found).__name__} does not say what stands for a {_WORDS[kind]} in a prompt")
    return found


_EXTRACTORS = {"image": "image_processor", "audio": "feature_extractor"}
_WORDS = {"image": "picture", "video": "video", "audio": "sound"}


def item_of(processor: Any) -> str:
    """The modality that a processor knows at least: `audio`, where it is for sounds alone."""
    alone = hasattr(processor, "feature_extractor") and not hasattr(processor, "image_processor")
    return "audio" if alone else "image"


def placeholder_of(processor: Any, modality: str = "image") -> str:
    """The token that stands for an item in a chat, which some processors tell from the one at the places of rows."""
    return str(getattr(processor, f"{modality}_placeholder_token", None) or getattr(processor, f"{modality}_token"))


@dataclass(frozen=True, slots=True)
class Clip:
    """Frames [n, height, width, 3] uint8 with these numbers, of a video of `total` frames, `fps` each second. `samples`
    are its sound, as in `Sound`, where that goes between them. `asked`: so many frames of each second were asked for.
    """

    frames: np.ndarray
    numbers: tuple[int, ...]
    total: int
    fps: float
    samples: np.ndarray | None = None
    asked: float = 0.0

    def given(self) -> dict[str, Any]:
        """What a processor is given: the frames are chosen already."""
        height, width = self.frames.shape[1:3]
        about: dict[str, Any] = {"total_num_frames": self.total, "fps": self.fps, "duration": self.total / self.fps}
        about |= {"height": height, "width": width, "frames_indices": list(self.numbers)}
        named = {"videos": [self.frames], "video_metadata": [about], "do_sample_frames": False, "return_metadata": True}
        if self.samples is not None:
            named |= {"audio": [self.samples], "audio_from_video_indices": [0], "load_audio_from_video": True}
        return {**named, "fps": self.asked} if self.asked else named


@dataclass(frozen=True, slots=True)
class Sound:
    """Samples [n] float32, `SOUND_RATE` of them a second."""

    samples: np.ndarray

    def given(self) -> dict[str, Any]:
        """What a processor is given."""
        return {"audio": [self.samples]}


SOUND_RATE = 16_000


def longest_sound(processor: Any) -> int:
    """The samples that a processor takes of a sound, and says nothing of what is behind them; 0: all of any."""
    if seconds := getattr(processor, "max_audio_len", None):
        return int(seconds * SOUND_RATE)
    known = int(getattr(processor.feature_extractor, "n_samples", 0))
    if not known:
        return 0
    sounds = [Sound(np.zeros(length, np.float32)) for length in (known, known + SOUND_RATE)]
    within, beyond = (replaced(processor, "audio", sound.given()) for sound in sounds)
    return known if within == beyond else 0


def wrapped(processor: Any, modality: str) -> str:
    """A placeholder, and what a processor wants around one."""
    return placeholder_of(processor, modality).join(_wrappers(processor, modality))


def _wrappers(processor: Any, modality: str) -> tuple[str, str]:
    if not hasattr(processor, _WANTS_WRAPPERS):
        return "", ""
    return getattr(processor, f"{modality}_start_token"), getattr(processor, f"{modality}_end_token")


_WANTS_WRAPPERS = "_has_wrappers"
"""What a processor has that refuses a placeholder without marks around it."""


def marks_around(processor: Any, modality: str) -> tuple[str, str]:
    """What a chat has before and behind a placeholder, where positions depend on it, or the processor."""
    if wanted := _wrappers(processor, modality)[0]:
        return wanted, _wrappers(processor, modality)[1]
    kind = "audio" if modality == "audio" else "vision"
    before, behind = (getattr(processor, f"{kind}_{end}_token", None) for end in ("bos", "eos"))
    return (before, behind) if isinstance(before, str) and isinstance(behind, str) else ("", "")


def frames_of(processor: Any, total: int, fps: float, asked: float = 0.0) -> list[int]:
    """The numbers of the frames that a processor takes of a video by itself: all, where it chooses none; or where so
    many of each second are asked for. Raises ValueError where it does not take so many."""
    videos = processor.video_processor
    if not (asked or videos.do_sample_frames):
        return list(range(total))
    about = library().video_utils.VideoMetadata(total_num_frames=total, fps=fps, duration=total / fps)
    defaults = {name: getattr(videos, name, None) for name in videos.valid_kwargs.__annotations__}
    taken = inspect.signature(videos.sample_frames).parameters
    named = {name: value for name, value in defaults.items() if name in taken and value is not None}
    if asked:
        if "fps" not in taken:
            raise ValueError(f"{type(videos).__name__} does not choose frames by the second")
        named["fps"] = asked
    return [int(number) for number in videos.sample_frames(metadata=about, **named)]


_SMALL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "intermediate_size_mlp": 80,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 32,
}
_HEADS, _EXPERTS, _WINDOW, _MOST_LAYERS = 4, 4, 8, 8
_REACH = re.compile(r"window|chunk|topk|top_k|block_size|floor_scale")
"""How a configuration calls that no more than so many tokens are seen, or that what is behind so many is scaled."""


def shrink_whole(config: Any, ranks: int = 1) -> None:
    """`shrink` of the text of a model; layers that levels of rows are for are kept, as far as there are not too many,
    and lie next to each other."""
    layers = sorted(set(layers_of_levels(config)))
    text = config.get_text_config(decoder=True)
    shrink(text, ranks, min(len(layers), _MOST_LAYERS))
    if layers:
        left = {layer: at % text.num_hidden_layers for at, layer in enumerate(layers)}
        config.deepstack_layer_map = [(depth, left[layer]) for depth, layer in config.deepstack_layer_map]
        config.spatial_target_layers = [left[layer] for layer in config.spatial_target_layers]


def shrink(config: Any, ranks: int = 1, layers: int = 2) -> None:
    """Makes a text configuration so small that a model of it is made in no time, and keeps what sets it apart: its
    kinds of layers, as many as `layers` where there are such, its shape of a head, the shares of heads, and its window,
    which becomes a short one. Heads that can be split over so many ranks still can."""
    apart = _layers_apart(config)
    heads = config.num_attention_heads
    divided = getattr(config, "head_dim", None) is None  # heads are as wide as they divide the whole
    if divided:
        config.head_dim = config.hidden_size // heads
    pairs = [getattr(config, "num_key_value_heads", None) or heads]
    pairs += [own["num_key_value_heads"] for own in apart.values() if own.get("num_key_value_heads")]
    fewer = min(heads, max(_HEADS, *(ranks * heads // kv for kv in pairs))) if ranks > 1 else min(heads, _HEADS)
    config.num_attention_heads = fewer
    if getattr(config, "num_key_value_heads", None):
        config.num_key_value_heads = max(1, fewer * config.num_key_value_heads // heads)
    left = _fewer_layers(config, layers)
    for name, most in _SMALL.items():
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, min(getattr(config, name), most))
    if divided:
        config.hidden_size = fewer * config.head_dim
    if getattr(config, "moe_intermediate_size", None) == config.hidden_size // 2:
        config.moe_intermediate_size += config.hidden_size // 4  # square matrices do not show which way round they lie
    _fewer_experts(config)
    for name, value in list(vars(config).items()):  # what a short prompt would not show
        if _REACH.search(name) and type(value) is int and value > _WINDOW:
            setattr(config, name, _WINDOW)
    for own in apart.values():
        if own.get("num_key_value_heads"):
            own["num_key_value_heads"] = max(1, fewer * own["num_key_value_heads"] // heads)
    if apart:
        config.per_layer_config = {left.index(layer): own for layer, own in apart.items() if layer in left}


def _fewer_experts(config: Any) -> None:
    """Leaves two of each group at least, and of layers that have none the first."""
    most = max(_EXPERTS, 2 * (getattr(config, "n_group", None) or 1))
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, min(getattr(config, name), most))
    if isinstance(getattr(config, "num_experts_per_tok", None), int):
        config.num_experts_per_tok = min(config.num_experts_per_tok, 2)
    if getattr(config, "first_k_dense_replace", None):
        config.first_k_dense_replace = 1


def _fewer_layers(config: Any, least: int) -> list[int]:
    """Leaves as many layers as there are kinds of them, or `least`, and of those that share another's keys and values
    as many; the numbers that they had."""
    layers, kinds = config.num_hidden_layers, getattr(config, "layer_types", None) or []
    shared = getattr(config, "num_kv_shared_layers", None) or 0
    kept = max([2, least, *(kinds.index(kind) + 1 for kind in set(kinds))])
    kept = min(kept, _MOST_LAYERS, layers - shared)
    left = [*range(kept), *range(layers - shared, layers - shared + min(shared, kept))]
    config.num_hidden_layers = len(left)
    if shared:
        config.num_kv_shared_layers = len(left) - kept
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == layers:
            setattr(config, name, [value[layer] for layer in left])
    return left


def _layers_apart(config: Any) -> dict[int, dict[str, Any]]:
    """What single layers have of their own, taken out of a configuration: as long as it is in there, nothing that they
    differ in can be read."""
    if not config.is_heterogeneous:
        return {}
    found = {int(layer): dict(own) for layer, own in config.to_dict()["per_layer_config"].items()}
    config.per_layer_config = None
    return found


_LARGEST = 4.0


def made_up(config: Any, strip: Callable[[Any], None]) -> Any:
    """A model of a configuration without what `strip` takes away from it, with weights that are drawn: matrices from
    N(0, 1 / fan-in), tables from N(0, 1), and what is of one dimension near where the library has it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        part = _without(class_of(config), strip).from_pretrained(
            None, config=config, state_dict={}, dtype=torch.float32
        )
    generator = torch.Generator().manual_seed(0)
    tables = {id(each.weight) for each in part.modules() if isinstance(each, nn.Embedding)}
    with torch.no_grad():
        for parameter in part.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:  # the library leaves some as memory had them
                parameter.nan_to_num_(0.0, 0.0, 0.0).clamp_(-_LARGEST, _LARGEST).add_(0.1 * noise)
            else:
                parameter.copy_(noise if id(parameter) in tables else noise / parameter.shape[-1] ** 0.5)
        redraw_corrections(part, generator)
    return part.eval().requires_grad_(requires_grad=False)


def redraw_corrections(model: nn.Module, generator: torch.Generator) -> None:
    """Draws what routers of experts add to their scores, which are no parameters, and zeros as the library has them."""
    for name, correction in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            correction.copy_(0.3 * torch.randn(correction.shape, generator=generator))


def load(folder: Path, strip: Callable[[Any], None], dtype: torch.dtype, device: torch.device) -> Any:
    """The checkpoint's model without what `strip` takes away from it, whose weights are not read. Raises
    CheckpointError where the library cannot read what is left, or it is quantised."""
    config = config_of(folder)
    try:
        model, told = _without(class_of(config), strip).from_pretrained(
            folder, config=config, dtype=dtype, local_files_only=True, output_loading_info=True
        )
    except (ValueError, OSError, RuntimeError, KeyError) as error:
        raise CheckpointError(f"the library cannot load the model: {_first_line(error)}") from error
    modules = {name for name, _ in model.named_modules()}
    beside = [name for name in told["unexpected_keys"] if _OF_QUANTISED.fullmatch(name.rpartition(".")[2])]
    if quantised := sorted(name for name in beside if name.rpartition(".")[0] in modules):
        raise CheckpointError(f"the library is to compute {quantised[0].rpartition('.')[0]}, whose weight is quantised")
    model.eval().requires_grad_(requires_grad=False)
    return model.to(device)


_OF_QUANTISED = re.compile(r"qweight|weight_(packed|scale|scale_inv)")
"""A tensor of a quantised weight, in every form that one has."""


def _without(whole: Any, strip: Callable[[Any], None]) -> Any:
    """The class whose models are made, and so loaded, without what `strip` takes away."""

    def init(self: Any, given: Any) -> None:
        whole.__init__(self, given)
        strip(self)

    return type(whole.__name__, (whole,), {"__init__": init, "__module__": whole.__module__})


def keep_only(model: nn.Module, wanted: list[nn.Module]) -> None:
    """Takes away every part of a model that is none of the wanted ones, is in none of them, and holds none of them."""
    kept = {id(part) for each in wanted for part in each.modules()}

    def visit(module: nn.Module) -> None:
        for name, child in list(module.named_children()):
            if id(child) in kept:
                continue
            if any(id(part) in kept for part in child.modules()):
                visit(child)
            else:
                setattr(module, name, None)

    visit(model)


def towers_within(decoder: nn.Module) -> list[nn.Module]:
    """What a decoder that is all of a model below its head has of towers among its parts."""
    return [part for part in decoder.children() if isinstance(part, library().PreTrainedModel)]


def describe(folder: Path) -> LibraryModel:
    """What `common.library.describe` tells. Raises CheckpointError, in one sentence, where it is not served."""
    config = config_of(folder)
    check(config)
    text = config.get_text_config(decoder=True)
    whole, processor = class_of(config), processor_of(folder)
    _check_processor(processor)
    taken = [item_of(processor), *(["video"] if takes_videos(config, processor) else [])]
    if "audio" not in taken and takes_sounds(config, processor):
        taken.append("audio")
    ids = {kind: processor.tokenizer.convert_tokens_to_ids(placeholder_of(processor, kind)) for kind in taken}
    return LibraryModel(
        architecture=whole.__name__,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        max_position=getattr(text, "max_position_embeddings", None) or _LONGEST,
        placeholders=ids,
        levels=level_count(config),
        one_item=not stand_alone(processor) or (makes_tokens(base_of(config)) and _are_padded(processor)),
        video_sound={"video", "audio"} <= {*taken} and takes_video_sound(config, processor),
        frame=frame_of(processor),
        text=text_of(config),
        axes=axes_of(config),
    )


def text_of(config: Any) -> dict[str, Any]:
    """The text's part of a configuration as JSON has it, every default filled in; whether its head is its table of
    tokens the whole model says."""
    with torch.device("meta"):
        model = class_of(config)(config)
    head = model.get_output_embeddings()
    found: dict[str, Any] = msgspec.json.decode(config.get_text_config(decoder=True).to_json_string(use_diff=False))
    return {**found, "tie_word_embeddings": head is not None and head.weight is model.get_input_embeddings().weight}


_BLANK_FRAMES, _BLANK_SIDES = 64, (48, 64)
_FEW_FRAMES, _LARGE_SIDES = 8, (160, 224)


def takes_videos(config: Any, processor: Any) -> bool:
    """Whether the processor says what stands for a video of a size, whatever it shows, and the model has a tower for
    it."""
    if not isinstance(getattr(processor, "video_token", None), str) or not getattr(processor, "video_processor", None):
        return False
    try:
        numbers = tuple(frames_of(processor, _BLANK_FRAMES, _BLANK_RATE))
        frames = np.zeros((len(numbers), *_BLANK_SIDES, 3), np.uint8)
        text = replaced(processor, "video", Clip(frames, numbers, _BLANK_FRAMES, _BLANK_RATE).given())
        row_tokens(config, processor, "video", text)
        black = np.zeros((_FEW_FRAMES, *_LARGE_SIDES, 3), np.uint8)
        noise = np.random.default_rng(0).integers(0, 256, black.shape, dtype=np.uint8)
        clips = [Clip(frames, tuple(range(_FEW_FRAMES)), _FEW_FRAMES, _BLANK_RATE) for frames in (black, noise)]
        one, other = (replaced(processor, "video", clip.given()) for clip in clips)
        if one != other:  # what it shows decides how many rows it has, as in VideoLLaMA 3
            return False
    except (AttributeError, ImportError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        return False
    return hasattr(base_of(config), "get_video_features")


_BLANK_RATE = 8.0


def takes_sounds(config: Any, processor: Any) -> bool:
    """Whether the processor says what stands for a sound, and the model has a tower for it, and does not tell
    modalities apart in its text: a trial shows such a model pictures alone."""
    if not isinstance(getattr(processor, "audio_token", None), str) or not hasattr(
        base_of(config), "get_audio_features"
    ):
        return False
    if any("token_type_ids" in name for name in inspect.signature(class_of(config).forward).parameters):
        return False
    if getattr(getattr(processor, "feature_extractor", None), "sampling_rate", None) != SOUND_RATE:
        return False
    try:
        text = replaced(processor, "audio", Sound(np.zeros(SOUND_RATE, np.float32)).given())
        row_tokens(config, processor, "audio", text)
    except (AttributeError, ImportError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        return False
    return True


def takes_video_sound(config: Any, processor: Any) -> bool:
    """Whether the processor puts a video's sound between its frames, and the model counts places so, where it has a
    rule of its own."""
    base = base_of(config)
    if hasattr(base, "get_rope_index") and _SOUND_IN_VIDEO not in inspect.signature(base.get_rope_index).parameters:
        return False
    frames, silence = np.zeros((_FEW_FRAMES, *_BLANK_SIDES, 3), np.uint8), np.zeros(SOUND_RATE, np.float32)
    clip = Clip(frames, tuple(range(_FEW_FRAMES)), _FEW_FRAMES, _BLANK_RATE, silence)
    try:
        text = replaced(processor, "video", clip.given())
        tokens = [row_tokens(config, processor, kind, text) for kind in ("video", "audio")]
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


def marks_of(config: Any) -> list[int]:
    """Tokens around a picture whose rows its tower gives, in the tower's order."""
    return list(getattr(config, "visual_indicator_token_ids", None) or ())


def _check_processor(processor: Any) -> None:
    """Raises CheckpointError where it does not say what stands for an item."""
    kind = item_of(processor)
    try:
        replaced(processor, kind, _blanks(kind)[0])
    except (AttributeError, TypeError, ValueError, KeyError, IndexError, RuntimeError) as error:
        what = f"{type(processor).__name__} does not say what stands for a {_WORDS[kind]} in a prompt"
        raise CheckpointError(what) from error


def _blanks(kind: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Two items without content, each alone, and both together."""
    if kind == "audio":
        sounds = [np.zeros(length, np.float32) for length in _LENGTHS]
        return {"audio": sounds[:1]}, {"audio": sounds[1:]}, {"audio": sounds}
    pictures = [Image.new("RGB", size) for size in _SIZES]
    return {"images": pictures[:1]}, {"images": pictures[1:]}, {"images": pictures}


def stand_alone(processor: Any) -> bool:
    """Whether two items in one prompt are made into what each is made into alone."""
    kind = item_of(processor)
    try:
        first, second, both = (
            replaced(processor, kind, each, count) for each, count in zip(_blanks(kind), (1, 1, 2), strict=True)
        )
    except (TypeError, ValueError, KeyError, IndexError, RuntimeError):
        return False
    return first + _between(processor, kind) + second == both


def makes_tokens(base: Any) -> bool:
    """Whether a model below its head makes tokens of a picture, whose rows it has in its table of tokens."""
    return hasattr(base, "get_image_tokens")


def _are_padded(processor: Any) -> bool:
    """Whether two pictures of different size get one size, by what is no part of either; which tokens are made of one
    depends on all of its pixels."""
    alone, _, both = (
        processor(text=[_BETWEEN.join([wrapped(processor, "image")] * count)], return_tensors="pt", **each)
        for each, count in zip(_blanks("image"), (1, 1, 2), strict=True)
    )
    return bool(alone["pixel_values"].shape[-2:] != both["pixel_values"].shape[-2:])


_SIZES = (64, 48), (60, 180)
_LENGTHS = 20_000, 30_000
_BETWEEN = " and "


def replaced(processor: Any, modality: str, media: Mapping[str, Any], count: int = 1) -> str:
    """What a processor makes of so many placeholders with a word between them. Raises ValueError where it does not say
    so."""
    text = _BETWEEN.join([wrapped(processor, modality)] * count)
    made = processor(text=[text], return_text_replacement_offsets=True, return_tensors="pt", **media)
    if "text_replacement_offsets" not in made:
        raise ValueError(f"{type(processor).__name__} does not say what stands for a {modality} in a prompt")
    found = made["text_replacement_offsets"][0]
    return _between(processor, modality).join(each["replacement"] for each in found)


def _between(processor: Any, modality: str) -> str:
    """What is between two placeholders, each with what is wanted around it."""
    before, behind = _wrappers(processor, modality)
    return behind + _BETWEEN + before


def frame_of(processor: Any) -> PromptFrame | None:
    """What a processor sets into prompts beside what stands for items: found in one prompt, and tried in it and another
    with two items, where there may be two. Raises CheckpointError where it sets something else than a frame has."""
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
        frame = msgspec.structs.replace(frame, always=_is_around_texts(processor, frame))
        try:
            more, parts = _laid_out(processor, kind, two, 2)
        except (TypeError, ValueError, KeyError, IndexError, RuntimeError):
            return frame  # it takes one
        if more == _framed_ids(processor, frame, parts):
            return frame
    elif decode(made) == decode(own):  # the same, cut otherwise
        return None
    raise CheckpointError(f"{type(processor).__name__} sets something into prompts that is not known here")


def _is_around_texts(processor: Any, frame: PromptFrame) -> bool:
    """Whether it is set around a text without items too."""
    try:
        made = processor(text=[_BEFORE], return_tensors="pt")["input_ids"][0].tolist()
    except (AttributeError, TypeError, ValueError, KeyError, IndexError, RuntimeError):
        return False
    return bool(made == _plain_ids(processor, f"{frame.begin}{_BEFORE}{frame.end}"))


_BEFORE, _AFTER = "left", "right"


def _laid_out(processor: Any, kind: str, media: Mapping[str, Any], count: int) -> tuple[list[int], list[str]]:
    """The ids that a processor makes of so many items between two words, and what we have them made of: a word, what
    stands for all items and between them, a word."""
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


def check(config: Any) -> None:
    """Raises CheckpointError for what a class of models alone says that we cannot serve."""
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise CheckpointError(f"{kind} has an encoder for its text beside the decoder")
    if getattr(config, "canvas_length", None):
        raise CheckpointError(f"{kind} writes stretches of an answer at once, by diffusion")
    if _INDEXED in (getattr(config.get_text_config(decoder=True), "layer_types", None) or ()):
        raise CheckpointError(f"layers of {kind} choose the tokens that they see by an index of their own")
    base = base_of(config)
    apart = [each for each in _EXTRACTORS if hasattr(base, f"get_{each}_features")]
    if not apart:
        whole = not any(isinstance(part, library().PreTrainedConfig) for part in vars(config).values())
        why = "is for text alone" if whole else "does not keep the rows of pictures apart from the rest"
        raise CheckpointError(f"{kind} {why}")
    if getattr(config, f"{apart[0]}_token_id", None) is None:
        raise CheckpointError(f"{kind} does not state the token at whose places rows go")


_INDEXED = "indexed_attention"
"""What a configuration calls layers that score all tokens before one, and attend to the best of them."""
_LONGEST = 32768
"""Tokens of a context whose bound no configuration states."""


def row_token(config: Any) -> int:
    """The token at whose places a picture's rows go, or a sound's where the model knows no pictures."""
    found = getattr(config, "image_token_id", None)
    return int(config.audio_token_id if found is None else found)


def base_of(config: Any) -> Any:
    """The model below its head of logits, without weights."""
    with torch.device("meta"):
        return class_of(config)(config).base_model


def decoder_of(model: Any) -> Any:
    """A model's text layers, without the head of logits that the library takes for one of them in some."""
    found, head = model.get_decoder(), model.get_output_embeddings()
    if found is model or head is None or all(part is not head for part in found.modules()):
        return found
    return next((part for part in found.children() if isinstance(part, library().PreTrainedModel)), found)


def layers_of_levels(config: Any) -> list[int]:
    """The layer that each level of a row is added before, where a configuration says so; then nothing of a picture is
    among the embeddings. A layer takes the last of those that are for it."""
    found = getattr(config, "deepstack_layer_map", None) or ()
    return [*(layer for _, layer in found), *(getattr(config, "spatial_target_layers", None) or ())] if found else []


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
    if _CANVAS in known:
        raise CheckpointError(f"{type(base).__name__} gives marks between rows places of their own, on a canvas")
    found = base.get_rope_index(**{name: named[name] for name in known if name in named})[0][:, 0]
    if len(found) == _AXES + 1 and torch.equal(found[0], torch.arange(found.shape[1])):
        found = found[1:]
    if len(found) != _AXES:
        raise CheckpointError(f"{type(base).__name__} counts places on {len(found)} axes")
    positions: torch.Tensor = found.long()
    if not torch.equal(positions, found):
        raise ValueError(f"{type(base).__name__} counts places between whole numbers")
    return positions


def axes_of(config: Any) -> int:
    """The axes on which a model counts places: 1, 3, or 4 where each token's own number is another, before these."""
    if not hasattr(base_of(config), "get_rope_index"):
        return 1
    rope = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    return max(_AXES, len(rope.get("mrope_section") or ()))


_AXES = 3
_CANVAS = "target_sizes"
"""What a rule of positions wants that lays slices of a picture out on the whole."""
_SOUND_IN_VIDEO = "use_audio_in_video"
_RENAMED: dict[str, tuple[str, Callable[[Mapping[str, Any]], Any]]] = {
    "audio_seqlens": ("feature_attention_mask", lambda made: made["feature_attention_mask"].sum(-1)),
    "second_per_grids": ("video_second_per_grid", lambda made: torch.as_tensor(made["video_second_per_grid"])),
}
"""What the rule of positions calls otherwise than the processor, and how it is made of that."""


def missing(error: ImportError) -> str:
    """What the library lacks, in one sentence."""
    wanted = re.search(r"requires the (\w+) library", str(error))
    return f"the library wants a package that is not installed here: {wanted[1] if wanted else error.name}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


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
