"""Runs batches of a model that transformers computes: its processor in the place of patches, its tower in that of
ours."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from common.gpu.device import gpu_seconds
from common.gpu.graphs import Capture, CudaCapture
from common.hf.classes import first_line
from common.hf.description import HfModel
from common.hf.processors import Clip, Sound
from common.media.item import Grid
from common.telemetry import log
from encoder_service.models.hf.attention import hf_backend
from encoder_service.models.hf.tower import HfTower
from encoder_service.models.processor import ItemProcessor, Shown
from encoder_service.models.tower import multiplies_as_stored
from encoder_service.worker.graphs import LADDER, Choice, GraphsUnavailable
from encoder_service.worker.hf.batches import ByShape, Made, patches_of, shape_of, why_apart
from encoder_service.worker.hf.graphs import ShapeGraphs
from encoder_service.worker.messages import Batch, Piece, WorkerReady, WorkerSettings
from encoder_service.worker.runner import PreparedBatch, Runner, StagedTower

_MOST_ON_CPUS = 256
"""Most patches of a pass of several items on a CPU: beyond that, passes together take as long as one by one, or longer.
On GPUs it is the size of graphs: above that launches do not matter, and some towers score all patches of a pass, behind
a mask."""
_SMALL, _UNEVEN, _LARGER = (64, 48), (84, 84), (448, 336)
"""Sizes of items that are tried. The second has 36 patches of 14 pixels, and so keys that do not begin at whole vectors
if a tower has all patches of a pass in one attention."""
_USUAL = ((224, 224), (336, 336), (448, 448), (480, 640), (640, 480), (768, 1024), (1024, 768), (720, 1280))
"""Usual heights and widths of pictures: what the processor makes of them has graphs."""
_USUAL_SECONDS = ((20, 28), (50, 58), (80, 88))
"""Lengths of sounds that have graphs if the processor pads both of a pair to one length, as Voxtral's does to chunks of
30."""
_FRAMES, _RATE, _SECONDS = 8, 8.0, (1, 5)

_log = log.get("runner")


class HfRunner(Runner):
    """As `Runner`, with the same errors."""

    def read(self, settings: WorkerSettings) -> int:
        """How many numbers a row has."""
        found = settings.hf
        assert found is not None, "this is for models that transformers computes"
        self._backend = hf_backend(settings.attention, self.device, self.dtype, settings.kernels)
        if settings.graphs:
            raise GraphsUnavailable("this model's tower has graphs by the shapes of items, not by numbers of patches")
        self._processor = ItemProcessor(Path(settings.folder))
        self._first, self._rate = next(iter(found.placeholders)), found.sound_rate
        return found.levels * found.hidden_size

    def load(self, settings: WorkerSettings) -> StagedTower:
        """transformers' model without its text."""
        found = settings.hf
        assert found is not None, "this is for models that transformers computes"
        backend = None if self._backend.name == "sdpa" else self._backend
        self._tower_of_items = tower = HfTower(Path(settings.folder), found, self.dtype, self.device, backend)
        on_cpu = self.device.type == "cpu"
        if on_cpu and not multiplies_as_stored(self.device):
            _log.info("linear layers are laid out for oneDNN", layers=self._lay_out(tower, found))
        most = min(settings.batch_patches, _MOST_ON_CPUS if on_cpu else LADDER[-1])
        together = [modality for modality in found.placeholders if most and self._goes_together(modality, most)]
        modalities = list(found.placeholders)
        graphs = self._captured(modalities, settings.graph_bytes, together) if self.has_graphs(settings) else None
        self._graphed, self._tells_shapes = graphs, bool(together or graphs)
        self._by_shape = ByShape(tower, together, most, graphs)
        return self._by_shape

    def has_graphs(self, settings: WorkerSettings) -> bool:
        """Whether graphs are captured, if possible."""
        return self.device.type == "cuda" and settings.graphs != []

    @torch.inference_mode()
    def _lay_out(self, tower: HfTower, found: HfModel) -> int:
        """By passes of an example of each modality. Errors of an example are reported when an item of that modality
        comes."""
        made = list[tuple[Made, int]]()
        for modality in found.placeholders:
            with suppress(ImportError, RuntimeError, ValueError):
                made.append(self._example(blank(modality, self._rate)))

        def passes() -> None:
            for each, tokens in made:
                with suppress(RuntimeError):
                    ByShape(tower).run([each], [tokens])

        return tower.lay_out(passes)

    @torch.inference_mode()
    def _goes_together(self, modality: str, most: int) -> bool:
        """Whether items of a modality and of one shape may share a pass, of at most so many patches: tried with noise,
        three items of each size. Logs the result."""
        why, tried = "no three items fit into a pass", set()
        for three in noise(modality, self._rate):
            try:
                made, tokens = zip(*map(self._example, three), strict=True)
            except (ImportError, ValueError) as error:
                why = first_line(error)
                break
            if made[0].shape in tried or 3 * patches_of(made[0].inputs) > most:
                continue
            tried.add(made[0].shape)
            if why := why_apart(self._tower_of_items, made, tokens[0], exact=self.device.type == "cpu"):
                break
        how = {"together": False, "cause": why} if why else {"together": True}
        _log.info("how items of one shape are computed", modality=modality, **how)
        return not why

    @torch.inference_mode()
    def _captured(self, modalities: Collection[str], max_bytes: int, together: list[str]) -> ShapeGraphs | None:
        """Graphs for pictures and sounds of usual sizes, if possible. Logs the result."""
        graphs = ShapeGraphs(self._tower_of_items, self.capture(), max_bytes=max_bytes, choice=self.choice())
        shapes, obstacles = set(), set[str]()
        for modality, pair in usual(self._rate):
            if modality not in modalities:
                continue
            try:
                (first, tokens), (second, others) = map(self._example, pair)
            except (ImportError, ValueError):  # nothing of this size is taken
                continue
            if first.shape is None or first.shape in shapes or (first.shape, tokens) != (second.shape, others):
                continue
            shapes.add(first.shape)
            obstacles.add(graphs.add((first, second), tokens, several=modality in together))
        told = {"rows": graphs.budgets, "why_not_more": sorted(obstacles - {""}), "the_host_looks": graphs.looks}
        _log.info("graphs are captured", shapes=len(shapes), **told)
        return graphs if graphs.budgets else None

    def capture(self) -> Capture:
        """What captures graphs here."""
        return CudaCapture(self.device)

    def choice(self) -> Choice:
        """What measures whether graphs are worthwhile."""
        return Choice(gpu_seconds)

    def _example(self, shown: Shown) -> tuple[Made, int]:
        """The processor's output for an item, and its number of rows."""
        modality = "image" if isinstance(shown, np.ndarray) else "video" if isinstance(shown, Clip) else "audio"
        tokens = sum(part.rows for part in self._processor.replacement(shown))
        return self._placed(Made(modality, self._processor.inputs(shown)), shape=True), tokens

    def _placed(self, made: Made, *, shape: bool) -> Made:
        """With its inputs on the device, and its shape, if that is of use."""
        if made.turns:
            return made
        known = self._tower_of_items.known(made.inputs, made.kind)
        like = shape_of(made.kind, known) if shape else None
        return replace(made, inputs=self._tower_of_items.placed(known, made.kind), shape=like)

    @property
    def attention(self) -> str:
        """See `Runner`."""
        return self._backend.name

    def blocks(self) -> tuple[()]:
        """Nothing is known of its parts."""
        return ()

    @torch.inference_mode()
    def warm_up(self) -> WorkerReady:
        """Runs a small picture, or a second of silence if the model takes no pictures, through everything once: the
        first pass of a process is slow, and mismatches show here."""
        made, tokens = self._example(blank(self._first, self._rate))
        self._staged.run([made], [tokens])
        return WorkerReady(self.attention, self._graphed.budgets if self._graphed else [], self._row_writer.pool_made)

    def parts(self, batch: Batch, hungry: Callable[[], bool]) -> Iterator[PreparedBatch]:
        """As `Runner.parts`: an item as soon as the processor has made its tensors, or several of one shape."""
        made: dict[int, tuple[Made, float]] = {}

        def items() -> Iterator[tuple[Made, int]]:
            for place, piece in enumerate(batch.pieces):
                made[place] = self._item(piece)
                yield made[place][0], piece.tokens

        for places in self._by_shape.groups(items(), hungry):
            inputs, seconds = zip(*map(made.pop, places), strict=True)
            pieces = [batch.pieces[place] for place in places]
            ready = self._staged.prepare([Grid(*piece.grid) for piece in pieces], self.device)
            yield PreparedBatch(pieces, inputs, ready, sum(seconds), places)

    @torch.inference_mode()
    def _item(self, piece: Piece) -> tuple[Made, float]:
        """Has the processor make an item's tensors; also returns the seconds that it took. Raises RuntimeError if it
        cannot."""
        started = time.perf_counter()
        try:
            made = self._made(piece)
        except ValueError as error:
            raise RuntimeError(str(error)) from error
        with self._beside():
            placed = self._placed(made, shape=self._tells_shapes)
            if self._side is not None:
                self._side.synchronize()
        return placed, time.perf_counter() - started

    def _made(self, piece: Piece) -> Made:
        made = self._processor.inputs(self._shown(piece))
        if not piece.samples:
            return Made(piece.modality, made)
        samples = self._staged_pieces.sound(piece).numpy().view(np.float32)
        return Made(piece.modality, made, self._processor.inputs(Sound(samples)), piece.turns)

    def _shown(self, piece: Piece) -> Shown:
        """A video's times are left out: only its layout in a prompt depends on them."""
        frames: np.ndarray = self._staged_pieces.pixels(piece).numpy()
        if piece.modality == "image":
            still: np.ndarray = frames[0]
            return still
        if piece.modality == "audio":
            return Sound(frames.reshape(-1).view(np.float32))
        return Clip(frames, tuple(range(len(frames))), len(frames), 1.0)


