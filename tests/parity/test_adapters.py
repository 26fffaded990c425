"""Rows of several LoRA adapters in one batch give the tokens of peft's model with each of them, read from the files
that peft saves."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from llm_service.layers.lora.linear_adapters import AdapterKernel
from llm_service.model_config.name_patterns import Budget, NamePattern
from llm_service.request import Pooling, PromptLayout, SamplingParams
from testkit.local_engine import LocalEngine, Prompt, make_prompt
from tests.adapters import ALL, ATTENTION
from tests.peft_reference import PeftReference, fits_for_peft
from tests.pictures import noise
from tests.unit.llm_service.test_name_patterns import NAMES, WRITTEN

TOKENS = 12
GREEDY = SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0.0)
NUMBERS = [2, 0, 1, 4, 3, 0, 1]

Peft = Callable[[str], PeftReference]


def configs(family: str) -> list[dict[str, Any]]:
    """Four adapters as peft is told of them; it wants each pattern to fit something."""
    attends = 3 if family.startswith("qwen3_5") else 1
    return [
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": rf"model\.language_model\.layers\..*\.({'|'.join(ALL)})",
            "rank_pattern": {"v_proj": 2, r"layers\.\d+\..*(up|none)_proj": 6},
            "alpha_pattern": {rf"^model\..*\.[{attends}]\.self_attn.o_proj": 16, r"(.*\.)?layers.[0-9]+.*down_proj": 4},
        },
        {"r": 8, "lora_alpha": 16, "target_modules": list(ATTENTION), "use_rslora": True},
        {
            "r": 2,
            "lora_alpha": 8,
            "target_modules": ["q_proj", "v_proj", "in_proj_qkv"],
            "layers_to_transform": [0, attends],
        },
        {
            "r": 3,
            "lora_alpha": 12,
            "target_modules": ["o_proj", "out_proj", "in_proj_z"],
            "rank_pattern": {"o_proj": 5},
            "use_rslora": True,
            "dtype": torch.bfloat16,
        },
    ]


@pytest.fixture(scope="module")
def by_peft(checkpoints: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Peft:
    """A family's model with the four adapters, made once."""

    @cache
    def make(family: str) -> PeftReference:
        return PeftReference(checkpoints(family), tmp_path_factory.mktemp("adapters"), configs(family))

    return make


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_vl",
        *(
            pytest.param(each, marks=pytest.mark.soak)
            for each in ("qwen2_5_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
        ),
    ],
)
def test_a_mixed_batch_of_four_adapters_and_none(checkpoints: Callable[..., Path], by_peft: Peft, family: str) -> None:
    directory = checkpoints(family)
    peft = by_peft(family)
    prompt = make_prompt(directory, [noise(60, 90), "What is in the picture?"])
    said = [peft.generate(number, prompt.inputs, TOKENS) for number in range(5)]
    assert len({tuple(each) for each in said}) == len(said), "the adapters prove nothing"
    for given in ({}, {"max_loras": 2, "step_tokens": 32, "prefix_cache": True}):
        engine = LocalEngine(directory, adapters=peft.folders, **given)  # type: ignore[arg-type]
        for _ in range(2):
            outcomes = engine.run([prompt] * len(NUMBERS), GREEDY, NUMBERS)
            assert [outcome.tokens for outcome in outcomes] == [said[number] for number in NUMBERS], given


@pytest.mark.parametrize("kernel", [AdapterKernel.CPU, AdapterKernel.NONE])
def test_embeddings_of_a_mixed_batch_are_those_of_each_adapter_alone(
    checkpoints: Callable[..., Path], by_peft: Peft, kernel: AdapterKernel
) -> None:
    directory = checkpoints("qwen3_vl")
    peft = by_peft("qwen3_vl")
    engine = LocalEngine(directory, adapters=peft.folders, adapter_kernel=kernel)
    long, short = make_prompt(directory, [noise(60, 90), "What is in the picture?"]), make_prompt(directory, ["a"])
    for pooling in Pooling:
        alone = np.concatenate([engine.embed([long], pooling, adapters=[number])[0] for number in NUMBERS])
        assert pooling is Pooling.CLS or np.abs(alone[1] - alone[[0, 2, 3, 4]]).max(axis=1).min() > 1e-3
        together, _ = engine.embed([long] * len(NUMBERS), pooling, beside=[short], adapters=NUMBERS)
        assert np.abs(together - alone).max() < 1e-4


@pytest.mark.parametrize("kernel", [AdapterKernel.CPU, AdapterKernel.NONE])
def test_an_adapter_embeds_its_own_prompt_where_an_answer_is_drawn_behind_it(
    checkpoints: Callable[..., Path], by_peft: Peft, kernel: AdapterKernel
) -> None:
    """Of a token each: what is wanted of the step's last layer is all of its rows, in another order."""
    directory = checkpoints("qwen3_vl")
    peft = by_peft("qwen3_vl")
    engine = LocalEngine(directory, adapters=peft.folders, adapter_kernel=kernel)
    token = Prompt(PromptLayout([65], [], bytes(12)), [], {})
    base, own = (engine.embed([token], adapters=[number])[0] for number in (0, 1))
    assert np.abs(base - own).max() > 1e-3
    for number, alone in enumerate((base, own)):
        assert np.abs(engine.embed([token], beside=[token], adapters=[number])[0] - alone).max() < 1e-5


def test_the_files_are_those_that_peft_writes(by_peft: Peft) -> None:
    given, folder = configs("qwen3_vl")[0], by_peft("qwen3_vl").folders[0]
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["peft_version"]
    assert all(config[field] == value for field, value in given.items())


@pytest.mark.parametrize("pattern", WRITTEN)
def test_a_pattern_of_names_fits_what_it_fits_for_peft(pattern: str) -> None:
    read, budget = NamePattern(pattern), Budget()
    assert [read.fits(name, budget) for name in NAMES] == [fits_for_peft(pattern, name) for name in NAMES]


@pytest.mark.parametrize("family", ["qwen3_vl", pytest.param("qwen3_5", marks=pytest.mark.soak)])
def test_kernels_for_gpus_give_the_same_tokens(checkpoints: Callable[..., Path], by_peft: Peft, family: str) -> None:
    directory = checkpoints(family)
    peft, numbers, few = by_peft(family), NUMBERS[:5], 4
    prompt = make_prompt(directory, [noise(60, 90), "What is in the picture?"])
    engine = LocalEngine(directory, adapters=peft.folders, adapter_kernel=AdapterKernel.GPU)
    outcomes = engine.run([prompt] * len(numbers), msgspec.structs.replace(GREEDY, max_tokens=few), numbers)
    assert [outcome.tokens for outcome in outcomes] == [peft.generate(number, prompt.inputs, few) for number in numbers]
