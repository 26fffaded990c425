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
_APERTUS_WORDS = ("<audio>", "<boi>", "<eoi>", "<wrapper>", "<eol>", "<boa>", "<eoa>", *_CODES)
_HEARD = tuple(f"<|audio token {number}|>" for number in range(12))
RECIPES: dict[str, Recipe] = {
    "apertus1p5": Recipe(
        whole(
            "apertus1p5",
            vision_config=part(
                "apertus1p5_vision_tokenizer",
                {},
                codebook_size=len(_CODES),
                embed_dim=16,
                latent_channels=16,
                base_channels=32,
                channel_multiplier=[1, 1, 1, 1, 1],
                num_res_blocks=1,
            ),
            audio_config=part(
                "wavtokenizer_encoder",
                {},
                num_filters=4,
                num_lstm_layers=1,
                hidden_size=16,
                codebook_dim=16,
                codebook_size=len(_HEARD),
            ),
            text_config=part(
                "apertus1p5_text", TEXT, rope_parameters=lambda *_: {"rope_type": "default", "rope_theta": 10000.0}
            ),
            image_token_id="<image>",
            audio_token_id="<audio>",
            image_token_offset=_CODES[0],
            audio_token_offset=_HEARD[0],
        ),
        processor(
            "Apertus1p5Processor",
            "Apertus1p5ImageProcessor",
            stills={"size": {"min_pixels": 48 * 48, "max_pixels": 96 * 96}},
            sounds="WavTokenizerFeatureExtractor",
        ),
        (*_APERTUS_WORDS, *_HEARD),
        named={
            "image_token": "<image>",
            "audio_token": "<audio>",
            "boi_token": "<boi>",
            "eoi_token": "<eoi>",
            "image_wrapper_token": "<wrapper>",
            "eol_token": "<eol>",
            "boa_token": "<boa>",
            "eoa_token": "<eoa>",
        },
    ),
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
