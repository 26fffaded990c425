"""Rows of several LoRA adapters in one batch give the tokens of the library's model with each merged into it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from llm_service.layers.adapters import AdapterKernel
from llm_service.request import SamplingParams
from tests import reference
from tests.adapters import ALL, ATTENTION, make_adapter, merged
from tests.parity.local_engine import LocalEngine, Prompt, make_prompt
from tests.pictures import noise

TOKENS = 12
GREEDY = SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0.0)
ADAPTERS: list[dict[str, object]] = [
    {"rank": 4, "modules": ALL},
    {"rank": 8, "modules": ATTENTION, "lora_alpha": 16, "use_rslora": True},
    {"rank": 2, "modules": ("q_proj", "v_proj", "in_proj_qkv"), "strength": 2.0},
    {"rank": 3, "modules": ("down_proj", "up_proj", "o_proj", "out_proj", "in_proj_z"), "dtype": torch.bfloat16},
]


def adapters_of(directory: Path) -> list[Path]:
    folder = directory.parent / f"{directory.name}-adapters"
    return [make_adapter(directory, folder / str(n), seed=n, **given) for n, given in enumerate(ADAPTERS)]  # type: ignore[arg-type]


def expected(directory: Path, folder: Path | None, prompt: Prompt) -> list[int]:
    with merged(directory, folder):
        return reference.reference_generate(directory, prompt.inputs, TOKENS)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"])
def test_a_mixed_batch_of_four_adapters_and_none(checkpoints: Callable[..., Path], family: str) -> None:
    directory = checkpoints(family)
    folders = adapters_of(directory)
    prompt = make_prompt(directory, [noise(60, 90), "What is in the picture?"])
    said = [expected(directory, folder, prompt) for folder in (None, *folders)]
    assert len({tuple(each) for each in said}) == len(said), "the adapters prove nothing"
    numbers = [2, 0, 1, 4, 3, 0, 1]
    for given in ({}, {"max_loras": 2, "step_tokens": 32, "prefix_cache": True}):
        engine = LocalEngine(directory, adapters=folders, **given)  # type: ignore[arg-type]
        for _ in range(2):
            outcomes = engine.run([prompt] * len(numbers), GREEDY, numbers)
            assert [outcome.tokens for outcome in outcomes] == [said[number] for number in numbers], given


@pytest.mark.parametrize("family", ["qwen3_vl", pytest.param("qwen3_5", marks=pytest.mark.soak)])
def test_kernels_for_gpus_give_the_same_tokens(checkpoints: Callable[..., Path], family: str) -> None:
    directory = checkpoints(family)
    folders, numbers = adapters_of(directory), [2, 0, 1, 4, 3]
    prompt = make_prompt(directory, [noise(60, 90), "What is in the picture?"])
    said = [expected(directory, folder, prompt) for folder in (None, *folders)]
    engine = LocalEngine(directory, adapters=folders, adapter_kernel=AdapterKernel.GPU)
    outcomes = engine.run([prompt] * len(numbers), GREEDY, numbers)
    assert [outcome.tokens for outcome in outcomes] == [said[number] for number in numbers]
