"""Tokens of pruned videos: those of transformers, which is given the same rows at the same positions."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from common.media.item import Header, Options
from common.media.kept_rows import unpack
from common.rows.wire import DType, RowLayout
from encoder_service.engine.pruning import choose, pruned
from encoder_service.item import Plan
from llm_service.request import SamplingParams
from testkit import reference
from testkit.local_engine import LocalEngine, make_prompt
from tests import pictures

GREEDY = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)


Prune = Callable[[Header, torch.Tensor], np.ndarray]


def scattered(header: Header, _: torch.Tensor) -> np.ndarray:
    """The first frame group, and some rows of the others."""
    mask = np.random.default_rng(5).random(header.tokens) < 0.4
    mask[: header.tokens // header.grid.t] = True
    return mask


def nearly_none(header: Header, _: torch.Tensor) -> np.ndarray:
    """Two rows, so that most frame groups are empty, the first and the last among them."""
    each = header.tokens // header.grid.t
    mask = np.zeros(header.tokens, np.bool_)
    mask[[each + 1, header.tokens - each - 1]] = True
    return mask


def half(header: Header, rows: torch.Tensor) -> np.ndarray:
    """What the encoder keeps of these rows at a rate of a half."""
    _, levels, width = rows.shape
    whole = Plan(header.grid, header.tokens, (), 0, 0, (0, 0))
    count = pruned(whole, Options(video_pruning_rate=0.5), 2, "here").kept
    layout = RowLayout(levels, width, DType.FLOAT32)
    mask = unpack(choose(memoryview(rows.numpy().tobytes()), header.grid.t, count, layout), header.tokens)
    each = header.tokens // header.grid.t
    assert mask[:each].all()
    assert 0 < mask[each:].sum() == header.tokens // 2 - each
    assert len({tuple(group) for group in mask.reshape(-1, each).tolist()}) > 2, "as many groups would do"
    return mask


@pytest.mark.parametrize(
    ("prune", "family"),
    [*product((scattered, nearly_none), ("qwen2_5_vl", "qwen3_vl", "qwen3_5")), (half, "qwen3_vl")],
)
def test_a_pruned_video_has_the_references_tokens(family: str, prune: Prune, checkpoints: Callable[..., Path]) -> None:
    folder = checkpoints(family)
    video = reference.Video(pictures.frames(16, 96, 64), 4.0)
    masks: list[np.ndarray] = []

    def remembered(header: Header, rows: torch.Tensor) -> np.ndarray:
        masks.append(prune(header, rows))
        return masks[-1]

    prompt = make_prompt(folder, ["Look: ", video, "What happens, and when?"], prune=remembered)
    ids, positions, tokens = reference.pruned_tokens(
        folder, prompt.inputs, prompt.rows[-1], masks[0], GREEDY.max_tokens
    )
    assert prompt.layout.ids == ids
    ours = np.frombuffer(prompt.layout.positions, np.int32).reshape(3, -1)
    assert np.array_equal(ours, positions.numpy())
    picture = make_prompt(folder, [Image.fromarray(pictures.frames(1, 96, 64)[0]), "What is it?"])
    alone = LocalEngine(folder, step_tokens=7, prefix_cache=True)
    assert alone.run([prompt], GREEDY)[0].tokens == tokens
    assert alone.run([prompt], GREEDY)[0].tokens == tokens
    assert LocalEngine(folder).run([prompt, picture, prompt], GREEDY)[2].tokens == tokens
