"""Quantised checkpoints against transformers on the weights that they are, in float32."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from encoder_service.families import config
from encoder_service.models.tower import load_tower
from llm_service.layers.cpu import selection
from llm_service.layers.cpu.quantized_panels import QuantizedPanels
from llm_service.layers.linear.parallel import PackedLinear
from llm_service.layers.linear.placement import Stored
from llm_service.layers.linear.quantized_weight import Number, StackedWeight
from llm_service.layers.moe.experts import Experts
from llm_service.layers.tensor_parallel import TensorGroup
from llm_service.models import quantized as reading
from llm_service.models.loader import load_decoder
from llm_service.models.quantization_config import quantization_of
from llm_service.request import SamplingParams
from llm_service.worker.weights import describe
from testkit import reference
from testkit.checkpoints import Family
from testkit.local_engine import LocalEngine, make_prompt
from tests.quantized import FORMATS, quantize_checkpoint

CPU = torch.device("cpu")
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)

ALIKE = "modelopt FP8_PER_CHANNEL_PER_TOKEN", "modelopt FP8_PB_WO", "modelopt W8A16", "modelopt MXFP8"
"""Formats whose tensors have been met in others."""
KINDS: list[tuple[Family, str]] = [
    *(("qwen3_vl", form) for form in FORMATS if form not in ALIKE),
    ("qwen2_vl", "gptq of 8 bits"),
    ("qwen2_5_vl", "gptq in order of importance"),
    ("qwen3_vl_moe", "fp8 in blocks"),
    ("qwen3_5", "awq"),
]
REST: list[tuple[Family, str]] = [
    ("qwen3_vl_moe", "pack-quantized, with zeros"),
    *(("qwen3_5", form) for form in ("fp8 in blocks", "gptq", "pack-quantized, with zeros")),
    *(("qwen3_5_moe", form) for form in ("fp8 in blocks", "awq")),
    *(("qwen3_vl", form) for form in ALIKE),
]
"""Of formats and families that are crossed above, these pairs as well."""
ANSWERED: list[tuple[Family, str]] = [
    ("qwen3_vl", "int-quantized, with zeros"),
    ("qwen3_vl", "pack-quantized, a scale an output"),
    ("qwen3_vl", "modelopt mixed"),
    ("qwen2_5_vl", "gptq in order of importance"),
    ("qwen3_vl_moe", "fp8 in blocks"),
    ("qwen3_5", "awq"),
]
"""A pair of each family, and of each number that kernels widen: that weights are the right ones is tested of all."""


@pytest.fixture(
    scope="module",
    params=[*(pytest.param(kind, id=" ".join(kind)) for kind in KINDS)]
    + [pytest.param(kind, id=" ".join(kind), marks=pytest.mark.soak) for kind in REST],
)
def folders(
    request: pytest.FixtureRequest, checkpoints: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A quantised checkpoint, and one of the weights that it is."""
    family, form = request.param
    return quantize_checkpoint(checkpoints(family), FORMATS[form], tmp_path_factory.mktemp("quantised"))


