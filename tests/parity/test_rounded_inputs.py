"""Checkpoints that are made to be multiplied with inputs of 8 bits (W8A8), against transformers with
compressed-tensors, which rounds inputs as such checkpoints say."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from llm_service.layers.cpu import selection
from llm_service.layers.cpu.panels import PanelWeight
from llm_service.layers.cpu.quad_panels import QuadPanels
from llm_service.layers.linear.parallel import PackedLinear
from llm_service.layers.moe.experts import Experts
from llm_service.models.loader import load_decoder
from llm_service.models.quantization_config import Scheme
from llm_service.models.quantized import check_weight_dtype
from llm_service.request import SamplingParams
from llm_service.worker.draft_loader import load_eagle_head
from llm_service.worker.weights import describe
from testkit import reference
from testkit.checkpoints import Family
from testkit.local_engine import LocalEngine, Prompt, make_prompt
from tests.eagle_checkpoint import eagle_head
from tests.parity.cases import prompt_logits
from tests.quantized import FORMATS, quantize_checkpoint
from tools.models.w8a8 import W8A8, to_w8a8

pytestmark = pytest.mark.skipif(not selection.computes_bytes(), reason="this processor lacks AVX512-VNNI")

CPU = torch.device("cpu")
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen2_5_vl"])
def folders(
    request: pytest.FixtureRequest, checkpoints: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A checkpoint as llm-compressor writes it, and one of the weights that it is."""
    family: Family = request.param
    root = tmp_path_factory.mktemp("rounded")
    quantized, wide = quantize_checkpoint(checkpoints(family), FORMATS["int-quantized"], root)
    path = quantized / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": W8A8}))
    return quantized, wide


