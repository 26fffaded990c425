"""Fills a decoder from a checkpoint, reading text weights alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from common import log
from common.checkpoint import Checkpoint, CheckpointError
from common.linear import finalize_linears
from common.weights import SliceReader
from llm_service.layers.cpu import selection
from llm_service.layers.group import ALONE, TensorGroup
from llm_service.layers.linear import Finalized, PackedLinear, Place, Placed, Stored, fill, path_within
from llm_service.layers.weight_dtype import Rounded
from llm_service.models.config import TextConfig
from llm_service.models.decoder import Decoder
from llm_service.models.draft_head import DraftHead
from llm_service.models.eagle import EagleDecoder
from llm_service.models.eagle_config import EagleConfig
from llm_service.models.mtp import MtpDecoder
from llm_service.models.parted_tensors import PartedTensors
from llm_service.models.quantization_config import Scheme
from llm_service.models.quantized import load_weights, tell_of_cache

_log = log.get("loader")

# Where the text side stands: Qwen2-VL and Qwen2.5-VL on the hub use `model.`, newer saves the longer one.
_TEXT = re.compile(
    r"^(?:model\.language_model|language_model\.model|model)\.(?=embed_tokens|layers|norm|per_layer_|hyper_connection_mixer)"
)
_MTP, _MIDDLE = "mtp.", "midlayer."
HEAD, TABLE = "lm_head.weight", "embed_tokens.weight"
"""What a decoder calls its matrix of logits, and its table of tokens."""
_ROWS = 4096
_HEAD = re.compile(r"^(?:language_model\.)?lm_head\.weight$")


@dataclass(frozen=True, slots=True)
class TextSide:
    """What of a checkpoint a decoder computes: its shape, and the decoder's own name for each of its tensors, None for
    those of other sides; `parted` are those that are others there."""

    config: TextConfig
    own_name: Callable[[str], str | None]
    parted: PartedTensors = field(default_factory=PartedTensors)

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> TextSide:
        """Of a family of ours; raises CheckpointError as `TextConfig.of`. A head that is stored besides the table of
        tokens, and is another, counts, whatever config.json says of it."""
        config = TextConfig.of(checkpoint.config)
        stored = {_own_name(name, tied=False): name for name in checkpoint.tensors}
        if config.tied and HEAD in stored and TABLE in stored:
            config = replace(config, tied=equal_tensors(checkpoint, stored[HEAD], stored[TABLE]))
        return cls(config, partial(_own_name, tied=config.tied))


def load_decoder(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    group: TensorGroup = ALONE,
    *,
    weight_dtype: str = "",
    text: TextSide | None = None,
) -> Decoder:
    """Builds one rank's share of the checkpoint's decoder on a device, reading that share alone; `text` says what of
    the checkpoint that is, None: what its family does.

    `weight_dtype` int8 rounds the matrices of the layers and of the head, each rank its own share; embeddings and norms
    stay. On a CPU whose products of bfloat16 are ours, these and what is kept of tokens (`Decoder.kv_dtype`) alone are
    bfloat16, with sums in float32: what is between them is float32 (`Decoder.dtype`). Raises CheckpointError where a
    weight is missing or does not fit, or the ranks cannot share the model.
    """
    text, int8 = text or TextSide.of(checkpoint), weight_dtype == "int8"
    scheme = Scheme.of(checkpoint.config)
    if int8 and scheme is not None:
        raise CheckpointError("--weight-dtype int8 is for weights that the checkpoint has not quantised")
    rounded, kept = Rounded(int8=int8), dtype
    if dtype == torch.bfloat16 and device.type == "cpu" and selection.computes_bfloat16():
        dtype, rounded = torch.float32, Rounded(int8=int8, bfloat16=True)
    try:
        # Where weights stay quantised, their long forms are never written to: they cost a CPU nothing, a GPU all.
        decoder = Decoder(text.config, group, dtype, torch.device("cpu") if scheme is not None else device)
        decoder.kv_dtype = kept
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    if scheme is not None:
        _log.info("weights stay as they are quantised", method=scheme.method)
    tell_of_cache(checkpoint)
    _fill(decoder, text.parted.pieces(load_weights(checkpoint, text.own_name)), device, rounded)
    return decoder.eval()


def fill_plain(decoder: Decoder, tensors: Iterable[tuple[str, Tensor]]) -> Decoder:
    """Fills a decoder that is to compute with torch's operators alone, by the names that it has for them. Raises
    CheckpointError as `load_decoder`."""
    _read(decoder, ((name, InMemory(tensor)) for name, tensor in tensors), lambda _, place, stored: place(stored))
    return decoder.eval()


def load_mtp(
    checkpoint: Checkpoint,
    target: Decoder,
    dtype: torch.dtype,
    *,
    weight_dtype: str = "",
    text: TextSide | None = None,
) -> MtpDecoder:
    """The layer that predicts one token more, beside the decoder of the same checkpoint, which is loaded, with
    the same types and the same `text` as `load_decoder`. Raises CheckpointError where the checkpoint has none."""
    settings = {**checkpoint.config, **(checkpoint.config.get("text_config") or {})}
    shape = target.config
    if any(several is not None for several in (shape.streams, shape.balanced, shape.opened, shape.alternating)):
        raise CheckpointError("multi-token prediction is not known for texts with several streams between layers")
    if settings.get("mtp_use_dedicated_embeddings"):
        raise CheckpointError("embeddings of its own for multi-token prediction are not supported")
    if not any(name.startswith(_MTP) for name in checkpoint.tensors):
        raise CheckpointError("the checkpoint has no layer for multi-token prediction: there are no weights mtp.*")
    rounded = Rounded(int8=weight_dtype == "int8", bfloat16=dtype == torch.bfloat16 and target.dtype == torch.float32)
    try:
        decoder = MtpDecoder(target)
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    weights = load_weights(checkpoint, _mtp_name), _ends(decoder, checkpoint, text)
    _fill(decoder, chain(*weights), target.device, rounded)
    return decoder.eval()


def load_eagle(
    checkpoint: Checkpoint,
    target: Decoder,
    of: Checkpoint,
    dtype: torch.dtype,
    *,
    weight_dtype: str = "",
    text: TextSide | None = None,
) -> EagleDecoder:
    """An EAGLE-3 head beside the decoder that it was trained for, which is loaded, `of` its checkpoint, with the same
    types and the same `text` as `load_decoder`. Raises CheckpointError where it is none, or is not for that one."""
    shape = target.config
    if any(several is not None for several in (shape.streams, shape.balanced, shape.opened, shape.alternating)):
        raise CheckpointError("a head is not known for texts with several streams between layers")
    config = checkpoint.config
    if any(name.removeprefix("model.").startswith(_MIDDLE) for name in checkpoint.tensors):
        config = {**config, "num_hidden_layers": 1}  # the one, where some state those of the model
    eagle = EagleConfig.of(config, shape.layers)
    stored = {own: name for name in checkpoint.tensors if (own := _eagle_name(name)) is not None}
    head, table, words = HEAD in stored, TABLE in stored, eagle.vocab_size
    tied = eagle.ties and table and not head and words == eagle.text.vocab_size
    if not table and eagle.text.hidden_size != shape.hidden_size:
        raise CheckpointError("it has no embeddings, and those of the model have another width")
    if not (head or tied) and (words, eagle.text.hidden_size) != (shape.vocab_size, shape.hidden_size):
        raise CheckpointError(f"it has no {HEAD}, and that of the model is for other words or another width")
    if not table:
        eagle = replace(eagle, text=replace(eagle.text, vocab_size=shape.vocab_size))
    known = min(shape.vocab_size, eagle.text.vocab_size)
    if words > known:
        raise CheckpointError(f"it says {words} words, and is given {known}")
    if "layers.0.self_attn.o_proj.bias" in stored:
        biased = replace(eagle.text.family, output_biases=True)
        eagle = replace(eagle, text=replace(eagle.text, family=biased))
    rounded = Rounded(int8=weight_dtype == "int8", bfloat16=dtype == torch.bfloat16 and target.dtype == torch.float32)
    try:
        decoder = EagleDecoder(eagle, target, own_embeddings=table, own_head=head or tied)
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    if tokens := [name for name in checkpoint.tensors if name.rpartition(".")[2] == "d2t"]:
        decoder.means(_meanings(checkpoint, tokens[0], words, known))
    elif words != shape.vocab_size:
        raise CheckpointError("it has no d2t, which says what tokens its words are")
    weights = load_weights(checkpoint, _eagle_name)
    has = {*stored, HEAD} if tied else set(stored)
    _fill(
        decoder,
        chain(_with_head(weights) if tied else weights, _ends(decoder, of, text, but=has)),
        target.device,
        rounded,
    )
    return decoder.eval()


def _with_head(weights: Iterable[tuple[str, Stored]]) -> Iterator[tuple[str, Stored]]:
    """The same, and the table of tokens as matrix of logits."""
    for name, stored in weights:
        yield name, stored
        if name == TABLE:
            yield HEAD, stored


def _ends(
    decoder: DraftHead, checkpoint: Checkpoint, text: TextSide | None, *, but: Collection[str] = ()
) -> Iterator[tuple[str, Stored]]:
    """What a head has to be given of the model's table of tokens and matrix of logits, `but` for what it has."""
    wanted = {TABLE, HEAD}.intersection(name for name, _ in targets(decoder, tied=decoder.config.tied)).difference(but)
    if not wanted:
        return
    text = text or TextSide.of(checkpoint)
    for name, stored in text.parted.pieces(load_weights(checkpoint, text.own_name)):
        if name in wanted:
            yield name, stored
        if name == TABLE and text.config.tied and HEAD in wanted:
            yield HEAD, stored


