"""Tiny random checkpoints of transformers' models, with the processors, tokenizers and templates that they need."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from common.checkpoints import tekken
from common.hf.classes import class_of, head_of, transformers
from common.hf.small_models import redraw_corrections
from llm_service.model_config.adapter_folder import CONFIG, WEIGHTS
from tools.models.recipes import RECIPES
from tools.models.recipes.recipe import Recipe

WORDS = ("<s>", "</s>", "<pad>", "<image>")
"""Special tokens that every checkpoint has."""

_BYTES = 256
_TEMPLATE = (
    "{% for message in messages %}{{ '<s>' + message.role + ': ' }}{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}{{ '<image>' }}"
    "{% elif part.type == 'video' %}{{ '<video>' }}{% elif part.type == 'audio' %}{{ '<audio>' }}"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{{ '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def make(name: str, folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Writes a checkpoint of an architecture in `RECIPES` into a folder, and returns that."""
    return make_by(RECIPES[name], folder, seed=seed, dtype=dtype)


def make_without_weights(name: str, folder: Path) -> Path:
    """The same without weights: enough for its processor, and for what transformers says of it."""
    config_of_recipe(name).save_pretrained(folder)
    _save_processor(RECIPES[name], folder)
    return folder


def make_by(recipe: Recipe, folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """The same by a recipe."""
    folder.mkdir(parents=True, exist_ok=True)
    config, ids = config_of(recipe), _ids(recipe)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # what is of one dimension is near where transformers draws it
        model = class_of(config)._from_config(config, dtype=torch.float32)
    redraw(model, seed)
    with torch.no_grad():  # as in models that were trained, no answer has a placeholder
        head_of(model).weight[[id for word, id in ids.items() if word != "</s>"]] = 0
    model.generation_config.update(eos_token_id=ids["</s>"], pad_token_id=ids["<pad>"], do_sample=False)
    if dtype != torch.float32:  # a cast, though to the same type, takes complex tables' imaginary parts
        model.to(dtype)
    model.save_pretrained(folder)
    for seed, (path, settings) in enumerate(recipe.adapters.items(), _ADAPTER_SEED):
        _save_adapter(model, settings, folder / path, seed)
    _save_processor(recipe, folder)
    return folder


_ADAPTER_SEED = 7


def _save_adapter(model: Any, settings: Mapping[str, Any], folder: Path, seed: int) -> None:
    """With pairs that are drawn, for all linear layers whose names fit its settings, as transformers saves them."""
    folder.mkdir(exist_ok=True)
    generator, rank = torch.Generator().manual_seed(seed), int(settings["r"])
    pairs: dict[str, torch.Tensor] = {}
    for name, part in model.named_modules():
        if re.fullmatch(settings["target_modules"], name):
            for half, shape in (("A", (rank, part.in_features)), ("B", (part.out_features, rank))):
                drawn = torch.randn(shape, generator=generator) / shape[1] ** 0.5
                pairs[f"base_model.model.{name}.lora_{half}.weight"] = drawn
    save_file(pairs, folder / WEIGHTS)
    stated = {"peft_type": "LORA", "base_model_name_or_path": str(folder), "task_type": "CAUSAL_LM", **settings}
    (folder / CONFIG).write_text(json.dumps(stated), encoding="utf-8")


def _save_processor(recipe: Recipe, folder: Path) -> None:
    if recipe.tekken:
        (folder / tekken.FILE).write_text(json.dumps(_tekken(recipe.tekken)), encoding="utf-8")
        recipe.processor(None, "").save_pretrained(folder)
        return
    words = (*WORDS, *recipe.words)
    tokenizer = transformers().PreTrainedTokenizerFast(
        tokenizer_object=(_of_pieces if recipe.pieces else _of_bytes)(words, begins=recipe.begins),
        **dict(zip(("bos_token", "eos_token", "pad_token"), WORDS, strict=False)),
        extra_special_tokens=dict(recipe.named),
    )
    template = _TEMPLATE.replace("<image>", recipe.image).replace("<video>", recipe.video)
    template = template.replace("<audio>", recipe.audio)
    recipe.processor(tokenizer, template).save_pretrained(folder)


def config_of_recipe(name: str) -> Any:
    """The configuration of an architecture in `RECIPES`."""
    return config_of(RECIPES[name])


def config_of(recipe: Recipe) -> Any:
    """The configuration of a recipe."""
    ids = _ids(recipe)
    config = recipe.config(ids, max(ids.values()) + 1 + (len(_TOKENS) if recipe.tekken else 0))
    tied = getattr(config, "tie_word_embeddings", False)  # by default not: it would only repeat itself
    config.get_text_config().tie_word_embeddings = tied
    return config


def _ids(recipe: Recipe) -> dict[str, int]:
    if recipe.tekken:
        return {word: at for at, word in enumerate(recipe.tekken)}
    first = len(_PIECES) if recipe.pieces else _BYTES
    return {word: first + at for at, word in enumerate((*WORDS, *recipe.words))}


def redraw(model: torch.nn.Module, seed: int) -> None:
    """Fills every parameter in place so that a model looks at its picture: matrices are drawn from N(0, 1.3² / fan-in),
    tables from N(0, 1), and what is of one dimension is moved a little."""
    generator = torch.Generator().manual_seed(seed)
    tables = {id(part.weight) for part in model.modules() if isinstance(part, torch.nn.Embedding)}
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:  # transformers leaves some as memory had them
                parameter.nan_to_num_(0.0, 0.0, 0.0).clamp_(-4.0, 4.0).add_(0.1 * noise)
            elif id(parameter) in tables:
                parameter.copy_(noise)
            else:
                parameter.copy_(1.3 * noise / parameter[0].numel() ** 0.5)
        redraw_corrections(model, generator)


_PIECES = (*(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(0x21, 0x7F)))


def _of_pieces(words: tuple[str, ...], *, begins: bool) -> Tokenizer:
    """Signs, bytes for those that it does not know, and special tokens; a text `begins` with <s>, or does not."""
    made = Tokenizer(models.BPE({piece: at for at, piece in enumerate(_PIECES)}, [], byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _with_special(made, words, begins=begins)


_TOKENS = (*(bytes([byte]) for byte in range(256)), b"th", b"in", b" th", b"the", b"ing", b" the", b"ow", b"ou")
_PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _tekken(marks: tuple[str, ...]) -> dict[str, Any]:
    """A tokenizer of bytes and some pairs of them, behind special tokens, in Mistral's own form."""
    sizes = {"default_num_special_tokens": len(marks), "default_vocab_size": len(marks) + len(_TOKENS)}
    written = [base64.b64encode(token).decode() for token in _TOKENS]
    return {
        "config": {"pattern": _PATTERN, "num_vocab_tokens": len(_TOKENS), **sizes, "version": "v7"},
        "vocab": [{"rank": at, "token_bytes": token, "token_str": None} for at, token in enumerate(written)],
        "special_tokens": [{"rank": at, "token_str": mark, "is_control": True} for at, mark in enumerate(marks)],
        "audio": {
            "sampling_rate": 16_000,
            "frame_rate": 12.5,
            "audio_encoding_config": {"num_mel_bins": 128, "hop_length": 160, "window_size": 400},
            "chunk_length_s": 30.0,
        },
    }


def _of_bytes(words: tuple[str, ...], *, begins: bool) -> Tokenizer:
    """Bytes, and special tokens; a text `begins` with <s>, or does not."""
    signs = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({sign: at for at, sign in enumerate(signs)}, []))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\s+"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    return _with_special(made, words, begins=begins)


def _with_special(made: Tokenizer, words: tuple[str, ...], *, begins: bool) -> Tokenizer:
    made.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in words])
    if begins:
        first = made.token_to_id("<s>")
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", first)])
    return made
