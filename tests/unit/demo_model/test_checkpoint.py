"""The checkpoint in the repository: it loads as it is, its tokenizer knows every byte, and it answers what it sees."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from testkit import reference
from tools.demo_model import tokens
from tools.demo_model.optimise import Optimiser, orthogonalised
from tools.demo_model.trainer import rate_at

DEMO = Path(__file__).parents[3] / "models" / "demo"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


def test_it_is_small_and_whole() -> None:
    files = [path for path in DEMO.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 20e6
    with safe_open(DEMO / "model.safetensors", "pt") as weights:
        shapes = [weights.get_slice(name).get_shape() for name in weights.keys()]  # noqa: SIM118
        assert all(name.startswith("model.") for name in weights.keys())  # noqa: SIM118
    assert 3e6 < sum(math.prod(shape) for shape in shapes) < 8e6


def test_it_loads_in_the_reference_with_deepstack_and_interleaved_rotary() -> None:
    model, processor = reference.model(DEMO), reference.processor(DEMO)
    assert type(model).__name__ == "Qwen3VLForConditionalGeneration"
    assert type(processor).__name__ == "Qwen3VLProcessor"
    assert len(model.config.vision_config.deepstack_visual_indexes) >= 2
    assert model.config.text_config.rope_parameters["mrope_section"] == [12, 10, 10]
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert model.lm_head.weight is model.model.language_model.embed_tokens.weight


def test_no_text_is_unknown_to_the_tokenizer(tokenizer: Tokenizer) -> None:
    for text in (
        "What is in the picture?",
        "ABCD 0123",
        "Wie heißt du? 你好 \U0001f600\t\n\x00",
        "".join(map(chr, range(1, 400))),
    ):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("EXIT42").tokens == list("EXIT42")


def test_special_tokens_are_single_and_named_in_the_configuration(tokenizer: Tokenizer) -> None:
    config = json.loads((DEMO / "config.json").read_text())
    ids = {token: tokenizer.token_to_id(token) for token in tokens.SPECIAL}
    assert all(tokenizer.encode(token).ids == [number] for token, number in ids.items())
    assert config["image_token_id"] == ids["<|image_pad|>"]
    assert config["video_token_id"] == ids["<|video_pad|>"]
    assert max(ids.values()) < config["text_config"]["vocab_size"]
    generation = json.loads((DEMO / "generation_config.json").read_text())
    assert ids["<|im_end|>"] in generation["eos_token_id"]


def test_the_tokenizer_is_the_same_each_time_it_is_built() -> None:
    assert tokens.build(2, 60).to_str() == tokens.build(2, 60).to_str()


def test_the_chat_template_wraps_turns_and_marks_media() -> None:
    messages = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]},
        {"role": "assistant", "content": "A star."},
        {"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "And here?"}]},
    ]
    text = reference.processor(DEMO).apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What?<|im_end|>\n"
        "<|im_start|>assistant\nA star.<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|video_pad|><|vision_end|>And here?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_the_rate_rises_stays_and_falls_to_zero() -> None:
    assert rate_at(0, 0.0, 0.35) < 0.1
    assert rate_at(500, 0.5, 0.35) == 1.0
    assert 0.4 < rate_at(500, 0.825, 0.35) < 0.6
    assert rate_at(500, 1.0, 0.35) == 0.0


def test_orthogonalised_matrices_have_singular_values_near_one() -> None:
    for shape in ((2, 32, 96), (2, 96, 32)):
        values = torch.linalg.svdvals(orthogonalised(torch.randn(shape, generator=torch.Generator().manual_seed(1))))
        assert 0.5 < float(values.min()) <= float(values.max()) < 1.5


def test_the_optimiser_goes_on_from_its_state() -> None:
    def stepped(start: dict[str, object] | None, steps: int) -> tuple[torch.Tensor, dict[str, object]]:
        layer = torch.nn.Linear(8, 8)
        torch.nn.init.ones_(layer.weight)
        optimiser = Optimiser([("blocks.0.weight", layer.weight), ("bias", layer.bias)])
        if start is not None:
            optimiser.load(start)
        generator = torch.Generator().manual_seed(steps)
        for _ in range(steps):
            layer.weight.grad, layer.bias.grad = torch.randn(8, 8, generator=generator), torch.ones(8)
            optimiser.step(1.0)
        return layer.weight.detach(), optimiser.state()

    _, state = stepped(None, 3)
    fresh, resumed = stepped(None, 1)[0], stepped(state, 1)[0]
    assert not torch.equal(fresh, resumed)
    assert torch.equal(stepped(state, 1)[0], resumed)
