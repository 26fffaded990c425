"""Batches for training: batch `step` depends on the seed and the step alone, so a run goes on where it stopped."""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from random import Random

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import Dataset

from tools.demo_model import ask_many, film, talk
from tools.demo_model.ask import ask, follow_up
from tools.demo_model.draw import draw
from tools.demo_model.marks import Names, in_patch_order, patch_marks, patch_marks_of_pair
from tools.demo_model.pack import IGNORED, Packer, Row, patches
from tools.demo_model.scene import EASY, FULL, READING, Level, Scene, random_scene
from tools.demo_model.sizes import Size, random_source, random_target
from tools.demo_model.turn import Turn

LENGTH = 192


@dataclass(slots=True)
class Batch:
    """Tensors for one step of training. A segment is a picture, or a pair of a film's frames.

    patches [segments, patches, 1536] uint8; hints [4, segments, patches]: what each patch shows (`marks`). `answers`
    lists (kind, start, end) of each answer of each row. `points` [2, n] are flat indices of names of things, and of a
    text's characters, and, for those in answers, of the token before, else -1; `spots` [n, 2] tell where they stand, as
    shares of height and width. `alike` is the number of pictures of a row if each shows the scene of the one before
    with little changed, else 1.
    """

    patches: Tensor | None
    height: int
    width: int
    ids: Tensor
    labels: Tensor
    branch: Tensor
    places: Tensor
    slots: Tensor
    hints: Tensor | None
    answers: list[list[tuple[str, int, int]]]
    points: Tensor
    spots: Tensor
    alike: int


def level_at(step: int, rng: Random) -> Level:
    """The curriculum: plain pairs of things at first, everything from step 3000 on, then more to read.

    Reading is learned last: a text of four characters is wrong where one of them is.
    """
    if step >= 8000:
        return READING
    hard = min(1.0, step / 3000)
    return FULL if rng.random() < hard else replace(EASY, most_things=1 + round(1 + 2 * hard))


def kind_at(step: int, rng: Random) -> str:
    """One picture at first; several pictures, films and small talk join as it learns."""
    many = 0.08 if step < 4200 else 0.4
    kinds = ("one", "differs", "several", "film", "talk")
    return rng.choices(kinds, (1 - many - 0.01, many * 0.4, many * 0.2, many * 0.4, 0.01))[0]


