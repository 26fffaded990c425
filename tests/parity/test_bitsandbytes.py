"""Whole checkpoints that transformers has bitsandbytes quantise, towers too, beside the weights that they then are."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from common.checkpoints.checkpoint import Checkpoint
from testkit import reference
from testkit.checkpoints import Family
from testkit.hf_side import GREEDY, Served
from testkit.local_engine import LocalEngine, make_prompt
from tests.parity.test_encoder_parity import ROWS, Ours
from tests.parity.test_hf_quantized import TEXT
from tests.quantized import by_bitsandbytes, quantize_checkpoint, rows_of_blocks
from tools.models.prompts import PROMPTS
from tools.models.reference import Reference
from tools.models.tiny import make

from bitsandbytes.nn import Linear4bit  # isort: skip
from transformers import AutoModelForImageTextToText, BitsAndBytesConfig  # isort: skip

FORMS = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "int8": {"load_in_8bit": True},
}


@pytest.mark.parametrize(("family", "form"), [("qwen2_5_vl", "nf4"), ("qwen3_vl", "int8")])
def test_rows_and_greedy_tokens_are_the_references(
    family: Family, form: str, checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    source, quantized, wide = checkpoints(family), tmp_path / "quantized", tmp_path / "wide"
    for folder in (quantized, wide):
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("model*.safetensors*"))
    stated = BitsAndBytesConfig(**FORMS[form])
    model = AutoModelForImageTextToText.from_pretrained(
        source, quantization_config=stated, dtype=torch.float32, device_map="cpu"
    )
    model.save_pretrained(quantized)
    dequantized(model).save_pretrained(wide)
    assert Checkpoint(quantized).config["quantization_config"]["quant_method"] == "bitsandbytes"
    assert "quantization_config" not in Checkpoint(wide).config

    picture = Image.fromarray(np.random.default_rng(1).integers(0, 256, (90, 120, 3), dtype=np.uint8))
    ours = Ours.load(quantized)
    patches, plan = ours.image(picture)
    expected = reference.rows(wide, *reference.images_inputs(wide, [picture]))
    torch.testing.assert_close(ours.tower(patches, [plan.grid]), expected, **ROWS)

    prompts = [make_prompt(wide, parts) for parts in (["Tell me about circles."], [picture, "What is it?"])]
    tokens = [reference.reference_generate(wide, prompt.inputs, GREEDY.max_tokens) for prompt in prompts]
    assert tokens[0] != tokens[1], "the prompts prove nothing"
    outcomes = LocalEngine(quantized, step_tokens=48).run(prompts, GREEDY)
    assert [outcome.tokens for outcome in outcomes] == tokens


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of transformers' processors
def test_texts_that_transformers_computes_have_the_same_weights(tmp_path: Path) -> None:
    made = by_bitsandbytes("nf4", nested=True)
    quantized, wide = quantize_checkpoint(make("cohere2_vision", tmp_path / "plain"), made, tmp_path, TEXT)
    served, library = Served.of(quantized), Reference(wide)
    engine = served.engine(by_hf=True, step_tokens=64)
    asked = [PROMPTS["text"], PROMPTS["one picture"]]
    outcomes = engine.run([served.prompt(parts) for parts in asked], GREEDY)
    assert [outcome.tokens for outcome in outcomes] == [library.tokens(library.inputs(parts)) for parts in asked]


def dequantized(model: Any) -> Any:
    """By transformers."""
    parts = {name: part for name, part in model.named_modules() if isinstance(part, Linear4bit)}
    shapes = {name: part.weight.quant_state.shape for name, part in parts.items()}
    with ExitStack() as stack:
        for part in parts.values():
            stack.enter_context(rows_of_blocks(part.weight.quant_state))
        plain = model.dequantize(torch.float32)
    for name, shape in shapes.items():
        weight = plain.get_submodule(name).weight
        weight.data = weight.data.view(shape)
    return plain
