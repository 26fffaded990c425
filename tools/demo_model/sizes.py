"""Picture sizes before and after the preprocessing, and the limits that the processor configurations carry.

Every picture comes to an area between 128 x 128 and 160 x 160, whatever its own size: one scale to learn, and 16 to 25
tokens a picture. A film has at most 8 frames, of about 96 x 96 pixels then.
"""

import math
from functools import lru_cache
from random import Random

FACTOR = 32
IMAGE_LIMITS = (128 * 128, 160 * 160)
VIDEO_LIMITS = (64 * 64, 8 * 96 * 96)
MIN_FRAMES, MAX_FRAMES, FRAMES_PER_SECOND = 4, 8, 2

Size = tuple[int, int]


def fit(height: int, width: int, least: int, most: int, frames: int = 1) -> Size:
    """The (height, width) that the Qwen-VL processors resize to: multiples of 32, area within limits, ratio kept.

    Example: 300 x 200 within 128**2 and 160**2 gives 192 x 128.
    """
    high, wide = round(height / FACTOR) * FACTOR, round(width / FACTOR) * FACTOR
    if frames * high * wide > most:
        shrink = math.sqrt(frames * height * width / most)
        high = max(FACTOR, math.floor(height / shrink / FACTOR) * FACTOR)
        wide = max(FACTOR, math.floor(width / shrink / FACTOR) * FACTOR)
    elif frames * high * wide < least:
        grow = math.sqrt(least / (frames * height * width))
        high, wide = math.ceil(height * grow / FACTOR) * FACTOR, math.ceil(width * grow / FACTOR) * FACTOR
    return high, wide


@lru_cache(maxsize=16)
def pool(frames: int) -> dict[Size, list[Size]]:
    """Natural sizes (height, width), 96-512 a side and ratio at most 3, by the size that they are resized to.

    `frames` is 1 for pictures. Only target sizes that are common enough are kept.
    """
    rng, groups = Random(frames), dict[Size, list[Size]]()
    least, most = IMAGE_LIMITS if frames == 1 else VIDEO_LIMITS
    for _ in range(6000):
        side = math.exp(rng.uniform(math.log(96), math.log(512)))
        ratio = math.exp(rng.choice((0.0, rng.uniform(-0.6, 0.6), rng.uniform(-1.1, 1.1))))
        size = round(side * math.sqrt(ratio)), round(side / math.sqrt(ratio))
        if max(size) > 512 or min(size) < 96:
            continue
        groups.setdefault(fit(*size, least, most, frames), []).append(size)
    return {target: sizes for target, sizes in groups.items() if len(sizes) >= 60}


def random_target(rng: Random, frames: int = 1) -> Size:
    """A size after the preprocessing, as often as it occurs."""
    groups = pool(frames)
    return rng.choices(list(groups), [len(sizes) for sizes in groups.values()])[0]


def random_source(rng: Random, target: Size, frames: int = 1) -> Size:
    """A size before the preprocessing that leads to `target`: mostly the smaller ones, which are quick to draw."""
    one, two = rng.choice(pool(frames)[target]), rng.choice(pool(frames)[target])
    return min(one, two, key=lambda size: size[0] * size[1]) if rng.random() < 0.7 else one
