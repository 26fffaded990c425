"""Embeddings against transformers: hidden states of whole prompts, however they are cut, mixed and cached."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from llm_service.models.decoder import Decoder
from llm_service.models.hf.decoder import HfDecoder
from llm_service.request import Pooling
from testkit import reference
from testkit.checkpoints import Family
from testkit.hf_side import Served
from testkit.local_engine import LocalEngine, Part, Prompt, make_prompt
from tests.mtp_checkpoint import with_mtp_layer
from tests.parity.graphed import graphed
from tools.models.prompts import PROMPTS as PROMPTS_OF_ANY
from tools.models.reference import Reference
from tools.models.tiny import make

TOLERANCE = 1e-4
EACH: dict[Pooling, Callable[[torch.Tensor], torch.Tensor]] = {
    Pooling.LAST: lambda hidden: hidden[-1],
    Pooling.MEAN: lambda hidden: hidden.mean(0),
    Pooling.CLS: lambda hidden: hidden[0],
}


def _picture(seed: int, width: int, height: int) -> Image.Image:
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def _video(seed: int, frames: int) -> reference.Video:
    return reference.Video(np.stack([np.asarray(_picture(seed + n, 96, 64)) for n in range(frames)]), fps=4.0)


PARTS: list[list[Part]] = [
    ["Tell me about two red circles, and about the house behind the hills. " * 5],
    [_picture(1, 120, 90), "What is in the picture?"],
    [_picture(5, 100, 100), "is left of", _picture(6, 70, 140)],
    ["Look: ", _video(7, 8), "What happens?"],
]
FAMILIES: list[Any] = [
    "qwen3_vl",
    pytest.param("qwen3_5", marks=pytest.mark.soak),
    pytest.param("qwen2_vl", marks=pytest.mark.soak),
    pytest.param("qwen3_vl_moe", marks=pytest.mark.soak),
]


@torch.no_grad()
def hidden_states(directory: Path, prompt: Prompt) -> torch.Tensor:
    """[n, hidden] of a whole prompt, by transformers."""
    given = {name: value for name, value in prompt.inputs.items() if name not in ("position_ids", "rope_deltas")}
    found: torch.Tensor = reference.model(directory).model(**given).last_hidden_state[0]
    return found


def check(found: np.ndarray, expected: list[torch.Tensor], pooling: Pooling) -> None:
    """Hidden states are about 1 in size; those of first tokens, which see themselves alone, may be all alike."""
    wanted = torch.stack(expected).numpy()
    assert np.abs(wanted).max() > 0.5, "they prove nothing"
    assert pooling is Pooling.CLS or np.abs(wanted[0] - wanted[1:]).max(axis=1).min() > 0.1, "they are all alike"
    assert np.abs(found - wanted).max() < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_are_hidden_states_of_transformers(family: Family, checkpoints: Callable[..., Path]) -> None:
    directory = checkpoints(family)
    prompts = [make_prompt(directory, parts) for parts in PARTS]
    states = [hidden_states(directory, prompt) for prompt in prompts]
    whole, chunked = LocalEngine(directory), LocalEngine(directory, step_tokens=16)
    company = LocalEngine(directory, step_tokens=48, max_running=8, overlap=True)
    cached = LocalEngine(directory, prefix_cache=True, step_tokens=64, overlap=True)
    for pooling, made in EACH.items():
        expected = [made(each) for each in states]
        check(np.concatenate([whole.embed([prompt], pooling)[0] for prompt in prompts]), expected, pooling)
        check(chunked.embed(prompts, pooling)[0], expected, pooling)
        check(company.embed(prompts, pooling, beside=[prompts[1], prompts[0]])[0], expected, pooling)
        for again in range(2):
            vectors, found = cached.embed(prompts, pooling)
            check(vectors, expected, pooling)
            if pooling.of_all:
                assert not any(found), "a block that is cached has no hidden states"
            elif again:
                assert found[0] >= 64, "the cache proves nothing"


@pytest.mark.parametrize(
    "by_hf",
    [pytest.param(False, id="our decoder", marks=pytest.mark.soak), pytest.param(True, id="transformers' text")],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of transformers' processors
def test_so_are_those_of_a_model_without_a_family(by_hf: bool, tmp_path: Path) -> None:
    served, library = Served.of(make("llava", tmp_path)), Reference(tmp_path)
    given = [library.inputs(parts) for parts in PROMPTS_OF_ANY.values()]
    prompts = [served.prompt(parts) for parts in PROMPTS_OF_ANY.values()]
    engine = served.engine(by_hf=by_hf, step_tokens=16)
    assert isinstance(engine.decoder, HfDecoder if by_hf else Decoder)
    with torch.no_grad():
        states = [library.model.model(**inputs).last_hidden_state[0] for inputs in given]
    for pooling, made in EACH.items():
        check(engine.embed(prompts, pooling)[0], [made(each) for each in states], pooling)


@pytest.mark.parametrize("pooling", [Pooling.LAST, Pooling.MEAN])
def test_so_are_those_of_steps_that_graphs_compute(pooling: Pooling, checkpoints: Callable[..., Path]) -> None:
    directory = checkpoints("qwen3_vl")
    prompts = [make_prompt(directory, parts) for parts in PARTS]
    engine, _ = graphed(directory, overlap=True)
    expected = [EACH[pooling](hidden_states(directory, prompt)) for prompt in prompts]
    check(engine.embed(prompts, pooling, beside=prompts[:1])[0], expected, pooling)
    assert engine.scheduler.counters.graph_steps == engine.scheduler.counters.steps


@pytest.mark.soak
@pytest.mark.parametrize("pooling", [Pooling.LAST, Pooling.MEAN])
def test_so_are_those_beside_answers_with_drafts(
    pooling: Pooling, checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    directory = with_mtp_layer(checkpoints("qwen3_5"), tmp_path / "mtp")
    prompts = [make_prompt(directory, parts) for parts in PARTS[:3]]
    engine = LocalEngine(directory, mtp=True, speculative_tokens=4, step_tokens=64)
    expected = [EACH[pooling](hidden_states(directory, prompt)) for prompt in prompts]
    check(engine.embed(prompts, pooling, beside=prompts[:2])[0], expected, pooling)
    assert engine.scheduler.counters.draft_tokens > 0, "nobody had drafts"
