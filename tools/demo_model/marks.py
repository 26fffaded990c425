"""What a scene shows and where, for the auxiliary losses of the training: for each patch, and for each name of a
thing.

The exported model has none of it.
"""

from collections import defaultdict
from collections.abc import Iterator
from itertools import takewhile

import numpy as np
from tokenizers import Tokenizer

from tools.demo_model.letters import print_boxes
from tools.demo_model.scene import Scene
from tools.demo_model.words import CHARACTERS, COLOURS, SHAPES

NONE = -100
SEEN_SHAPES = (*SHAPES, "text", "nothing")
Spot = tuple[float, float]


def patch_marks(scene: Scene, height: int, width: int) -> np.ndarray[tuple[int, int, int], np.dtype[np.int64]]:
    """What each patch shows [4, rows, columns]: index of shape, of colour, of character, or NONE where unclear; and of
    a second character where the middles of two are in it."""
    out = np.full((4, height // 16, width // 16), NONE, dtype=np.int64)
    out[0] = len(SEEN_SHAPES) - 1
    out[2] = out[3] = len(CHARACTERS)
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
            free = out[2] == len(CHARACTERS)
            out[0][box], out[2][box & free] = NONE, NONE
            row = min(out.shape[1] - 1, max(0, int((top + bottom) / 2 * sy)))
            column = min(out.shape[2] - 1, max(0, int((left + right) / 2 * sx)))
            second = 0 <= out[2][row, column] < len(CHARACTERS)
            out[0][row, column], out[3 if second else 2][row, column] = (
                len(SEEN_SHAPES) - 2,
                CHARACTERS.index(character),
            )
    return out


def in_patch_order(
    grid: np.ndarray[tuple[int, int, int], np.dtype[np.int64]],
) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """[4, rows, columns] to [4, patches] with every 2 x 2 square contiguous."""
    k, rows, columns = grid.shape
    return grid.reshape(k, rows // 2, 2, columns // 2, 2).transpose(0, 1, 3, 2, 4).reshape(k, -1)


def patch_marks_of_pair(
    first: Scene, second: Scene, height: int, width: int
) -> np.ndarray[tuple[int, int, int], np.dtype[np.int64]]:
    """The marks of two frames that are seen as one: NONE where they disagree."""
    one, two = patch_marks(first, height, width), patch_marks(second, height, width)
    return np.where(one == two, one, NONE)


class Names:
    """Finds what names a thing or spells a text among token ids; every shape, colour and character is one token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.shapes = {tokenizer.encode(f" {name}").ids[0]: name for name in SHAPES}
        self.colours = {tokenizer.encode(f" {name}").ids[0]: name for name in COLOURS}
        self.characters = {tokenizer.encode(name).ids[0]: name for name in CHARACTERS}
        (self.quote,) = tokenizer.encode(' "').ids

    def spots(self, ids: list[int], start: int, scenes: list[Scene]) -> Iterator[tuple[int, int, Spot]]:
        """(first token, last token, spot) of each name from `start` on that fits things in one place only, and of each
        character of a text in quotes that stands in one place only.

        A spot is (share of the height, share of the width); a name is "star" or "red star".
        """
        yield from self.things(ids, start, scenes)
        yield from self.texts(ids, start, scenes)

    def things(self, ids: list[int], start: int, scenes: list[Scene]) -> Iterator[tuple[int, int, Spot]]:
        places: dict[str, set[Spot]] = defaultdict(set)
        for scene in scenes:
            for thing in scene.things:
                spot = thing.y / scene.height, thing.x / scene.width
                places[thing.shape].add(spot)
                places[thing.name].add(spot)
        for index in range(max(1, start), len(ids)):
            if (name := self.shapes.get(ids[index])) is None:
                continue
            colour = self.colours.get(ids[index - 1])
            found = places.get(name if colour is None else f"{colour} {name}", set())
            if len(found) == 1:
                yield index - (colour is not None), index, next(iter(found))

    def texts(self, ids: list[int], start: int, scenes: list[Scene]) -> Iterator[tuple[int, int, Spot]]:
        places: dict[str, set[tuple[Spot, ...]]] = defaultdict(set)
        for scene in scenes:
            if scene.print is not None:
                boxes = print_boxes(scene.print)
                middles = [((top + bottom) / 2, (left + right) / 2) for left, top, right, bottom in boxes]
                places[scene.print.text].add(tuple((y / scene.height, x / scene.width) for y, x in middles))
        for index in range(max(1, start), len(ids)):
            if ids[index - 1] != self.quote:
                continue
            found = places.get(self.spelt(ids[index:]), set())
            if len(found) == 1:
                yield from ((index + k, index + k, spot) for k, spot in enumerate(next(iter(found))))

    def spelt(self, ids: list[int]) -> str:
        """The characters that the ids begin with."""
        return "".join(self.characters[token] for token in takewhile(self.characters.__contains__, ids))
