"""Runs batches of a model that the library computes: its processor in the place of patches, its tower in that of ours,
one item after the other."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common import log
from common.library import LibraryModel
from common.library_processors import Clip, Sound
from common.media.item import Grid
from encoder_service.models.library_attention import library_backend
from encoder_service.models.library_tower import LibraryTower, in_turns
from encoder_service.models.processor import ItemProcessor, Shown
from encoder_service.models.tower import multiplies_as_stored
from encoder_service.worker.graphs import GraphsUnavailable
from encoder_service.worker.messages import Batch, Piece, WorkerReady, WorkerSettings
from encoder_service.worker.runner import PreparedBatch, Runner, StagedTower

_SIDES, _FRAMES, _RATE = (64, 48), 8, 8.0

_log = log.get("runner")


@dataclass(frozen=True, slots=True)
class Made:
    """What the processor has made of an item of a modality; of a video with its sound, of each by itself, and their
    `turns` (`Plan`)."""

    kind: str
    inputs: Mapping[str, Any]
    sound: Mapping[str, Any] = field(default_factory=dict)
    turns: Sequence[int] = ()


class OneByOne:
    """A tower that takes one item at a time (`StagedTower`)."""

    def __init__(self, tower: LibraryTower) -> None:
        self._tower = tower

    def prepare(self, grids: Sequence[Grid], device: torch.device) -> list[int]:  # noqa: ARG002
        """The rows of each item, which are its grid."""
        return [grid.patches for grid in grids]

    def run(self, patches: Sequence[Made], ready: Sequence[int]) -> Tensor:
        """What the processor has made of each item → [tokens, levels, width]."""
        return torch.cat([self._rows(made, tokens) for made, tokens in zip(patches, ready, strict=True)])

    def _rows(self, made: Made, tokens: int) -> Tensor:
        if not made.turns:
            return self._tower.rows(made.inputs, tokens, made.kind)
        frames = self._tower.rows(made.inputs, sum(made.turns[::2]), made.kind)
        return in_turns(frames, self._tower.rows(made.sound, sum(made.turns[1::2]), "audio"), made.turns)


class LibraryRunner(Runner):
    """As `Runner`, and raises what that does."""

    def read(self, settings: WorkerSettings) -> int:
        """How many numbers a row has."""
        found = settings.library
        assert found is not None, "this is for models that the library computes"
        self._backend = library_backend(settings.attention, self.device, self.dtype)
        if settings.graphs:
            raise GraphsUnavailable("this model's tower cannot go into CUDA graphs")
        self._processor = ItemProcessor(Path(settings.folder))
        self._first, self._rate = next(iter(found.placeholders)), found.sound_rate
        return found.levels * found.hidden_size

    def load(self, settings: WorkerSettings) -> StagedTower:
        """The library's model without its text."""
        assert settings.library is not None, "this is for models that the library computes"
        backend = None if self._backend.name == "sdpa" else self._backend
        tower = LibraryTower(Path(settings.folder), settings.library, self.dtype, self.device, backend)
        if self.device.type == "cpu" and not multiplies_as_stored(self.device):
            count = self._lay_out(tower, settings.library)
            _log.info("linear layers are laid out for oneDNN", layers=count)
        return OneByOne(tower)

    @torch.inference_mode()
    def _lay_out(self, tower: LibraryTower, found: LibraryModel) -> int:
        """By passes of an example of each modality. What goes wrong with one is told where an item of it comes."""
        made = list[tuple[Made, int]]()
        for modality in found.placeholders:
            with suppress(RuntimeError, ValueError):
                made.append(self._example(modality))

        def passes() -> None:
            for each, tokens in made:
                with suppress(RuntimeError):
                    OneByOne(tower).run([each], [tokens])

        return tower.lay_out(passes)

    def _example(self, modality: str) -> tuple[Made, int]:
        """What the processor makes of a small item, and how many rows that has."""
        shown = blank(modality, self._rate)
        return Made(modality, self._processor.inputs(shown)), sum(
            part.rows for part in self._processor.replacement(shown)
        )

    def blocks(self) -> tuple[()]:
        """Nothing is known of its parts."""
        return ()

    @torch.inference_mode()
    def warm_up(self) -> WorkerReady:
        """Runs a small picture, or a second of silence where the model knows no pictures, through everything once: the
        first pass of a process is slow, and what does not fit together shows here."""
        made, tokens = self._example(self._first)
        self._staged.run([made], [tokens])
        return WorkerReady(self._backend.name, [], self.pool_made())

    def prepare(self, batch: Batch) -> PreparedBatch:
        """Has the processor make each item's tensors. Raises RuntimeError where it cannot."""
        started = time.perf_counter()
        try:
            inputs = [self._made(piece) for piece in batch.pieces]
        except ValueError as error:
            raise RuntimeError(str(error)) from error
        ready = self._staged.prepare([Grid(*piece.grid) for piece in batch.pieces], self.device)
        return PreparedBatch(batch, inputs, ready, time.perf_counter() - started)

    def _made(self, piece: Piece) -> Made:
        made = self._processor.inputs(self._shown(piece))
        if not piece.samples:
            return Made(piece.modality, made)
        samples = self.sound_of(piece).numpy().view(np.float32)
        return Made(piece.modality, made, self._processor.inputs(Sound(samples)), piece.turns)

    def _shown(self, piece: Piece) -> Shown:
        """Of a video the times are left out: only what stands for it in a prompt depends on them."""
        frames: np.ndarray = self.pixels_of(piece).numpy()
        if piece.modality == "image":
            still: np.ndarray = frames[0]
            return still
        if piece.modality == "audio":
            return Sound(frames.reshape(-1).view(np.float32))
        return Clip(frames, tuple(range(len(frames))), len(frames), 1.0)


def blank(modality: str, sound_rate: int) -> Shown:
    """A small picture, a second of a small video, or of silence, which has so many samples."""
    if modality == "audio":
        return Sound(np.zeros(sound_rate, np.float32))
    frames = np.zeros((_FRAMES, *_SIDES, 3), np.uint8)
    return Clip(frames, tuple(range(_FRAMES)), _FRAMES, _RATE) if modality == "video" else frames[0]
