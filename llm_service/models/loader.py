"""Loads a decoder from a checkpoint, reading text weights alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from common.checkpoints.tensors import SliceReader
from common.telemetry import log
from llm_service.layers.cpu import selection
from llm_service.layers.linear.weight_dtype import Rounded
from llm_service.layers.moe.experts import Experts
from llm_service.layers.tensor_parallel import ALONE, TensorGroup
from llm_service.model_config.text import TextConfig
from llm_service.models.cache_scales import read_cache_scales
from llm_service.models.decoder import Decoder
from llm_service.models.filling import fill_decoder, names_elsewhere
from llm_service.models.parted_tensors import PartedTensors
from llm_service.models.quantization_config import Scheme
from llm_service.models.quantized import check_weight_dtype, load_weights

_log = log.get("loader")

# Prefixes of the text's tensors: published Qwen2-VL and Qwen2.5-VL have `model.`, newer files the longer one.
_TEXT = re.compile(
    r"^(?:model\.language_model|language_model\.model|model)\.(?=embed_tokens|layers|norm|per_layer_|hyper_connection_mixer)"
)
HEAD, TABLE = "lm_head.weight", "embed_tokens.weight"
"""The decoder's names of its logit matrix and of its token table."""
_ROWS = 4096
_HEAD = re.compile(r"^(?:language_model\.)?lm_head\.weight$")


@dataclass(frozen=True, slots=True)
class TextSide:
    """The part of a checkpoint that a decoder computes: its shape, and the decoder's name for each of its tensors, None
    for those of other parts; `parted` are those that are split or joined."""

    config: TextConfig
    own_name: Callable[[str], str | None]
    parted: PartedTensors = field(default_factory=PartedTensors)

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> TextSide:
        """The text of a family of ours; raises CheckpointError as `TextConfig.of`. A stored head that differs from the
        token table counts, whatever config.json says."""
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
    cache_scales: bool = False,
) -> Decoder:
    """Builds one rank's partition of the checkpoint's decoder on a device, reading only that part; `text` says what
    belongs to it, None: as the family does.

    `weight_dtype` int8 rounds the matrices of the layers and of the head, each rank its own share, and w8a8 the inputs
    of the layers' as well; embeddings and norms stay. On a CPU with our bfloat16 products, only matrices and cached
    keys and values (`Decoder.kv_dtype`) are bfloat16, with sums in float32; what is between them is float32
    (`Decoder.dtype`). With `cache_scales`, factors of e4m3 keys and values are read as well. Raises CheckpointError if
    a weight is missing, does not fit or cannot be rounded, or the ranks cannot share the model.
    """
    text, scheme = text or TextSide.of(checkpoint), Scheme.of(checkpoint.config)
    check_weight_dtype(weight_dtype, scheme, device)
    if group.expert_parallel and not text.config.experts:
        raise CheckpointError("--enable-expert-parallel is for models with experts, and this one has none")
    rounded, kept = Rounded.of(weight_dtype), dtype
    if dtype == torch.bfloat16 and device.type == "cpu" and selection.computes_bfloat16():
        dtype, rounded = torch.float32, Rounded.of(weight_dtype, bfloat16=True)
    try:
        # If weights stay quantised, the unquantised ones are never written: untouched pages cost nothing on a CPU, but
        # would on a GPU.
        decoder = Decoder(text.config, group, dtype, torch.device("cpu") if scheme is not None else device)
        decoder.kv_dtype = kept
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    if scheme is not None:
        _log.info("weights stay as they are quantised", method=scheme.method)
    weights = load_weights(checkpoint, partial(_name_here, text.own_name, names_elsewhere(decoder)))
    fill_decoder(decoder, text.parted.pieces(weights), device, rounded)
    if cache_scales:
        read_cache_scales(checkpoint, text.own_name, decoder)
    if any(part.cuts_groups for part in decoder.modules() if isinstance(part, Experts)):
        _log.info("parts of experts cut groups of scales: --enable-expert-parallel keeps them whole", ranks=group.size)
    return decoder.eval()


def _name_here(own_name: Callable[[str], str | None], elsewhere: Collection[str], name: str) -> str | None:
    """The decoder's own name for a tensor, None for one that it does not read."""
    own = own_name(name)
    return None if own in elsewhere else own


def equal_tensors(checkpoint: Checkpoint, one: str, other: str) -> bool:
    """Whether two matrices are equal; one that is quantised has no tensor of its name."""
    found = [checkpoint.tensors.get(name) for name in (one, other)]
    if None in found or len({(info.dtype, info.shape) for info in found if info is not None}) > 1:
        return False
    with SliceReader(checkpoint) as reader:
        first, second = reader[one], reader[other]
        rows = range(0, first.get_shape()[0], _ROWS)
        return all(torch.equal(first[row : row + _ROWS], second[row : row + _ROWS]) for row in rows)


def _own_name(name: str, *, tied: bool) -> str | None:
    """The decoder's name for a checkpoint tensor; None for vision weights and for a head that is tied anyway."""
    if _HEAD.match(name):
        return None if tied else HEAD
    return _TEXT.sub("", name) if _TEXT.match(name) else None
