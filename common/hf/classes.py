"""transformers itself, the class that a checkpoint is of, and no more of its model than one service needs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import safe_open
from torch import nn

from common.checkpoints.checkpoint import Checkpoint, CheckpointError

_KEPT: list[torch.library.Library] = []


@cache
def declare_operators() -> None:
    """To be called before transformers is imported, whose processors import torchvision, which has no CPU build in the
    ordinary index. If the ordinary wheel is installed beside a CPU torch, two compiled operators are missing, which
    would prevent its import; they are declared here, and processors call neither."""
    try:
        import torchvision  # type: ignore[import-untyped]  # noqa: F401
    except (ImportError, RuntimeError):  # none, or "operator torchvision::nms does not exist"
        declared = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            declared.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(declared)


@cache
def transformers() -> Any:
    """The transformers package."""
    declare_operators()
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def config_of(folder: Path) -> Any:
    """The checkpoint's configuration with all defaults; for a model that also speaks, its thinker's. Quantisation is
    left out, since transformers does not read quantised weights here. Raises CheckpointError if transformers does not
    know the model."""
    kind = Checkpoint(folder).config.get("model_type", "?")
    if kind not in transformers().CONFIG_MAPPING:
        raise CheckpointError(f"{kind} is not supported: neither a family of ours nor transformers knows it")
    try:
        found = transformers().AutoConfig.from_pretrained(folder, local_files_only=True)
    except (AttributeError, KeyError, OSError, TypeError, ValueError, StrictDataclassError) as error:
        raise CheckpointError(f"transformers cannot read the configuration of {kind}: {first_line(error)}") from error
    found = getattr(found, "thinker_config", found)
    for part in (found, found.get_text_config(decoder=True)):
        vars(part).pop("quantization_config", None)
    state_tokens(found)
    return found


def state_tokens(config: Any) -> None:
    """Sets, in a configuration itself, the placeholder tokens that only parts of it state."""
    for kind, part in (("image", "vision_config"), ("audio", "audio_config")):
        token = getattr(getattr(config, part, None), name := f"{kind}_token_id", None)
        if token is not None and getattr(config, name, None) is None:
            setattr(config, name, token)


def class_of(config: Any) -> Any:
    """The class of models that read pictures, or hear sounds, and write text. Raises CheckpointError if there is
    none."""
    lists = "AutoModelForImageTextToText", "AutoModelForMultimodalLM", "AutoModelForPreTraining"
    for every in (getattr(transformers(), name)._model_mapping for name in lists):
        if type(config) in every:
            found = every[type(config)]
            made = found[0] if isinstance(found, tuple) else found
            if every is not transformers().AutoModelForPreTraining._model_mapping or hasattr(
                made, "get_audio_features"
            ):
                return made
    raise CheckpointError(f"{config.model_type} is not a model that reads pictures and writes text")


def load(
    folder: Path,
    strip: Callable[[Any], None],
    dtype: torch.dtype,
    device: torch.device,
    tensors: Sequence[str] = ("",),
) -> Any:
    """The checkpoint's model without the parts that `strip` removes, whose weights are not read; only shards with a
    tensor whose name begins with one of `tensors` are needed. Raises CheckpointError if transformers cannot read the
    rest, if that is quantised, or, in a quantised checkpoint, missing."""
    config, whole = config_of(folder), Checkpoint(folder)
    files = whole.part(tensors).weight_files()
    made = partial(
        without(class_of(config), strip).from_pretrained,
        config=config,
        dtype=dtype,
        local_files_only=True,
        output_loading_info=True,
    )
    try:
        if files == whole.weight_files():
            model, told = made(folder, adapter_kwargs=_NO_ADAPTER)
        else:  # it reads all that an index names
            with ExitStack() as opened:
                shards = [opened.enter_context(safe_open(folder / name, "pt")) for name in files]
                slices = {name: shard.get_slice(name) for shard in shards for name in shard.keys()}  # noqa: SIM118
                model, told = made(None, state_dict=slices)
    except CheckpointError:  # of `strip`
        raise
    except (ValueError, OSError, RuntimeError, KeyError) as error:
        raise CheckpointError(f"transformers cannot load the model: {first_line(error)}") from error
    weights = {name.removesuffix(".weight") for name, _ in model.named_parameters()}
    beside = (_OF_QUANTISED.fullmatch(name) for name in told["unexpected_keys"])
    if quantised := sorted({found[1] for found in beside if found is not None} & weights):
        raise CheckpointError(f"transformers is to compute {quantised[0]}, whose weight is quantised")
    if (lacking := sorted(told["missing_keys"])) and _is_quantised(Checkpoint(folder).config):
        what = "or has it quantised in parts that transformers puts together"
        raise CheckpointError(f"the checkpoint lacks {lacking[0]}, {what}")
    model.eval().requires_grad_(requires_grad=False)
    return model.to(device)


def _is_quantised(config: Mapping[str, Any]) -> bool:
    return bool(config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config"))


_NO_ADAPTER = {"subfolder": "there is none"}
"""Where transformers looks for an adapter if peft is installed: we apply adapters beside the weights ourselves."""
_OF_QUANTISED = re.compile(r"(.*)(?:\.qweight|[._]weight_(?:packed|scale|scale_inv)|\.weight\.quant_map|\.SCB)")
"""A tensor of a quantised weight, in any format, and what it belongs to: a module, or a tensor of several experts."""


def without(whole: Any, strip: Callable[[Any], None]) -> Any:
    """A class whose models are created, and so loaded, without the parts that `strip` removes."""

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
    """The towers, or parts that contain some, inside a decoder that is everything below its model's head."""
    whole = transformers().PreTrainedModel
    return [part for part in decoder.children() if any(isinstance(each, whole) for each in part.modules())]


