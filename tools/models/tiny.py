"""Tiny random checkpoints of the library's models, with the processors, tokenizers and templates that they need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}{{ '<image>' }}"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{{ '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a checkpoint of one architecture is made: its configuration, of the ids of special tokens and the size of the
    vocabulary; its processor, of the tokenizer and the template; and its other special tokens, of which the tokenizer
    has a name for those in `named`. `pieces`: it is one of pieces, which sets a mark before the first word of a text;
    else one of bytes."""

    config: Callable[[dict[str, int], int], Any]
    processor: Callable[[Any, str], Any]
    words: tuple[str, ...] = ()
    pieces: bool = False
    named: Mapping[str, str] = field(default_factory=dict)


def make(name: str, folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Writes a checkpoint of an architecture in `RECIPES` into a folder, and returns that."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe = RECIPES[name]
    words = (*WORDS, *recipe.words)
    tokenizer = library().PreTrainedTokenizerFast(
        tokenizer_object=(_of_pieces if recipe.pieces else _of_bytes)(words),
        **dict(zip(("bos_token", "eos_token", "pad_token"), WORDS, strict=False)),
        extra_special_tokens=dict(recipe.named),
    )
    config, ids = config_of_recipe(name), _ids(recipe)
    model = library().AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    redraw(model, seed)
    model.generation_config.update(eos_token_id=ids["</s>"], pad_token_id=ids["<pad>"], do_sample=False)
    model.to(dtype).save_pretrained(folder)
    recipe.processor(tokenizer, _TEMPLATE).save_pretrained(folder)
    return folder


def config_of_recipe(name: str) -> Any:
    """The configuration of an architecture in `RECIPES`."""
    recipe = RECIPES[name]
    ids = _ids(recipe)
    config = recipe.config(ids, max(ids.values()) + 1)
    config.get_text_config().tie_word_embeddings = config.tie_word_embeddings  # tied, it would only repeat itself
    return config


def _ids(recipe: Recipe) -> dict[str, int]:
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
            if parameter.dim() == 1:
                parameter.add_(0.1 * noise)
            elif id(parameter) in tables:
                parameter.copy_(noise)
            else:
                parameter.copy_(1.3 * noise / parameter[0].numel() ** 0.5)


_PIECES = (*(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(0x21, 0x7F)))


def _of_pieces(words: tuple[str, ...]) -> Tokenizer:
    """Signs, bytes for those that it does not know, and special tokens; a text begins with <s>."""
    made = Tokenizer(models.BPE({piece: at for at, piece in enumerate(_PIECES)}, [], byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _with_special(made, words)


def _of_bytes(words: tuple[str, ...]) -> Tokenizer:
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
    return _with_special(made, words)


def _with_special(made: Tokenizer, words: tuple[str, ...]) -> Tokenizer:
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


def _siglip(**more: Any) -> Any:
    return library().SiglipVisionConfig(**VISION, **more)


def _side(**more: Any) -> dict[str, Any]:
    side = VISION["image_size"]
    return {"size": {"height": side, "width": side}, **more}


def _llava_next(ids: dict[str, int], vocabulary: int) -> Any:
    lib = library()
    return lib.LlavaNextConfig(
        vision_config=lib.CLIPVisionConfig(**VISION, projection_dim=32),
        text_config=lib.LlamaConfig(**TEXT, vocab_size=vocabulary),
        image_token_index=ids["<image>"],
        image_grid_pinpoints=_PINPOINTS,
    )


_PINPOINTS = [[56, 112], [112, 56], [112, 112]]


def _llava_next_processor(tokenizer: Any, template: str) -> Any:
    lib, side = library(), VISION["image_size"]
    pictures = lib.LlavaNextImageProcessor(
        size={"shortest_edge": side}, crop_size={"height": side, "width": side}, image_grid_pinpoints=_PINPOINTS
    )
    return lib.LlavaNextProcessor(
        pictures,
        tokenizer,
        patch_size=VISION["patch_size"],
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=template,
    )


def _llava_onevision(ids: dict[str, int], vocabulary: int) -> Any:
    lib = library()
    return lib.LlavaOnevisionConfig(
        vision_config=_siglip(vision_use_head=False),
        text_config=lib.Qwen2Config(**TEXT, vocab_size=vocabulary),
        image_token_index=ids["<image>"],
        video_token_index=ids["<video>"],
        image_grid_pinpoints=_PINPOINTS,
        vision_aspect_ratio="anyres_max_9",
        tie_word_embeddings=False,
    )


def _llava_onevision_processor(tokenizer: Any, template: str) -> Any:
    lib = library()
    return lib.LlavaOnevisionProcessor(
        lib.LlavaOnevisionImageProcessor(**_side(image_grid_pinpoints=_PINPOINTS)),
        tokenizer,
        lib.LlavaOnevisionVideoProcessor(**_side()),
        num_image_tokens=16,
        vision_feature_select_strategy="full",
        chat_template=template,
    )


def _mistral3(ids: dict[str, int], vocabulary: int) -> Any:
    lib = library()
    return lib.Mistral3Config(
        vision_config=lib.PixtralVisionConfig(**{**VISION, "image_size": 112}),
        text_config=lib.MistralConfig(**TEXT, vocab_size=vocabulary, sliding_window=None),
        image_token_index=ids["<image>"],
        spatial_merge_size=2,
        vision_feature_layer=-1,
    )


def _mistral3_processor(tokenizer: Any, template: str) -> Any:
    lib = library()
    pictures = lib.PixtralImageProcessor(size={"longest_edge": 112}, patch_size=28)
    return lib.PixtralProcessor(
        pictures,
        tokenizer,
        patch_size=14,
        spatial_merge_size=2,
        **_MISTRAL3,
        chat_template=template,
    )


_MISTRAL3 = {"image_token": "<image>", "image_break_token": "<break>", "image_end_token": "<end>"}


def _idefics3(ids: dict[str, int], vocabulary: int) -> Any:
    lib = library()
    return lib.Idefics3Config(
        vision_config={**VISION, "model_type": "idefics3_vision"},
        text_config=lib.LlamaConfig(**TEXT, vocab_size=vocabulary),
        image_token_id=ids["<image>"],
        scale_factor=2,
        pad_token_id=ids["<pad>"],
    )


def _idefics3_processor(tokenizer: Any, template: str) -> Any:
    lib = library()
    pictures = lib.Idefics3ImageProcessor(
        size={"longest_edge": 112},
        max_image_size={"longest_edge": 56},
        resample=lib.image_utils.PILImageResampling.BICUBIC,
    )
    return lib.Idefics3Processor(pictures, tokenizer, image_seq_len=4, chat_template=template)


def _internvl(ids: dict[str, int], vocabulary: int) -> Any:
    lib, side = library(), VISION["image_size"]
    return lib.InternVLConfig(
        vision_config=lib.InternVLVisionConfig(
            **{**VISION, "image_size": [side, side], "patch_size": [14, 14], "use_absolute_position_embeddings": True}
        ),
        text_config=lib.Qwen2Config(**TEXT, vocab_size=vocabulary),
        image_token_id=ids["<image>"],
        image_seq_length=4,
        downsample_ratio=0.5,
    )


def _internvl_processor(tokenizer: Any, template: str) -> Any:
    lib = library()
    pictures = lib.GotOcr2ImageProcessor(**_side(crop_to_patches=True, max_patches=4))
    videos = lib.InternVLVideoProcessor(**_side())
    return lib.InternVLProcessor(pictures, tokenizer, videos, image_seq_length=4, chat_template=template)


_INTERNVL = {
    "start_image_token": "<start>",
    "end_image_token": "<end>",
    "context_image_token": "<image>",
    "video_token": "<video>",
}


def _gemma3(ids: dict[str, int], vocabulary: int) -> Any:
    lib = library()
    text = {**TEXT, "num_hidden_layers": 4, "sliding_window": 24, "sliding_window_pattern": 2}
    return lib.Gemma3Config(
        vision_config=_siglip(vision_use_head=False),
        text_config=lib.Gemma3TextConfig(
            **text,
            vocab_size=vocabulary,
            query_pre_attn_scalar=16,
            layer_types=["sliding_attention", "full_attention"] * 2,
        ),
        mm_tokens_per_image=16,
        image_token_index=ids["<soft>"],
        boi_token_index=ids["<image>"],
        eoi_token_index=ids["<end>"],
        tie_word_embeddings=False,
    )


def _gemma3_processor(tokenizer: Any, template: str) -> Any:
    return library().Gemma3Processor(
        library().Gemma3ImageProcessor(**_side()), tokenizer, image_seq_length=16, chat_template=template
    )


_GEMMA3 = {"boi_token": "<image>", "eoi_token": "<end>", "image_token": "<soft>"}


def _aya_vision(ids: dict[str, int], vocabulary: int) -> Any:
    lib = library()
    return lib.AyaVisionConfig(
        vision_config=_siglip(vision_use_head=False),
        text_config=lib.Cohere2Config(
            **TEXT, vocab_size=vocabulary, sliding_window=24, layer_types=["sliding_attention"] * 2 + ["full_attention"]
        ),
        image_token_index=ids["<patch>"],
        downsample_factor=2,
        adapter_layer_norm_eps=1e-6,
        tie_word_embeddings=False,
    )


def _aya_vision_processor(tokenizer: Any, template: str) -> Any:
    lib = library()
    return lib.AyaVisionProcessor(
        lib.GotOcr2ImageProcessor(**_side(crop_to_patches=True, max_patches=4)),
        tokenizer,
        patch_size=14,
        img_size=VISION["image_size"],
        downsample_factor=2,
        **_AYA_VISION,
        chat_template=template,
    )


_AYA_VISION = {
    "image_token": "<image>",
    "start_of_img_token": "<start>",
    "end_of_img_token": "<end>",
    "img_patch_token": "<patch>",
}


RECIPES = {
    "llava": Recipe(_llava, _llava_processor),
    "llava_next": Recipe(_llava_next, _llava_next_processor),
    "llava_onevision": Recipe(_llava_onevision, _llava_onevision_processor, ("<video>",)),
    "mistral3": Recipe(_mistral3, _mistral3_processor, ("<break>", "<end>"), pieces=True),
    "idefics3": Recipe(
        _idefics3,
        _idefics3_processor,
        (
            "<fake_token_around_image>",
            "<end_of_utterance>",
            "<global-img>",
            *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
        ),
    ),
    "internvl": Recipe(_internvl, _internvl_processor, ("<start>", "<end>", "<video>"), named=_INTERNVL),
    "aya_vision": Recipe(_aya_vision, _aya_vision_processor, ("<start>", "<end>", "<patch>")),
    "gemma3": Recipe(_gemma3, _gemma3_processor, ("<soft>", "<end>"), named=_GEMMA3),
}
"""By `model_type`."""
