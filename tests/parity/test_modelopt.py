"""Checkpoints in the layouts that NVIDIA's Model Optimizer publishes, against transformers on the weights that they
are."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from llm_service.layers.moe import experts as layer
from llm_service.layers.tensor_parallel import TensorGroup
from llm_service.models.decoder import Decoder
from llm_service.models.loader import load_decoder
from llm_service.models.quantization_config import quantization_of
from llm_service.request import SamplingParams
from llm_service.worker.weights import describe
from testkit import reference
from testkit.hf_side import GREEDY, Served
from testkit.local_engine import LocalEngine, make_prompt
from tests.modelopt_checkpoints import Experts, modelopt_config, publish, state
from tools.models.prompts import PROMPTS
from tools.models.reference import Reference
from tools.models.tiny import make

CPU = torch.device("cpu")
LONG = SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True)
ATTENTION = r"(?<!visual)\.layers\.\d+\.self_attn\.[qkvo]_proj\.weight"
EXPERTS = r"\.experts\."
DENSE = r"language_model\.layers\.\d+\.(mlp|self_attn|linear_attn)\.(\w+_proj|in_proj_qkv|in_proj_z)\.weight"
Algorithm = Callable[[str], str | None]


def by_name(*rules: tuple[str, str]) -> Algorithm:
    """The format of the first of these patterns that is in a tensor's name."""
    return lambda name: next((algorithm for pattern, algorithm in rules if re.search(pattern, name)), None)


def check(published: Path, wide: Path) -> None:
    """Tokens of a family of ours, after a text and after a picture, and that weights stay short."""
    picture = Image.fromarray(np.random.default_rng(1).integers(0, 256, (90, 120, 3), dtype=np.uint8))
    prompts = [make_prompt(wide, parts) for parts in (["Tell me about circles."], [picture, "What is it?"])]
    expected = [reference.reference_generate(wide, prompt.inputs, LONG.max_tokens) for prompt in prompts]
    engine = LocalEngine(published, step_tokens=48)
    assert [outcome.tokens for outcome in engine.run(prompts, LONG)] == expected
    checkpoint = Checkpoint(published)
    assert describe(engine.decoder, quantization_of(checkpoint.config)).quantization == "modelopt"


@pytest.mark.parametrize(
    ("experts", "algorithm", "swapped"),
    [
        ("behind", "NVFP4", False),
        ("stacked", "NVFP4", False),
        pytest.param("stacked", "NVFP4", True, marks=pytest.mark.soak),
        pytest.param("stacked", "FP8", True, marks=pytest.mark.soak),
        pytest.param("stacked", "FP8_PER_CHANNEL_PER_TOKEN", False, marks=pytest.mark.soak),
    ],
)
def test_experts_are_read_however_they_are_stored(
    experts: Experts, algorithm: str, checkpoints: Callable[..., Path], tmp_path: Path, *, swapped: bool
) -> None:
    rules = by_name((EXPERTS, algorithm), (ATTENTION, "FP8"))
    check(*publish(checkpoints("qwen3_vl_moe"), tmp_path, rules, experts=experts, swapped=swapped))