@pytest.mark.parametrize(
    "folders",
    [
        pytest.param(kind, id=" ".join(kind), marks=() if kind in ANSWERED else pytest.mark.soak)
        for kind in (*KINDS, *REST)
    ],
    indirect=True,
)
def test_greedy_tokens_are_the_references(folders: tuple[Path, Path]) -> None:
    quantized, wide = folders
    picture = Image.fromarray(np.random.default_rng(1).integers(0, 256, (90, 120, 3), dtype=np.uint8))
    prompts = [make_prompt(wide, parts) for parts in (["Tell me about circles."], [picture, "What is it?"])]
    expected = [reference.reference_generate(wide, prompt.inputs, GREEDY.max_tokens) for prompt in prompts]
    assert expected[0] != expected[1], "the prompts prove nothing"
    outcomes = LocalEngine(quantized, step_tokens=48).run(prompts, GREEDY)
    assert [outcome.tokens for outcome in outcomes] == expected


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_holds_its_part_of_every_weight_and_no_longer_form(
    folders: tuple[Path, Path], ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(ranks):
        check_share(folders, TensorGroup(rank, ranks), monkeypatch)


@pytest.mark.parametrize(
    "folders",
    [
        pytest.param(kind, id=" ".join(kind), marks=() if kind in KINDS else pytest.mark.soak)
        for kind in (*KINDS, *REST)
        if "moe" in kind[0]
    ],
    indirect=True,
)
def test_a_rank_holds_some_experts_whole(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    made, read = reading.quantised_weight, set[int]()

    def noted(scheme: Any, module: str, *more: Any) -> Stored:
        read.update(map(int, re.findall(r"experts\.(\d+)", module)))
        return made(scheme, module, *more)

    monkeypatch.setattr(reading, "quantised_weight", noted)
    for rank in range(2):
        read.clear()
        check_share(folders, TensorGroup(rank, 2, expert_parallel=True), monkeypatch)
        assert read == set(range(3 * rank, 3 * rank + 3)), "others are not even looked at"


@pytest.mark.parametrize("folders", [("qwen3_vl_moe", "fp8 in blocks")], ids=" ".join, indirect=True)
def test_ranks_that_cut_blocks_are_told_what_keeps_them_whole(folders: tuple[Path, Path]) -> None:
    for group in (TensorGroup(), TensorGroup(1, 2), TensorGroup(1, 2, expert_parallel=True)):
        with capture_logs() as lines:
            load_decoder(Checkpoint(folders[0]), torch.float32, CPU, group)
        cut = group.size > 1 and not group.expert_parallel
        assert any("--enable-expert-parallel keeps them whole" in line["event"] for line in lines) == cut


def check_share(folders: tuple[Path, Path], group: TensorGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = load_decoder(Checkpoint(folders[0]), torch.float32, CPU, group)
    assert describe(ours, "").widened_in == "registers"
    with monkeypatch.context() as patch:
        for kind in (PackedLinear, Experts):
            patch.setattr(kind, "finalize", lambda self, **_: None)
        theirs = dict(load_decoder(Checkpoint(folders[1]), torch.float32, CPU, group).named_modules())
    compared = 0
    for name, module in ours.layers.named_modules(prefix="layers"):
        for weight, expected in pairs(module, theirs[name]):
            torch.testing.assert_close(wide(weight), expected, rtol=1e-6, atol=0, msg=name)
            compared += 1
    assert compared >= 4 * len(ours.layers), "few are quantised"


def pairs(module: torch.nn.Module, plain: torch.nn.Module) -> Iterator[tuple[object, torch.Tensor]]:
    """A module's quantised weights, each beside the one that it is, and none of it in a longer form."""
    if isinstance(module, Experts):
        assert not module.gate_up_proj.numel()
        assert not module.down_proj.numel()
        for number, (gate_up, down) in enumerate(module.laid_out):
            yield gate_up, plain.gate_up_proj[number].detach()
            yield down, plain.down_proj[number].detach()
    elif isinstance(module, PackedLinear) and isinstance(module.laid_out, QuantizedPanels | StackedWeight):
        assert not module.weight.numel()
        yield module.laid_out, plain.weight.detach()


def wide(weight: object) -> torch.Tensor:
    """A quantised weight in its long form; those with orders of their own are one below the other."""
    if isinstance(weight, StackedWeight):
        return torch.cat([wide(part) for part in weight.parts])
    assert isinstance(weight, QuantizedPanels)
    return weight.wide()


def test_what_is_told_of_the_weights_is_what_the_format_needs(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without panels, which are of 64 outputs, as few as the matrices of tiny models have."""
    monkeypatch.setattr(selection, "allows_panels", lambda: False)
    checkpoint = Checkpoint(folders[0])
    told = describe(load_decoder(checkpoint, torch.float32, CPU), quantization_of(checkpoint.config))
    stated = json.loads((folders[0] / "config.json").read_text())["quantization_config"]
    assert told.quantization == stated["quant_method"]
    assert told.number in {each.value for each in Number}
    assert told.bits == (4 if told.number in ("uint4", "e2m1") else 8)
    assert told.widened_in == "memory"
    text = {name: each for name, each in load_file(folders[0] / "model.safetensors").items() if "visual" not in name}
    tied = 0 if "lm_head.weight" in text else text["model.embed_tokens.weight"].nbytes  # laid out for products besides
    assert told.bytes == pytest.approx(tied + sum(each.nbytes for each in text.values()), rel=0.1)


def test_a_weight_that_its_neighbours_are_quantised_without_is_refused(
    checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    plain = checkpoints("qwen3_vl")
    form = FORMATS["fp8 in blocks"]
    seen: list[int] = []

    def some(weight: torch.Tensor) -> object:
        seen.append(1)
        made = form(weight)
        return (made[0], {"weight": weight}, weight) if len(seen) == 3 else made

    quantized, _ = quantize_checkpoint(plain, some, tmp_path)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="is not quantised"):
        load_decoder(Checkpoint(quantized), torch.float32, CPU)


def test_int8_beside_it_is_refused(checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    quantized, _ = quantize_checkpoint(checkpoints("qwen3_vl"), FORMATS["awq"], tmp_path)
    with pytest.raises(CheckpointError, match="--weight-dtype int8"):
        load_decoder(Checkpoint(quantized), torch.float32, CPU, weight_dtype="int8")


@pytest.mark.parametrize("form", ["fp8 in blocks", "modelopt FP8", "modelopt NVFP4"])
def test_quantised_vision_weights_are_refused(form: str, checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoints("qwen3_vl"), folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "visual.blocks.0.attn.qkv.weight" in name)
    _, made, _ = FORMATS[form](tensors.pop(name))
    save_file(tensors | {f"{name.removesuffix('weight')}{part}": each for part, each in made.items()}, file)
    checkpoint = Checkpoint(folder)
    with pytest.raises(CheckpointError, match="the vision weights are quantised"):
        load_tower(checkpoint, config.read(checkpoint), CPU, torch.float32)
