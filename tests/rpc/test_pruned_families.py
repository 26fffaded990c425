"""Pruned videos through real services of families beside Qwen3-VL, by a caller's rate and by the service's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from common.media.kept_rows import unpack
from testkit import reference
from tests import pictures
from tests.rpc.encoder_client import Client, Encoded, video
from tests.rpc.pairs import Pair, answer, asked, greedy, pair
from tests.unit.encoder_service.test_pruning import by_definition
from twinlens import Answer, user

TOKENS = 16
QUESTION = "What happens, and when?"
USUAL, OTHER = 0.5, 0.8


def patchwork(count: int, seed: int) -> np.ndarray:
    """Frames [count, 96, 128, 3] uint8 of coarse colours, of which some change from each to the next."""
    draw = np.random.default_rng(seed)
    coarse = draw.integers(0, 256, (6, 8, 3), dtype=np.uint8)
    out = []
    for _ in range(count):
        coarse[draw.integers(0, 6, 8), draw.integers(0, 8, 8)] = draw.integers(0, 256, (8, 3))
        out.append(coarse.repeat(16, axis=0).repeat(16, axis=1))
    return np.stack(out)


FILM = pictures.video(patchwork(24, seed=67), fps=8)


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_5"])
def both(request: pytest.FixtureRequest, checkpoints: Callable[..., Path]) -> Iterator[Pair]:
    """Both services, which prune videos where a request does not say."""
    with pair(checkpoints(request.param), light=False, video_pruning_rate=USUAL) as running:
        yield running


@pytest.fixture(scope="module")
def whole(both: Pair) -> Encoded:
    """All rows of the film: nobody told the encoder of the other service's rate."""
    with Client(both.encoder) as client:
        return client.one(video(FILM))


def said(both: Pair, **options: float) -> Answer:
    return answer(both.text, asked(user(video(FILM, **options), QUESTION), greedy(TOKENS)))


@cache
def expected(checkpoint: Path, kept: tuple[int, ...]) -> tuple[int, list[int]]:
    """How long transformers' prompt is with these rows alone, and its greedy tokens."""
    clip = reference.Video.read(FILM)
    content = [{"type": "video"}, {"type": "text", "text": QUESTION}]
    inputs = reference.reference_inputs(checkpoint, [{"role": "user", "content": content}], videos=[clip])
    patches, grids, _ = reference.video_inputs(checkpoint, clip)
    rows = reference.rows(checkpoint, patches, grids)
    mask = np.zeros(len(rows), np.bool_)
    mask[list(kept)] = True
    ids, _, tokens = reference.pruned_tokens(checkpoint, inputs, rows[torch.from_numpy(mask)], mask, TOKENS)
    return len(ids), tokens


def to_keep(whole: Encoded, rate: float) -> tuple[int, ...]:
    groups, rows = whole.header.grid.t, len(whole.rows)
    return tuple(by_definition(whole.rows, groups, max(rows // groups, int(rows * (1 - rate)))))


@pytest.mark.parametrize(
    ("options", "rate"),
    [({}, USUAL), ({"video_pruning_rate": 0.0}, 0.0), ({"video_pruning_rate": OTHER}, OTHER)],
    ids=["none said", "zero", "another"],
)
def test_a_film_has_as_many_rows_as_its_rate_leaves_or_the_service_s_and_transformers_tokens(
    both: Pair, whole: Encoded, options: dict[str, float], rate: float
) -> None:
    kept = to_keep(whole, rate)
    assert (len(kept) == len(whole.rows)) == (not rate)
    found = said(both, **options)
    (span,) = found.started.spans
    assert (span.rows, found.started.prompt_tokens) == (len(kept), expected(both.checkpoint, kept)[0])
    assert found.choices[0].token_ids == expected(both.checkpoint, kept)[1]


@pytest.mark.parametrize("rate", [USUAL, OTHER])
def test_rows_that_change_most_are_kept_as_they_were(both: Pair, whole: Encoded, rate: float) -> None:
    with Client(both.encoder) as client:
        found = client.one(video(FILM, video_pruning_rate=rate))
    kept = np.flatnonzero(unpack(found.header.kept_rows, found.header.grid_rows))
    assert tuple(kept) == to_keep(whole, rate)
    assert np.array_equal(found.rows, whole.rows[kept])


def test_rates_are_answered_differently(both: Pair, whole: Encoded) -> None:
    answers = {tuple(expected(both.checkpoint, to_keep(whole, rate))[1]) for rate in (0.0, USUAL, OTHER)}
    assert len(answers) == 3, "tokens prove nothing"