class Maker(Dataset[Batch]):
    """Makes a rank's part of batch number `step`; runs in a worker process.

    The kind and the picture size of a batch are the same on all ranks, so that none waits for another.
    """

    def __init__(self, tokenizer: Path, seed: int, size: int, rank: int = 0) -> None:
        self.file, self.seed, self.size, self.rank = tokenizer, seed, size, rank

    @cached_property
    def packer(self) -> Packer:
        """Made where it is used: in the worker process."""
        return Packer(Tokenizer.from_file(str(self.file)))

    @cached_property
    def names(self) -> Names:
        return Names(self.packer.tokenizer)

    def __getitem__(self, step: int) -> Batch:
        rng = Random(self.seed * 1_000_003 + step)
        kind = kind_at(step, rng)
        frames = rng.choice((4, 4, 6, 8, 8)) if kind == "film" else 1
        target = random_target(rng, frames)
        pictures = {"one": 1, "differs": 2, "several": rng.choice((2, 2, 2, 3)), "film": frames // 2, "talk": 0}[kind]
        rng = Random(rng.getrandbits(60) + self.rank)
        if kind == "talk":
            return self.chats(rng)
        rows, pixels, marks, shown = [], [], [], []
        for _ in range(self.size):
            level = level_at(step, rng)
            if kind == "film":
                row, shot = self.film_row(rng, level, target, frames)
                scenes, images = list(shot.frames), film.show(shot)
                pairs = zip(scenes[::2], scenes[1::2], strict=True)
                marks += [in_patch_order(patch_marks_of_pair(*pair, *target)) for pair in pairs]
            else:
                scenes, row = self.picture_row(rng, level, target, kind, pictures)
                images = [image for scene in scenes for image in [draw(scene)] * 2]
                marks += [in_patch_order(patch_marks(scene, *target)) for scene in scenes]
            rows.append(row)
            shown.append(scenes)
            pixels.append(self.seen(images, target))
        batch = self.batch(rows, target, torch.from_numpy(np.concatenate(pixels)))
        batch.hints = torch.from_numpy(np.stack(marks, axis=1))
        batch.alike = pictures if kind in ("differs", "film") else 1
        batch.points, batch.spots = self.pointed(rows, shown)
        return batch

    def pointed(self, rows: list[Row], shown: list[list[Scene]]) -> tuple[Tensor, Tensor]:
        """The `points` and `spots` of a batch whose rows show these scenes."""
        points, spots = [], []
        for k, (row, scenes) in enumerate(zip(rows, shown, strict=True)):
            for first, last, spot in self.names.spots(row.ids, row.slots[-1] + 1, scenes):
                answers = row.labels[first] != IGNORED
                points.append((k * LENGTH + last, k * LENGTH + first - 1 if answers else -1))
                spots.append(spot)
        return torch.tensor(points, dtype=torch.long).view(-1, 2).T, torch.tensor(spots).view(-1, 2)

    def seen(self, images: list[Image.Image], target: Size) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        return patches(images, *target)

    def picture_row(self, rng: Random, level: Level, target: Size, kind: str, pictures: int) -> tuple[list[Scene], Row]:
        """Scenes and their conversations: questions of any kind, mostly single, some with a follow-up."""
        height, width = random_source(rng, target)
        differs: Turn | None = None
        if kind == "differs":
            scenes, differs = ask_many.differing(rng, level, width, height)
        else:
            scenes = []
            for _ in range(pictures):
                scenes.append(random_scene(rng, level, width, height))
                height, width = random_source(rng, target)

        def turn() -> Turn:
            return ask(rng, scenes[0]) if kind == "one" else ask_many.ask_many(rng, scenes)

        first = differs or turn()
        row = self.opened(rng, target, pictures, None, first)
        while True:
            turns = [turn()]
            if kind == "one" and rng.random() < 0.12 and (pair := follow_up(rng, scenes[0])) is not None:
                turns = pair
            while rng.random() < 0.3:
                turns.append(turn())
            if not self.packer.add(row, turns):
                return scenes, row

    def film_row(self, rng: Random, level: Level, target: Size, frames: int) -> tuple[Row, film.Film]:
        height, width = random_source(rng, target, frames)
        while max(height, width) > 280:
            height, width = height // 2, width // 2
        shot = film.random_film(rng, level, width, height, frames)
        gap = rng.choice((0.5, 1.0, 1.0, 1.1, 1.2, rng.uniform(0.1, 1.8)))
        stamps = [f"<{gap * (k + 0.25):.1f} seconds>" for k in range(frames // 2)]
        row = self.opened(rng, target, frames // 2, stamps, film.ask_film(rng, shot))
        while self.packer.add(row, [film.ask_film(rng, shot)]):
            pass
        return row, shot

    def opened(self, rng: Random, target: Size, pictures: int, stamps: list[str] | None, first: Turn) -> Row:
        """A row with its prefix and its first conversation; now and then the question stands before the picture."""
        early = rng.random() < 0.06
        rule = rng.choice(talk.RULES) if rng.random() < 0.06 else None
        grid = target[0] // 32, target[1] // 32
        row = self.packer.begin(LENGTH, grid, pictures, stamps, rule, first.question if early else None)
        self.packer.add(row, [first], early)
        if early:
            row.length = len(row.ids)  # only its own question belongs to this prefix
        return row

    def chats(self, rng: Random) -> Batch:
        """Conversations without a picture."""
        rows = []
        for _ in range(self.size):
            row = self.packer.begin(LENGTH, None, 0, None, rng.choice(talk.RULES) if rng.random() < 0.3 else None, None)
            while self.packer.add(row, [talk.small_talk(rng) for _ in range(rng.choice((1, 1, 2)))]):
                pass
            rows.append(row)
        return self.batch(rows, (0, 0), None)

    def batch(self, rows: list[Row], target: Size, seen: Tensor | None) -> Batch:
        """The rows as tensors, without hints."""
        for row in rows:
            row.length = LENGTH
        done = [self.packer.finish(row) for row in rows]
        stacked = {
            key: torch.from_numpy(np.stack([d[key] for d in done])) for key in ("ids", "labels", "branch", "places")
        }
        slots = torch.from_numpy(np.concatenate([d["slots"] + k * LENGTH for k, d in enumerate(done)]))
        places = stacked["places"].transpose(0, 1).contiguous()
        return Batch(
            seen, *target, stacked["ids"], stacked["labels"], stacked["branch"], places, slots, None,
            [row.answers for row in rows], torch.zeros(2, 0, dtype=torch.long), torch.zeros(0, 2), 1,
        )  # fmt: skip
