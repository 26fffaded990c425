"""Fills decoders: each stored weight is read into its place and laid out there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from common.checkpoints.checkpoint import CheckpointError
from common.cpu.linear import finalize_linears
from llm_service.layers.linear.parallel import PackedLinear
from llm_service.layers.linear.placement import Finalized, Place, Placed, Stored, elsewhere, fill, path_within
from llm_service.layers.linear.weight_dtype import Rounded
from llm_service.models.decoder import Decoder


def fill_decoder(
    decoder: Decoder, weights: Iterable[tuple[str, Stored]], device: torch.device, rounded: Rounded
) -> None:
    """Reads the tensors that a decoder needs, by its names for them, and lays them out on a device. Raises
    CheckpointError if a weight is missing or does not fit."""
    _read(decoder, weights, partial(_place, device=device, rounded=rounded))
    decoder.to(device)
    for part in decoder.modules():
        if isinstance(part, PackedLinear):
            part.finalize(rounded=rounded)
    finalize_linears(decoder)
    decoder.finalize()


def fill_plain(decoder: Decoder, tensors: Iterable[tuple[str, Tensor]]) -> Decoder:
    """Fills a decoder that computes with torch's operators only. Raises CheckpointError as `fill_decoder`."""
    _read(decoder, ((name, InMemory(tensor)) for name, tensor in tensors), lambda _, place, stored: place(stored))
    return decoder.eval()


def targets(module: nn.Module, path: str = "", *, tied: bool = False) -> Iterator[tuple[str, tuple[nn.Module, Place]]]:
    """All tensors that a decoder needs, by their names in `loader.TextSide`, with the module that holds each and its
    reader."""
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


def names_elsewhere(decoder: Decoder) -> set[str]:
    """The decoder's names of tensors that only other ranks need."""
    return {name for name, (_, place) in targets(decoder, tied=decoder.config.tied) if place is elsewhere}


class InMemory:
    """A tensor in memory as one in a file."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __getitem__(self, index: Any) -> Tensor:
        return self._tensor[index]

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)


def _read(
    decoder: Decoder, weights: Iterable[tuple[str, Stored]], place: Callable[[nn.Module, Place, Stored], None]
) -> None:
    """Has each of a decoder's weights put in its place."""
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


def _place(module: nn.Module, place: Place, stored: Stored, *, device: torch.device, rounded: Rounded) -> None:
    """Reads this rank's part of a tensor. A large module that is complete is finalized at once, so that at most one
    weight is in memory in a longer type than it will have."""
    if place is elsewhere:
        return
    place(stored)
    if isinstance(module, Finalized) and module.whole():
        module.to(device)
        module.finalize(rounded=rounded)


def _copy(parameter: nn.Parameter, stored: Stored) -> None:
    fill(parameter, stored[:])
