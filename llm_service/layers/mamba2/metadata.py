"""Metadata of a batch of Mamba-2 layers for kernels, as tensors on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.gpu.transfer import to_device
from llm_service.layers.cache_spec import Segment
from llm_service.layers.recurrent.metadata import RecurrentMetadata, packed_of


@dataclass(frozen=True, slots=True)
class Mamba2Metadata:
    """`tables` says where tokens are and what they continue from, as for gated delta nets; `answers` int32 [n] is 1 for
    tokens of answers. All of it is in `packed`, in this order."""

    tables: RecurrentMetadata
    answers: Tensor
    packed: Tensor

    @classmethod
    def of(cls, segments: Sequence[Segment], device: torch.device) -> Mamba2Metadata:
        """The metadata of a step's segments.

        >>> segments = [Segment(0, 1, 4, fresh=False, answers=1), Segment(1, 4, 7, fresh=True)]
        >>> metadata = Mamba2Metadata.of(segments, torch.device("cpu"))
        >>> metadata.tables.runs.tolist(), metadata.answers.tolist()
        ([[1, 4, 7, 1, 0]], [1, 0, 0, 0])
        """
        tables, counts = packed_of(segments)
        (packed,) = to_device([_packed(tables, segments, segments[-1].end)], device)
        return cls._over(packed, len(tables), counts)

    @classmethod
    def padding(cls, tokens: int, sequences: int, device: torch.device, *, decodes_only: bool) -> Mamba2Metadata:
        """Room for any segments, as `RecurrentMetadata.padding`, filled with padding."""
        tables = RecurrentMetadata.padding(tokens, sequences, device, decodes_only=decodes_only)
        packed = torch.cat([tables.packed, tables.packed.new_zeros(tokens)])
        return cls._over(packed, len(tables.packed), tables.counts)

    @classmethod
    def _over(cls, packed: Tensor, size: int, counts: Sequence[int]) -> Mamba2Metadata:
        """Over `size` numbers of tables, of so many steps, runs and tiles, and what follows."""
        own, answers = packed.split([size, len(packed) - size])
        return cls(RecurrentMetadata.over(own, counts), answers, packed)

    def numbers(self, segments: Sequence[Segment]) -> np.ndarray:
        """The content of `packed` for a step."""
        return _packed(self.tables.numbers(segments), segments, len(self.answers))


def _packed(tables: np.ndarray, segments: Sequence[Segment], tokens: int) -> np.ndarray:
    answers = np.zeros(tokens, np.int32)
    for segment in segments:
        answers[segment.end - segment.answers : segment.end] = 1
    return np.concatenate([tables, answers])