def blank_of(config: Any) -> Any:
    """The model of a configuration without weights; a deep one takes seconds. Raises CheckpointError if transformers
    cannot create it."""
    made = class_of(config)
    try:
        with torch.device("meta"):
            return made(config)
    except ImportError:  # of a package that is missing
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        what = f"transformers makes no model of this configuration of {config.model_type}"
        raise CheckpointError(f"{what}: {first_line(error)}") from error


def decoder_of(model: Any) -> Any:
    """A model's text layers, without the head of logits that transformers takes for one of them in some."""
    found, head = model.get_decoder(), head_of(model)
    if found is model or head is None or all(part is not head for part in found.modules()):
        return found
    within = next((part for part in found.children() if isinstance(part, transformers().PreTrainedModel)), found)
    return within if within is found else within.get_decoder()


def head_of(model: Any) -> Any:
    """A model's logit head, or that of the text model within it; None if there is none."""
    found, text = model.get_output_embeddings(), model.get_decoder()
    return text.get_output_embeddings() if found is None and text is not model else found


def speaking(model: Any) -> Any:
    """The part that generates text: a model, or the text's own model within one that needs a picture."""
    pixels = inspect.signature(model.forward).parameters.get("pixel_values")
    return model if pixels is None or pixels.default is None else model.language_model


def complete(model: Any) -> Any:
    """The model. In some releases (Llama 4, 5.24) it reads a picture's outputs from its text's, where its own forward
    would fail; here they are None then."""

    def without_pictures(_: Any, __: Any, outputs: Any) -> None:
        if hasattr(outputs, "logits") and not hasattr(outputs, "image_outputs"):
            outputs.image_outputs = None

    text = getattr(model, "language_model", None)
    if isinstance(text, nn.Module):
        text.register_forward_hook(without_pictures)
    return model


def mark_tables_of(model: Any) -> dict[str, Any]:
    """A model's tables of tokens that its text's own has none of, by their names, each for `vocab_size` of them from
    `vocab_offset` on."""
    return {name: part for name, part in model.named_modules() if hasattr(part, "vocab_offset")}


def layers_of_levels(config: Any) -> list[int]:
    """The layer that each level of rows is added before, if a configuration says so; then nothing of a picture is among
    the embeddings. A layer takes the last of the levels for it."""
    found = getattr(config, "deepstack_layer_map", None) or ()
    return [*(layer for _, layer in found), *(getattr(config, "spatial_target_layers", None) or ())] if found else []


def missing(error: ImportError) -> str:
    """What transformers lacks, in one sentence."""
    wanted = re.search(r"requires the (\w+) library", str(error))
    return f"transformers needs a package that is not installed here: {wanted[1] if wanted else error.name}"


def first_line(error: BaseException) -> str:
    """An error's message, cut to a line; its type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