def _meanings(checkpoint: Checkpoint, name: str, words: int, tokens: int) -> Tensor:
    """The token of each of a head's words, int64 [words]: stored is how far it is behind the word's own number."""
    found: Tensor | None = None
    if tuple(checkpoint.tensors[name].shape) == (words,):
        with SliceReader(checkpoint) as reader:
            found = torch.arange(words) + reader[name][:].to(torch.int64)
    if found is None or int(found.min()) < 0 or int(found.max()) >= tokens:
        raise CheckpointError(f"{name} does not say what tokens of the model its {words} words are")
    return found


def _eagle_name(name: str) -> str | None:
    """The decoder's name for a tensor of an EAGLE-3 head; None for what tells which words it has."""
    name = name.removeprefix("model.")
    if name in ("d2t", "t2d", "verifier_lm_head.weight", "verifier_norm.weight"):
        return None
    return f"layers.0.{name.removeprefix(_MIDDLE)}" if name.startswith(_MIDDLE) else name


def _fill(decoder: Decoder, weights: Iterable[tuple[str, Stored]], device: torch.device, rounded: Rounded) -> None:
    """Reads what a decoder needs, by the names that it has there, and has it laid out on a device."""
    _read(decoder, weights, partial(_place, device=device, rounded=rounded))
    decoder.to(device)
    for part in decoder.modules():
        if isinstance(part, PackedLinear):
            part.finalize(rounded=rounded)
    finalize_linears(decoder)
    decoder.finalize()


