"""Models that make tokens of a picture, and so take its rows from the table of the text's own."""

from __future__ import annotations

from tools.models.recipes.recipe import SIDE, SQUARE, TEXT, Recipe, Words, part, processor, whole

_CODES = tuple(f"<|visual token {number:06}|>" for number in range(16))
_EMU3_WORDS = ("<start>", "<|image token|>", "<end>", "<|extra_200|>", "<|extra_201|>", *_CODES)


def _named(words: Words, _: int) -> dict[str, int]:
    """What a tokenizer calls its tokens, as far as a model looks them up."""
    return dict(words)


_LETTERS = str.maketrans("0123456789", "ABCDEFGHIJ")
_CHAMELEON_WORDS = "<racm3:break>", "<eoss>", *(f"IMGIMG{str(at).translate(_LETTERS)}Z" for at in range(len(_CODES)))
RECIPES: dict[str, Recipe] = {
    "chameleon": Recipe(
        whole(
            "chameleon",
            **TEXT,
            vq_config=part(
                "chameleon_vqgan",
                {},
                embed_dim=16,
                num_embeddings=len(_CODES),
                latent_channels=16,
                resolution=SIDE,
                base_channels=32,
                channel_multiplier=[1, 1, 1],
                num_res_blocks=1,
            ),
            vocabulary_map=_named,
        ),
        processor(
            "ChameleonProcessor",
            "ChameleonImageProcessorPil",
            settings={"size": {"shortest_edge": SIDE}, "crop_size": SQUARE},
            image_seq_length=196,
        ),
        ("<sep>", *_CHAMELEON_WORDS),
        named={"sep_token": "<sep>"},
    ),
    "emu3": Recipe(
        whole(
            "emu3",
            vq_config=part(
                "emu3_vqgan",
                {},
                codebook_size=len(_CODES),
                base_channels=32,
                channel_multiplier=[1, 1, 1, 1],
                num_res_blocks=1,
                hidden_size=32,
            ),
            text_config=part("emu3_text_model", {**TEXT, "hidden_size": 64}),
            vocabulary_map=_named,
        ),
        processor(
            "Emu3Processor",
            "Emu3ImageProcessor",
            settings={"min_pixels": 32 * 32, "max_pixels": 48 * 48},
        ),
        _EMU3_WORDS,
        begins=False,
        named={
            "image_token": "<image>",
            "boi_token": "<start>",
            "eoi_token": "<end>",
            "image_wrapper_token": "<|image token|>",
            "eof_token": "<|extra_201|>",
        },
    ),
}
