"""Tokens of pruned videos: those of transformers, which is given the same rows at the same positions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from common.media.item import Header
from llm_service.request import SamplingParams
from tests import pictures, reference
from tests.parity.local_engine import LocalEngine, Prompt, make_prompt

GREEDY = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)


def scattered(header: Header) -> np.ndarray:
    """The first frame group, and some rows of the others."""
    mask = np.random.default_rng(5).random(header.tokens) < 0.4
    mask[: header.tokens // header.grid.t] = True
    return mask


def nearly_none(header: Header) -> np.ndarray:
    """Two rows, so that most frame groups are empty, the first and the last among them."""
    each = header.tokens // header.grid.t
    mask = np.zeros(header.tokens, np.bool_)
    mask[[each + 1, header.tokens - each - 1]] = True
    return mask


@torch.no_grad()
def reference_tokens(folder: Path, prompt: Prompt, mask: np.ndarray) -> tuple[list[int], torch.Tensor, list[int]]:
    """The prompt's ids and positions without the rows that are dropped, and the tokens that follow."""
    model = reference.model(folder)
    decoder = model.model.language_model
    ids, positions = prompt.inputs["input_ids"][0], prompt.inputs["position_ids"]
    placeholder = ids == model.config.video_token_id
    stays = ~placeholder
    stays[placeholder] = torch.from_numpy(mask)
    ids, positions, visual = ids[stays], positions[:, :, stays], placeholder[stays]
    rows = prompt.rows[-1]
    hidden = decoder.get_input_embeddings()(ids)
    hidden[visual] = rows[:, 0]
    deep = list(rows[:, 1:].unbind(1))
    out: list[int] = []
    where = positions
    for _ in range(GREEDY.max_tokens):
        given = {"visual_pos_masks": visual[None], "deepstack_visual_embeds": deep} if deep else {}
        states = decoder(inputs_embeds=hidden[None], position_ids=where, use_cache=False, **given).last_hidden_state
        out.append(int(model.lm_head(states[0, -1]).argmax()))
        hidden = torch.cat([hidden, decoder.get_input_embeddings()(torch.tensor(out[-1:]))])
        where = torch.cat([where, where.amax() + torch.ones(3, 1, 1, dtype=where.dtype)], dim=2)
        visual = torch.cat([visual, torch.zeros(1, dtype=torch.bool)])
    return ids.tolist(), positions[:, 0], out


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
@pytest.mark.parametrize("prune", [scattered, nearly_none])
def test_a_pruned_video_has_the_references_tokens(
    family: str, prune: Callable[[Header], np.ndarray], checkpoints: Callable[..., Path]
) -> None:
    folder = checkpoints(family)
    video = reference.Video(pictures.frames(16, 96, 64), 4.0)
    masks: list[np.ndarray] = []

    def remembered(header: Header) -> np.ndarray:
        masks.append(prune(header))
        return masks[-1]

    prompt = make_prompt(folder, ["Look: ", video, "What happens, and when?"], prune=remembered)
    ids, positions, tokens = reference_tokens(folder, prompt, masks[0])
    assert prompt.layout.ids == ids
    ours = np.frombuffer(prompt.layout.positions, np.int32).reshape(3, -1)
    assert np.array_equal(ours, positions.numpy())
    picture = make_prompt(folder, [Image.fromarray(pictures.frames(1, 96, 64)[0]), "What is it?"])
    alone = LocalEngine(folder, step_tokens=7, prefix_cache=True)
    assert alone.run([prompt], GREEDY)[0].tokens == tokens
    assert alone.run([prompt], GREEDY)[0].tokens == tokens
    assert LocalEngine(folder).run([prompt, picture, prompt], GREEDY)[2].tokens == tokens