def _read(
    decoder: Decoder, weights: Iterable[tuple[str, Stored]], place: Callable[[nn.Module, Place, Stored], None]
) -> None:
    """Has each of a decoder's weights put in its place. Raises CheckpointError where one is missing or does not
    fit."""
    needed = dict(targets(decoder, tied=decoder.config.tied))
    missing = set(needed)
    for name, stored in weights:
        if name not in needed:
            raise CheckpointError(f"{name} does not fit the model: there is no place for it")
        try:
            place(*needed[name], stored)
        except ValueError as error:
            raise CheckpointError(f"{name} does not fit the model: {error}") from error
        missing.discard(name)
    missing -= {name for name in missing if isinstance(module := needed[name][0], Finalized) and module.whole()}
    if missing:
        raise CheckpointError(f"the checkpoint lacks {', '.join(sorted(missing)[:3])}")


def equal_tensors(checkpoint: Checkpoint, one: str, other: str) -> bool:
    """Whether two matrices are equal; one that is quantised has no tensor of its name."""
    found = [checkpoint.tensors.get(name) for name in (one, other)]
    if None in found or len({(info.dtype, info.shape) for info in found if info is not None}) > 1:
        return False
    with SliceReader(checkpoint) as reader:
        first, second = reader[one], reader[other]
        rows = range(0, first.get_shape()[0], _ROWS)
        return all(torch.equal(first[row : row + _ROWS], second[row : row + _ROWS]) for row in rows)


def _mtp_name(name: str) -> str | None:
    return name.removeprefix(_MTP) if name.startswith(_MTP) else None


def _own_name(name: str, *, tied: bool) -> str | None:
    """The decoder's name for a checkpoint tensor; None for vision weights and for a head that is tied anyway."""
    if _HEAD.match(name):
        return None if tied else "lm_head.weight"
    return _TEXT.sub("", name) if _TEXT.match(name) else None


def targets(module: nn.Module, path: str = "", *, tied: bool = False) -> Iterator[tuple[str, tuple[nn.Module, Place]]]:
    """Every tensor that a decoder needs, by the name that `_own_name` gives it, with the module that holds it and what
    reads it."""
    for attribute, child in module.named_children():
        if tied and attribute == "lm_head":
            continue
        if isinstance(child, Placed):
            for name, place in child.targets(getattr(child, "stored_as", attribute)).items():
                yield path + name, (child, place)
            continue
        below = path_within(path, attribute, child)
        for name, parameter in child.named_parameters(recurse=False):
            yield below + name, (child, partial(_copy, parameter))
        yield from targets(child, below)


def _copy(parameter: nn.Parameter, stored: Stored) -> None:
    fill(parameter, stored[:])


class InMemory:
    """A tensor in memory as one in a file."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __getitem__(self, index: Any) -> Tensor:
        return self._tensor[index]

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)


def _place(module: nn.Module, place: Place, stored: Stored, *, device: torch.device, rounded: Rounded) -> None:
    """Reads this rank's share of a tensor. What is whole then, and large, is finalized: so no more than one weight is
    there in a longer type than it will have."""
    place(stored)
    if isinstance(module, Finalized) and module.whole():
        module.to(device)
        module.finalize(rounded=rounded)
