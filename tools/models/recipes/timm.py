"""Models whose towers are of timm, another library of networks."""

from __future__ import annotations

from tools.models.recipes.recipe import IDS, LLAMA, MEDIA, QWEN2, SIDE, TEXT, WINDOWED, Recipe, part, processor, whole

_PIXELS = 192
"""A side of what a tower sees, of which it makes a row of 64 by 64."""
_STAGES = (1, 1, 1, 1, 1), (8, 16, 32, 64, 128)

RECIPES: dict[str, Recipe] = {
    "fast_vlm": Recipe(
        whole(
            "fast_vlm",
            vision_config=part(
                "timm_wrapper",
                {},
                architecture="fastvit_mci3",
                do_pooling=True,
                global_pool="avg",
                hidden_size=256,
                model_args={"inference_mode": True, "layers": _STAGES[0], "embed_dims": _STAGES[1]},
            ),
            text_config=QWEN2,
            image_token_index="<image>",
            image_seq_length=9,
        ),
        processor(
            "LlavaProcessor",
            "CLIPImageProcessorPil",
            settings={"size": {"shortest_edge": _PIXELS}, "crop_size": {"height": _PIXELS, "width": _PIXELS}},
            patch_size=64,
            vision_feature_select_strategy="full",
        ),
    ),
    "perception_lm": Recipe(
        whole(
            "perception_lm",
            vision_config=part(
                "timm_wrapper",
                {},
                architecture="vit_pe_core_large_patch14_336",
                do_pooling=False,
                model_args={
                    "embed_dim": 32,
                    "depth": 2,
                    "num_heads": 2,
                    "img_size": [SIDE, SIDE],
                    "global_pool": "",
                    "use_post_transformer_norm": False,
                    "init_values": 0.1,
                    "ref_feat_shape": [4, 4],
                },
            ),
            text_config=LLAMA,
            projector_pooling_ratio=2,
            tie_word_embeddings=False,
            **IDS,
        ),
        processor(
            "PerceptionLMProcessor",
            "PerceptionLMImageProcessor",
            videos="PerceptionLMVideoProcessor",
            stills={"tile_size": SIDE, "max_num_tiles": 4, "vision_input_type": "thumb+tile"},
            frames={"size": {"height": SIDE, "width": SIDE}},
            patch_size=14,
            pooling_ratio=2,
        ),
        ("<video>",),
        named=MEDIA,
    ),
    "gemma3n": Recipe(
        whole(
            "gemma3n",
            vision_config=part(
                "gemma3n_vision",
                {},
                architecture="mobilenetv5_300m_enc",
                do_pooling=False,
                hidden_size=2048,
                vocab_size=2,
                vocab_offset="<end>",
                model_args={"channel_multiplier": 0.05, "msfa_output_resolution": 4},
            ),
            audio_config=part(
                "gemma3n_audio",
                {},
                hidden_size=32,
                vocab_size=2,
                vocab_offset="<sound-end>",
                conf_num_attention_heads=2,
                conf_num_hidden_layers=1,
                sscp_conv_channel_size=[8, 4],
            ),
            text_config=part(
                "gemma3n_text",
                {**TEXT, "num_hidden_layers": 6},
                sliding_window=24,
                layer_types=WINDOWED * 2,
                num_kv_shared_layers=3,
                hidden_size_per_layer_input=8,
                vocab_size_per_layer_input="<end>",
                laurel_rank=8,
                activation_sparsity_pattern=[0.9, 0.9, 0.0, 0.0, 0.0, 0.0],
            ),
            image_token_id="<soft>",
            audio_token_id="<sound>",
            boi_token_id="<start>",
            eoi_token_id="<end>",
            boa_token_id="<sound-start>",
            eoa_token_id="<sound-end>",
            vision_soft_tokens_per_image=16,
            tie_word_embeddings=False,
        ),
        processor(
            "Gemma3nProcessor",
            "SiglipImageProcessorPil",
            settings={"size": {"height": 128, "width": 128}, "do_normalize": False},
            sounds="Gemma3nAudioFeatureExtractor",
            image_seq_length=16,
        ),
        ("<start>", "<sound-start>", "<end>", "<soft>", "<sound-end>", "<sound>"),
        named={
            "boi_token": "<start>",
            "eoi_token": "<end>",
            "image_token": "<soft>",
            "audio_token": "<sound>",
            "boa_token": "<sound-start>",
            "eoa_token": "<sound-end>",
        },
        image="<soft>",
        audio="<sound>",
    ),
}