@pytest.fixture(scope="module")
def stored(checkpoints: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint with a scale for the inputs of each matrix, and one of the weights that it is."""
    root = tmp_path_factory.mktemp("stored")
    quantized, wide = quantize_checkpoint(checkpoints("qwen3_vl"), FORMATS["int-quantized"], root)
    for file in quantized.glob("*.safetensors"):
        tensors = load_file(file)
        scaled = [name for name in tensors if name.endswith(".weight_scale")]
        tensors |= {name.replace("weight_scale", "input_scale"): torch.tensor([0.02]) for name in scaled}
        save_file(tensors, file, {"format": "pt"})
    (group,) = W8A8["config_groups"].values()
    inputs = group["input_activations"] | {"dynamic": False, "strategy": "tensor"}
    path = quantized / "config.json"
    stated = W8A8 | {"config_groups": {"group_0": group | {"input_activations": inputs}}}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": stated}))
    return quantized, wide


def test_inputs_are_rounded_by_stored_scales_as_transformers_rounds_them(stored: tuple[Path, Path]) -> None:
    quantized, wide = stored
    prompt = prompts_of(quantized)[0]
    unrounded, expected = (reference.reference_logits(folder, prompt.inputs) for folder in (wide, quantized))
    decoder = load_decoder(Checkpoint(quantized), torch.float32, CPU)
    forms = [module.laid_out for module in decoder.layers.modules() if isinstance(module, PackedLinear)]
    assert all(isinstance(form, QuadPanels) and form.step for form in forms)
    assert describe(decoder, "compressed-tensors").inputs == "int8"
    apart = (prompt_logits(decoder, prompt) - expected).norm(dim=1) / (unrounded - expected).norm(dim=1)
    assert apart[:2].max() < 1e-3
    assert apart.median() < 0.5


def with_input_scales(folder: Path, source: Path, scale: float | None) -> Checkpoint:
    """The same checkpoint with other ones, or none."""
    shutil.copytree(source, folder)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name in [name for name in tensors if name.endswith("input_scale")]:
            tensors[name] = torch.tensor([scale or 0.0])
            if scale is None:
                del tensors[name]
        save_file(tensors, file, {"format": "pt"})
    return Checkpoint(folder)


def test_weights_without_the_scale_that_is_stated_are_multiplied_with_inputs_as_they_are(
    stored: tuple[Path, Path], tmp_path: Path
) -> None:
    decoder = load_decoder(with_input_scales(tmp_path / "made", stored[0], None), torch.float32, CPU)
    assert describe(decoder, "compressed-tensors").inputs == ""


@pytest.mark.parametrize("scale", [0.0, -0.5, float("inf"), float("nan")])
def test_a_stored_scale_that_is_none_is_refused(scale: float, stored: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"its input_scale is {scale}"):
        load_decoder(with_input_scales(tmp_path / "made", stored[0], scale), torch.float32, CPU)


def prompts_of(folder: Path) -> list[Prompt]:
    picture = Image.fromarray(np.random.default_rng(1).integers(0, 256, (90, 120, 3), dtype=np.uint8))
    return [make_prompt(folder, parts) for parts in (["Tell me about circles."], [picture, "What is it?"])]


def test_inputs_are_rounded_as_transformers_rounds_them(folders: tuple[Path, Path]) -> None:
    """An input that is half-way between two numbers goes to either by the last bit of a sum before, and so do all that
    come of it: rows are nearly the same up to there, and nearer than without rounding from there on."""
    quantized, wide = folders
    prompt = prompts_of(quantized)[0]
    unrounded, expected = (reference.reference_logits(folder, prompt.inputs) for folder in (wide, quantized))
    ours = prompt_logits(load_decoder(Checkpoint(quantized), torch.float32, CPU), prompt)
    apart = (ours - expected).norm(dim=1) / (unrounded - expected).norm(dim=1)
    assert apart[:2].max() < 1e-3
    assert apart.median() < 0.5


def test_company_and_cached_prefixes_change_no_token(folders: tuple[Path, Path]) -> None:
    quantized, _ = folders
    prompts = prompts_of(quantized)
    alone = [LocalEngine(quantized).run([prompt], GREEDY)[0].tokens for prompt in prompts]
    company = LocalEngine(quantized, step_tokens=48, max_running=8, prefix_cache=True)
    for _ in range(2):  # the second time from the cache
        outcomes = company.run([*prompts, *prompts], GREEDY)
        assert [outcome.tokens for outcome in outcomes] == alone * 2
    assert any(outcome.cached for outcome in outcomes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_text_layers_are_in_quads_and_nothing_else(folders: tuple[Path, Path], dtype: torch.dtype) -> None:
    decoder = load_decoder(Checkpoint(folders[0]), dtype, CPU)
    forms = [module.laid_out for module in decoder.layers.modules() if isinstance(module, PackedLinear)]
    assert len(forms) == 4 * len(decoder.layers)
    assert all(isinstance(form, QuadPanels) for form in forms)
    assert not isinstance(decoder.lm_head.laid_out, QuadPanels)


def test_what_is_told_of_the_weights(folders: tuple[Path, Path]) -> None:
    told = describe(load_decoder(Checkpoint(folders[0]), torch.float32, CPU), "compressed-tensors")
    assert (told.number, told.bits, told.widened_in, told.inputs) == ("int8", 8, "", "int8")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_checkpoint_is_rounded_so_where_that_is_asked_for(
    checkpoint: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = load_decoder(Checkpoint(checkpoint), dtype, CPU, weight_dtype="w8a8")
    forms = [module.laid_out for module in decoder.layers.modules() if isinstance(module, PackedLinear)]
    assert forms
    assert all(isinstance(form, QuadPanels) for form in forms)
    assert not isinstance(decoder.lm_head.laid_out, QuadPanels), "logits are of inputs as they are"
    assert describe(decoder, "w8a8").inputs == "int8"
    with pytest.raises(CheckpointError, match="w8a8 is for weights that the checkpoint has not quantised"):
        check_weight_dtype("w8a8", Scheme("fp8"), CPU)
    monkeypatch.setattr(selection, "multiplies_bytes", lambda: False)
    with pytest.raises(CheckpointError, match="w8a8 is for our kernels on CPUs with AVX512-VNNI"):
        load_decoder(Checkpoint(checkpoint), dtype, CPU, weight_dtype="w8a8")


def test_logits_of_a_draft_head_are_of_inputs_as_they_are_too(checkpoint: Path, tmp_path: Path) -> None:
    target, of = load_decoder(Checkpoint(checkpoint), torch.float32, CPU, weight_dtype="w8a8"), Checkpoint(checkpoint)
    own = Checkpoint(eagle_head(checkpoint, tmp_path / "head"))
    head = load_eagle_head(own, target, of, torch.float32, weight_dtype="w8a8").decoder
    forms = {name: part.laid_out for name, part in head.named_modules() if isinstance(part, PackedLinear)}
    assert isinstance(forms.pop("lm_head"), PanelWeight)
    assert forms
    assert all(isinstance(form, QuadPanels) for form in forms.values())


def test_experts_are_rounded_as_well(checkpoints: Callable[..., Path]) -> None:
    folder = checkpoints("qwen3_vl_moe")
    decoder = load_decoder(Checkpoint(folder), torch.float32, CPU, weight_dtype="w8a8")
    mixtures = [module for module in decoder.modules() if isinstance(module, Experts)]
    assert mixtures
    assert all(isinstance(form, QuadPanels) for experts in mixtures for pair in experts.laid_out for form in pair)
    prompt = prompts_of(folder)[0]
    outcomes = LocalEngine(folder, weight_dtype="w8a8", step_tokens=16, max_running=8).run([prompt] * 3, GREEDY)
    alone = LocalEngine(folder, weight_dtype="w8a8").run([prompt], GREEDY)
    assert [outcome.tokens for outcome in outcomes] == [alone[0].tokens] * 3


def test_a_checkpoint_that_benchmarks_round_is_such_a_one(checkpoint: Path, tmp_path: Path) -> None:
    folder = to_w8a8(checkpoint, tmp_path / "made")
    decoder = load_decoder(Checkpoint(folder), torch.float32, CPU)
    forms = [module.laid_out for module in decoder.layers.modules() if isinstance(module, PackedLinear)]
    assert forms
    assert all(isinstance(form, QuadPanels) for form in forms)
    prompt = prompts_of(folder)[0]
    wide, expected = (reference.reference_logits(each, prompt.inputs) for each in (checkpoint, folder))
    ours = prompt_logits(decoder, prompt)
    assert (ours - expected)[0].norm() < 1e-3 * (wide - expected)[0].norm()
