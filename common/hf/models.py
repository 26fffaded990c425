"""Describes a checkpoint by transformers, and checks whether we can serve it.

As a process, `python -m common.hf.models FOLDER`, it writes what `common.hf.description.describe` reads.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from common.hf.classes import blank_of, config_of, head_of, missing, transformers
from common.hf.description import HfModel, Refusal
from common.hf.features import features_of, lacking
from common.hf.layouts import RUN, SEAM
from common.hf.positions import axes_of, pinned_of
from common.hf.processors import (
    EXTRACTORS,
    are_filled_up,
    are_padded,
    check_processor,
    frame_of,
    item_of,
    number_mark,
    placeholder_of,
    processor_of,
    rate_of,
    stand_alone,
)
from common.hf.rows import (
    level_count,
    makes_tokens,
    row_token,
    takes_sounds,
    takes_video_sound,
    takes_videos,
    together_of,
)
from common.hf.towers import tower_tensors


def describe(folder: Path) -> HfModel:
    """See `common.hf.description.describe`. Raises CheckpointError, in one sentence, if the checkpoint is not
    served."""
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
    told = HfModel(
        architecture=type(model).__name__,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        max_position=longest_context(text),
        long_rope_threshold=long_rope_threshold(text),
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
        duration_mark=getattr(processor, _LENGTH_MARK, None) or "",
    )
    return msgspec.structs.replace(told, tower_tensors=tuple(tower_tensors(Checkpoint(folder), model)))  # the last


_LENGTH_MARK = "audio_duration_token"
"""A processor's attribute: the text that stands for a sound's seconds."""


def _depends_on_others(model: Any, processor: Any) -> bool:
    """Whether an item's layout, or its rows, depend on the number of items in a prompt."""
    if not stand_alone(processor):
        return True
    if item_of(processor) == "audio":
        return are_filled_up(processor)
    return makes_tokens(model.base_model) and are_padded(processor)


def longest_context(text: Any) -> int:
    """The context's length in a text's configuration. If some kinds of layers use other frequencies for long sequences,
    at most the length stated for these."""
    rope = getattr(text, "rope_parameters", None) or {}
    first = [_turned_beyond(each, text) for each in rope.values() if isinstance(each, dict)]
    known = getattr(text, "max_position_embeddings", None) or _LONGEST
    return int(min([known, *(length for length in first if length)]))


def long_rope_threshold(text: Any) -> int:
    """`HfModel.long_rope_threshold` of a text's configuration."""
    return _turned_beyond(getattr(text, "rope_parameters", None) or {}, text)


def _turned_beyond(rope: Mapping[str, Any], text: Any) -> int:
    """The longest sequence that is turned by the first frequencies of LongRoPE; 0: it is not by that."""
    found = rope.get(_FIRST) or getattr(text, _FIRST, None) if rope.get("rope_type") == "longrope" else 0
    return int(found or 0)


_FIRST = "original_max_position_embeddings"


def own_adapters(config: Any, folder: Path) -> dict[str, str]:
    """`HfModel.adapters` of a checkpoint. Raises CheckpointError if its kind, or its configuration, has some and the
    folder does not."""
    found = {"audio": "."} if getattr(config, "has_lora_adapter", False) else lacking(config).adapters
    for kind, path in found.items():
        if not (folder / path / ADAPTER_CONFIG).is_file():
            why = f"{config.model_type} computes prompts with {_SEVERAL[kind]} by an adapter"
            where = f"in {path}" if path != "." else "beside its weights"
            raise CheckpointError(f"{why}, and there is no {ADAPTER_CONFIG} {where}")
    return dict(found)


ADAPTER_CONFIG = "adapter_config.json"


_SEVERAL = {"image": "pictures", "audio": "sounds"}


def text_of(model: Any) -> dict[str, Any]:
    """The text's part of a model's configuration as JSON has it, every default filled in; whether its head is its table
    of tokens the model says."""
    text, head = model.config.get_text_config(decoder=True), head_of(model)
    found: dict[str, Any] = msgspec.json.decode(text.to_json_string(use_diff=False))
    found |= _NOT_OF_THE_HEAD.get(model.config.model_type, {})
    return {**found, "tie_word_embeddings": head is not None and head.weight is model.get_input_embeddings().weight}


_NOT_OF_THE_HEAD = {kind: {"logits_scaling": 1.0} for kind in ("granite_speech", "granite_speech_plus")}
"""Settings of a text's logit head that transformers ignores in the model around it, with the value that it computes
with, by kind of model."""


def checked(config: Any) -> Any:
    """The model of a configuration without weights. Raises CheckpointError if its class shows that we cannot serve
    it."""
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise CheckpointError(f"{kind} has a text encoder besides its decoder")
    if getattr(config, "canvas_length", None):
        raise CheckpointError(f"{kind} writes parts of an answer at once, by diffusion")
    text = config.get_text_config(decoder=True)
    if _INDEXED in (getattr(text, "layer_types", None) or ()) and text.model_type not in _KNOWN_INDICES:
        raise CheckpointError(f"layers of {kind} choose the tokens that they see by an index of their own")
    if (getattr(text, "loop_num_passes", None) or 1) > 1:
        raise CheckpointError(f"{kind} goes through some of its layers several times, each time with keys of its own")
    if getattr(text, "output_vocab_size", None) not in (None, text.vocab_size):
        raise CheckpointError(f"{kind} has logits of fewer tokens than its prompts are made of")
    model = blank_of(config)
    found = {modality: features_of(model.base_model, modality) for modality in EXTRACTORS}
    apart = {modality: compute for modality, compute in found.items() if compute is not None}
    if not apart:
        parts = {name for name, part in vars(config).items() if isinstance(part, transformers().PreTrainedConfig)}
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
"""An argument of methods that compute rows, if they are told the prompt's text."""


_OF_A_STREAM = "padding_cache"
"""An argument of methods that compute rows, if they continue a sound from their last pass."""


_INDEXED = "indexed_attention"
"""The configuration's name for layers that score all earlier tokens and attend to the best ones."""


_KNOWN_INDICES = ("mistral_large4_text", "dots3_note_text", "glm5_next_text", "hy_v4_vl_text")
"""Texts whose index the LLM service knows."""


_LONGEST = 32768
"""Tokens of a context if the configuration states no bound."""


def main(folder: Path) -> None:
    """Writes the description, or why there is none, as a line of JSON."""
    answer: HfModel | Refusal
    try:
        answer = describe(folder)
    except CheckpointError as error:
        answer = Refusal(str(error))
    except ImportError as error:
        answer = Refusal(missing(error))
    sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