def blank(modality: str, sound_rate: int) -> Shown:
    """A small picture, a second of a small video, or of silence with so many samples."""
    if modality == "audio":
        return Sound(np.zeros(sound_rate, np.float32))
    frames = np.zeros((_FRAMES, *_SMALL, 3), np.uint8)
    return Clip(frames, tuple(range(_FRAMES)), _FRAMES, _RATE) if modality == "video" else frames[0]


def picture(sides: tuple[int, int], seed: int) -> np.ndarray:
    """Noise of a height and width."""
    return np.random.default_rng(seed).integers(0, 256, (*sides, 3), dtype=np.uint8)


def noisy_sound(seconds: int, sound_rate: int, seed: int) -> Sound:
    """So many seconds of noise."""
    drawn = np.random.default_rng(seed).normal(0, 0.1, seconds * sound_rate)
    return Sound(drawn.astype(np.float32))


def usual(sound_rate: int) -> Iterator[tuple[str, list[Shown]]]:
    """Pairs of items with different content, and their modality, of each size that gets graphs."""
    for sides in _USUAL:
        yield "image", [picture(sides, seed) for seed in range(2)]
    for lengths in _USUAL_SECONDS:
        yield "audio", [noisy_sound(seconds, sound_rate, seed) for seed, seconds in enumerate(lengths)]


def noise(modality: str, sound_rate: int) -> Iterator[list[Shown]]:
    """Three items of each of some sizes, the smallest first; a second of sound has so many samples."""
    if modality == "audio":
        for seconds in _SECONDS:
            yield [noisy_sound(seconds, sound_rate, seed) for seed in range(3)]
        return
    for sides in (_SMALL, _UNEVEN, _LARGER):
        if modality == "image":
            yield [picture(sides, seed) for seed in range(3)]
        else:
            films = (picture((_FRAMES * sides[0], sides[1]), seed).reshape(_FRAMES, *sides, 3) for seed in range(3))
            yield [Clip(film, tuple(range(_FRAMES)), _FRAMES, _RATE) for film in films]
