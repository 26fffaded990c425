"""Batches for training: batch `step` depends on the seed and the step alone, so a run goes on where it stopped."""

from dataclasses import dataclass, replace
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
from tools.demo_model.draw import draw, print_boxes
from tools.demo_model.pack import Packer, Row, patches
from tools.demo_model.scene import EASY, FULL, Level, Scene, random_scene
from tools.demo_model.sizes import Size, random_source, random_target
from tools.demo_model.turn import Turn
from tools.demo_model.words import CHARACTERS, COLOURS, SHAPES

LENGTH = 192
NONE = -100
SEEN_SHAPES = (*SHAPES, "text", "nothing")


@dataclass(slots=True)
class Batch:
    """patches [segments, patches, 1536] uint8; hints [3, segments, patches] (shape, colour, character of each patch).

    `answers` lists (kind, start, end) of each answer of each row.
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


def hints(scene: Scene, height: int, width: int) -> np.ndarray[tuple[int, int, int], np.dtype[np.int64]]:
    """What each patch shows [3, rows, columns]: index of shape, of colour, of character, or NONE where unclear.

    Only used to teach the vision part; the exported model has no trace of it.
    """
    out = np.full((3, height // 16, width // 16), NONE, dtype=np.int64)
    out[0] = len(SEEN_SHAPES) - 1
    out[2] = len(CHARACTERS)
    sx, sy = width / scene.width / 16, height / scene.height / 16
    y, x = np.mgrid[0 : height // 16, 0 : width // 16] + 0.5
    for thing in scene.things:
        reach = ((x - thing.x * sx) / sx) ** 2 + ((y - thing.y * sy) / sy) ** 2
        touched, inside = reach < (thing.radius + 9 / (16 * sx)) ** 2, reach < (0.8 * thing.radius) ** 2
        out[0][touched & ~inside] = NONE
        inside[int(thing.y * sy), int(thing.x * sx)] = True
        out[0][inside], out[1][inside] = SHAPES.index(thing.shape), list(COLOURS).index(thing.colour)
    if scene.print is not None:
        for character, (left, top, right, bottom) in zip(scene.print.text, print_boxes(scene.print), strict=True):
            box = (x + 0.5 > left * sx) & (x - 0.5 < right * sx) & (y + 0.5 > top * sy) & (y - 0.5 < bottom * sy)
            out[0][box], out[2][box & (out[2] == len(CHARACTERS))] = NONE, NONE
            row = min(out.shape[1] - 1, max(0, int((top + bottom) / 2 * sy)))
            column = min(out.shape[2] - 1, max(0, int((left + right) / 2 * sx)))
            out[0][row, column], out[2][row, column] = len(SEEN_SHAPES) - 2, CHARACTERS.index(character)
    return out


def in_patch_order(
    grid: np.ndarray[tuple[int, int, int], np.dtype[np.int64]],
) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """[3, rows, columns] to [3, patches] with every 2 x 2 square contiguous."""
    k, rows, columns = grid.shape
    return grid.reshape(k, rows // 2, 2, columns // 2, 2).transpose(0, 1, 3, 2, 4).reshape(k, -1)


def level_at(step: int, rng: Random) -> Level:
    """The curriculum: plain pairs of things at first, everything from step 3000 on."""
    hard = min(1.0, step / 3000)
    return FULL if rng.random() < hard else replace(EASY, most_things=1 + round(1 + 2 * hard))


def kind_at(step: int, rng: Random) -> str:
    """One picture at first; several pictures, films and small talk join as it learns."""
    many = 0.08 if step < 4200 else 0.35
    kinds = ("one", "differs", "several", "film", "talk")
    return rng.choices(kinds, (1 - many - 0.01, many * 0.3, many * 0.25, many * 0.45, 0.01))[0]


class Maker(Dataset[Batch]):
    """Makes a rank's part of batch number `step`; runs in a worker process.

    The kind and the picture size of a batch are the same on all ranks, so that none waits for another.
    """

    def __init__(self, tokenizer: Path, seed: int, size: int, rank: int = 0) -> None:
        self.file, self.seed, self.size, self.rank = tokenizer, seed, size, rank
        self.packer: Packer | None = None

    def __getitem__(self, step: int) -> Batch:
        if self.packer is None:
            self.packer = Packer(Tokenizer.from_file(str(self.file)))
        rng = Random(self.seed * 1_000_003 + step)
        kind = kind_at(step, rng)
        frames = rng.choice((4, 4, 6, 8, 8)) if kind == "film" else 1
        target = random_target(rng, frames)
        pictures = {"one": 1, "differs": 2, "several": rng.choice((2, 2, 2, 3)), "film": frames // 2, "talk": 0}[kind]
        rng = Random(rng.getrandbits(60) + self.rank)
        if kind == "talk":
            return self.chats(rng)
        rows, pixels, marks = [], [], []
        for _ in range(self.size):
            level = level_at(step, rng)
            if kind == "film":
                row, images = self.film_row(rng, level, target, frames)
            else:
                scenes, row = self.picture_row(rng, level, target, kind, pictures)
                images = [image for scene in scenes for image in [draw(scene)] * 2]
                marks += [in_patch_order(hints(scene, *target)) for scene in scenes]
            rows.append(row)
            pixels.append(self.seen(images, target))
        seen = torch.from_numpy(np.concatenate(pixels))
        return self.batch(rows, target, seen, torch.from_numpy(np.stack(marks, axis=1)) if marks else None)

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
            if not self.maker.add(row, turns):
                return scenes, row

    def film_row(self, rng: Random, level: Level, target: Size, frames: int) -> tuple[Row, list[Image.Image]]:
        height, width = random_source(rng, target, frames)
        while max(height, width) > 280:
            height, width = height // 2, width // 2
        shot = film.random_film(rng, level, width, height, frames)
        gap = rng.choice((0.5, 1.0, 1.0, 1.1, 1.2, rng.uniform(0.1, 1.8)))
        stamps = [f"<{gap * (k + 0.25):.1f} seconds>" for k in range(frames // 2)]
        row = self.opened(rng, target, frames // 2, stamps, film.ask_film(rng, shot))
        while self.maker.add(row, [film.ask_film(rng, shot)]):
            pass
        return row, film.show(shot)

    @property
    def maker(self) -> Packer:
        if self.packer is None:
            raise RuntimeError("no tokenizer is loaded yet")
        return self.packer

    def opened(self, rng: Random, target: Size, pictures: int, stamps: list[str] | None, first: Turn) -> Row:
        """A row with its prefix and its first conversation; now and then the question stands before the picture."""
        early = rng.random() < 0.06
        rule = rng.choice(talk.RULES) if rng.random() < 0.06 else None
        grid = target[0] // 32, target[1] // 32
        row = self.maker.begin(LENGTH, grid, pictures, stamps, rule, first.question if early else None)
        self.maker.add(row, [first], early)
        if early:
            row.length = len(row.ids)  # only its own question belongs to this prefix
        return row

    def chats(self, rng: Random) -> Batch:
        """Conversations without a picture."""
        rows = []
        for _ in range(self.size):
            row = self.maker.begin(LENGTH, None, 0, None, rng.choice(talk.RULES) if rng.random() < 0.3 else None, None)
            while self.maker.add(row, [talk.small_talk(rng) for _ in range(rng.choice((1, 1, 2)))]):
                pass
            rows.append(row)
        return self.batch(rows, (0, 0), None, None)

    def batch(self, rows: list[Row], target: Size, seen: Tensor | None, marks: Tensor | None) -> Batch:
        for row in rows:
            row.length = LENGTH
        done = [self.maker.finish(row) for row in rows]
        stacked = {
            key: torch.from_numpy(np.stack([d[key] for d in done])) for key in ("ids", "labels", "branch", "places")
        }
        slots = torch.from_numpy(np.concatenate([d["slots"] + k * LENGTH for k, d in enumerate(done)]))
        places = stacked["places"].transpose(0, 1).contiguous()
        return Batch(
            seen, *target, stacked["ids"], stacked["labels"], stacked["branch"], places, slots, marks,
            [row.answers for row in rows],
        )  # fmt: skip
