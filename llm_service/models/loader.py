"""Fills a decoder from a checkpoint, reading text weights alone."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

from common.checkpoint import Checkpoint, CheckpointError
from common.linear import finalize_linears
from common.weights import load_slices
from llm_service.layers.experts import Experts
from llm_service.layers.group import ALONE, TensorGroup
from llm_service.layers.linear import PackedLinear, Stored, VocabularyEmbedding
from llm_service.models.config import TextConfig
from llm_service.models.decoder import Decoder

# Where the text side stands: Qwen2-VL and Qwen2.5-VL on the hub use `model.`, newer saves the longer one.
_TEXT = re.compile(r"^(?:model\.language_model|language_model\.model|model)\.(?=embed_tokens|layers|norm)")
_HEAD = re.compile(r"^(?:language_model\.)?lm_head\.weight$")
_PACKED = {
    "q_proj": "qkv",
    "k_proj": "qkv",
    "v_proj": "qkv",
    "o_proj": "o",
    "gate_proj": "gate_up",
    "up_proj": "gate_up",
    "down_proj": "down",
}


def load_decoder(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    group: TensorGroup = ALONE,
    *,
    weight_dtype: str = "",
) -> Decoder:
    """Builds one rank's share of the checkpoint's decoder on a device, reading that share alone.

    `weight_dtype` int8 rounds the matrices of the layers and of the head, each rank its own share; embeddings and norms
    stay. Raises CheckpointError where a weight is missing or does not fit, or the ranks cannot share the model.
    """
    config, int8 = TextConfig.of(checkpoint.config), weight_dtype == "int8"
    if int8 and config.experts and device.type != "cpu":
        raise CheckpointError("--weight-dtype int8 with a mixture of experts is computed on CPUs alone")
    try:
        decoder = Decoder(config, group, dtype, device)
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    missing = set(_expected(decoder))
    for name, stored in load_slices(checkpoint, lambda name: _own_name(name, tied=config.tied)):
        try:
            _place(decoder, name, stored, int8=int8)
        except (ValueError, AttributeError) as error:
            raise CheckpointError(f"{name} does not fit the model: {error}") from error
        missing.discard(name)
    if missing:
        raise CheckpointError(f"the checkpoint lacks {', '.join(sorted(missing)[:3])}")
    for part in decoder.modules():
        if isinstance(part, PackedLinear):
            part.finalize(int8=int8)
    finalize_linears(decoder)
    decoder.finalize()
    return decoder.eval()


def _own_name(name: str, *, tied: bool) -> str | None:
    """The decoder's name for a checkpoint tensor; None for vision weights and for a head that is tied anyway."""
    if _HEAD.match(name):
        return None if tied else "lm_head.lm_head.weight"
    return _TEXT.sub("", name) if _TEXT.match(name) else None


def _expected(decoder: Decoder) -> Iterator[str]:
    """The names, as `_own_name` gives them, of all tensors that the decoder needs."""
    packed: set[str] = set()
    for path, module in decoder.named_modules():
        if isinstance(module, PackedLinear):
            packed.add(path)
            if path == "lm_head" and decoder.config.tied:
                continue
            owner = path if path == "lm_head" else path.rpartition(".")[0]
            for kind, _ in module.named_parameters():
                yield from (f"{owner}.{part}.{kind}" for part in module.parts)
    for name, _ in decoder.named_parameters():
        if name.rpartition(".")[0] not in packed:
            yield name


def _place(decoder: Decoder, name: str, stored: Stored, *, int8: bool) -> None:
    """Copies this rank's share of a tensor to its place in the decoder. What is whole then, and large, is finalized:
    so no more than one weight is there in a longer type than it will have."""
    path, _, kind = name.rpartition(".")
    owner, _, part = path.rpartition(".")
    if part in _PACKED or part == "lm_head":
        packed = decoder.get_submodule(f"{owner}.{_PACKED[part]}" if part in _PACKED else owner)
        if not isinstance(packed, PackedLinear):
            raise AttributeError(f"{owner} has no packed {part}")
        packed.place(part, kind, stored)
        if packed.whole():
            packed.finalize(int8=int8)
        return
    if isinstance(experts := decoder.get_submodule(path), Experts):
        experts.place(kind, stored)
        if experts.whole():
            experts.finalize(int8=int8)
        return
    module, parameter = decoder.get_submodule(path), decoder.get_parameter(name)
    tensor = stored[module.share] if isinstance(module, VocabularyEmbedding) else stored[:]
    if parameter.shape != tensor.shape:
        raise ValueError(f"it is {tuple(tensor.shape)}, expected {tuple(parameter.shape)}")
    parameter.data.copy_(tensor)