def test_a_rank_has_its_part_of_stacked_experts_or_some_of_them(
    checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    rules = by_name((EXPERTS, "NVFP4"))
    published, whole = publish(checkpoints("qwen3_vl_moe"), tmp_path, rules, experts="stacked", swapped=True)
    for rank, alone in product(range(2), (False, True)):
        group = TensorGroup(rank, 2, expert_parallel=alone)
        ours, theirs = (load_decoder(Checkpoint(each), torch.float32, CPU, group) for each in (published, whole))
        experts = [part for part in ours.modules() if isinstance(part, layer.Experts)]
        plain = [part for part in theirs.modules() if isinstance(part, layer.Experts)]
        assert experts
        for mine, expected in zip(experts, plain, strict=True):
            assert not mine.gate_up_proj.numel()
            x = torch.randn(3, 64)
            assert mine.own == (
                slice(mine.count // 2 * rank, mine.count // 2 * (rank + 1)) if alone else slice(0, mine.count)
            )
            for number in range(mine.own.start, mine.own.stop):
                torch.testing.assert_close(mine.run(number, x), expected.run(number, x), rtol=1e-4, atol=1e-4)


def test_layers_in_several_formats_beside_delta_nets(checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    """As of Qwen3.6: what is dense in 4 bits, attention and delta nets in 8, with the gates of these in floats."""
    rules = (r"\.mlp\.\w+_proj\.weight", "W4A16_NVFP4"), (DENSE, "FP8")
    check(*publish(checkpoints("qwen3_5"), tmp_path, by_name(*rules)))


def test_a_table_of_ngrams_has_one_scale_for_its_pieces(checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    """As of Qwen4: experts in 4 bits, the table in e4m3, whose scale stands beside its pieces."""
    published, wide = publish(checkpoints("qwen4_exp"), tmp_path, by_name((EXPERTS, "NVFP4")))
    files = {folder: folder / "model.safetensors" for folder in (published, wide)}
    stored = {folder: load_file(file) for folder, file in files.items()}
    for name in [name for name in stored[published] if ".ngram_embedding.shard_" in name]:
        scale = torch.tensor(0.0625 if ".layers.0." in name else 0.125, dtype=torch.bfloat16)
        numbers = (stored[published][name] / scale).to(torch.float8_e4m3fn)
        stored[published] |= {name: numbers, f"{name.partition('.shard_')[0]}.weight_scale": scale}
        stored[wide][name] = numbers.float() * scale.float()
    for folder, file in files.items():
        save_file(stored[folder], file, {"format": "pt"})
    state(published, modelopt_config("NVFP4", "FP8"))
    check(published, wide)


def test_the_table_of_tokens_and_the_head_may_be_quantised(checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    rules = (r"lm_head|embed_tokens", "NVFP4"), (DENSE, "NVFP4")
    check(*publish(checkpoints("qwen3_vl_moe"), tmp_path, by_name(*rules)))


KINDS: list[Any] = [
    pytest.param(
        "nemotron_h_omni",
        [(r"mixer\.experts\.|shared_experts", "W4A16_NVFP4"), (r"mixer\.(in|out)_proj\.weight", "FP8")],
        {},
        marks=pytest.mark.soak,
    ),
    pytest.param("kimi_k25", [(r"mlp\.experts\.", "NVFP4")], {}, marks=pytest.mark.soak),
    pytest.param(
        "llama4",
        [(EXPERTS, "NVFP4"), (r"feed_forward\.\w+_proj|shared_expert\.|self_attn\.\w_proj", "NVFP4")],
        {"experts": "stacked", "inputs_first": True},
        marks=pytest.mark.soak,
    ),
    ("llama4", [(EXPERTS, "FP8"), (r"self_attn\.\w_proj", "FP8")], {"experts": "stacked", "inputs_first": True}),
]
"""Texts that no family is for, as they are published."""


@pytest.mark.parametrize(("kind", "rules", "options"), KINDS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of transformers' processors
def test_texts_of_other_models_are_read_as_they_are_published(
    kind: str, rules: list[tuple[str, str]], options: Any, tmp_path: Path
) -> None:
    """Pictures as well: the tower, which is not quantised, is read from the same checkpoint."""
    text = by_name(*((rf"language_model\..*({pattern})", algorithm) for pattern, algorithm in rules))
    published, wide = publish(make(kind, tmp_path / "plain"), tmp_path, text, **options)
    served, library = Served.of(published), Reference(wide)
    asked = [PROMPTS["text"], PROMPTS["one picture"]]
    expected = [library.tokens(library.inputs(parts)) for parts in asked]
    engine = served.engine(step_tokens=80)
    assert isinstance(engine.decoder, Decoder)
    outcomes = engine.run([served.prompt(parts) for parts in asked], GREEDY)
    assert [outcome.tokens for outcome in outcomes] == expected


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of transformers' processors
def test_stacked_experts_are_refused_by_name_where_transformers_computes(tmp_path: Path) -> None:
    rules = by_name((r"language_model\..*\.experts\.", "FP8"))
    published, _ = publish(make("llama4", tmp_path / "plain"), tmp_path, rules, experts="stacked", inputs_first=True)
    with pytest.raises(CheckpointError, match=r"feed_forward\.experts.*, whose weight is quantised"):
        Served.of(published).engine(by_hf=True)
