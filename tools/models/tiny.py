"""Tiny random checkpoints of the library's models, with the processors, tokenizers and templates that they need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from common.library_models import library

WORDS = ("<s>", "</s>", "<pad>", "<image>")
"""Special tokens that every checkpoint has."""

_BYTES = 256
TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
}
_TEMPLATE = (
    "{% for message in messages %}{{ '<s>' + message.role + ': ' }}{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}{{ 'IMAGE' }}"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{{ '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a checkpoint of one architecture is made: its other special tokens, its configuration, of the ids of special
    tokens and the vocabulary's size, and its processor, of the tokenizer and the template. `image` stands for a picture
    in a prompt."""

    config: Callable[[dict[str, int], int], Any]
    processor: Callable[[Any, str], Any]
    words: tuple[str, ...] = ()
    image: str = "<image>"


def make(name: str, folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Writes a checkpoint of an architecture in `RECIPES` into a folder, and returns that."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe = RECIPES[name]
    words = (*WORDS, *recipe.words)
    tokenizer = library().PreTrainedTokenizerFast(
        tokenizer_object=_tokenizer(words), **dict(zip(("bos_token", "eos_token", "pad_token"), WORDS, strict=False))
    )
    ids = {word: _BYTES + at for at, word in enumerate(words)}
    config = recipe.config(ids, _BYTES + len(words))
    model = library().AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    redraw(model, seed)
    model.generation_config.update(eos_token_id=ids["</s>"], pad_token_id=ids["<pad>"], do_sample=False)
    model.to(dtype).save_pretrained(folder)
    recipe.processor(tokenizer, _TEMPLATE.replace("IMAGE", recipe.image)).save_pretrained(folder)
    return folder


def redraw(model: torch.nn.Module, seed: int) -> None:
    """Fills every parameter in place so that a model looks at its picture: matrices are drawn from N(0, 1.3² / fan-in),
    tables from N(0, 1), and what is of one dimension is moved a little."""
    generator = torch.Generator().manual_seed(seed)
    tables = {id(part.weight) for part in model.modules() if isinstance(part, torch.nn.Embedding)}
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.add_(0.1 * noise)
            elif id(parameter) in tables:
                parameter.copy_(noise)
            else:
                parameter.copy_(1.3 * noise / parameter[0].numel() ** 0.5)


def _tokenizer(words: tuple[str, ...]) -> Tokenizer:
    """Bytes, and special tokens; a text begins with <s>."""
    signs = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({sign: at for at, sign in enumerate(signs)}, []))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\s+"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in words])
    first = made.token_to_id("<s>")
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", first)])
    return made


def _llava(ids: dict[str, int], vocabulary: int) -> Any:
    lib = library()
    return lib.LlavaConfig(
        vision_config=lib.CLIPVisionConfig(**VISION, projection_dim=32),
        text_config=lib.LlamaConfig(**TEXT, vocab_size=vocabulary),
        image_token_index=ids["<image>"],
    )


def _llava_processor(tokenizer: Any, template: str) -> Any:
    lib, side = library(), VISION["image_size"]
    pictures = lib.CLIPImageProcessor(size={"shortest_edge": side}, crop_size={"height": side, "width": side})
    return lib.LlavaProcessor(
        pictures,
        tokenizer,
        patch_size=VISION["patch_size"],
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=template,
    )


RECIPES = {"llava": Recipe(_llava, _llava_processor)}
"""By `model_type`."""
