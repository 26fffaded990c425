"""What is asked for rows in the place of a method that a class of transformers' has not."""

from __future__ import annotations

import pytest
import torch

from common.hf import small_models
from common.hf.classes import state_tokens
from common.hf.features import features_of
from common.hf.towers import without_text
from tools.models.tiny import config_of_recipe


@pytest.mark.parametrize("kind", ["image", "audio"])
def test_rows_are_those_that_a_model_puts_among_its_embeddings(kind: str) -> None:
    config = config_of_recipe("phi4_multimodal")
    state_tokens(config)
    model = small_models.made_up(config, without_text)
    token = getattr(config, f"{kind}_token_id")
    compute = features_of(model.base_model, kind)
    assert compute is not None
    count, generator = 545 if kind == "image" else 6, torch.Generator().manual_seed(1)
    ids = torch.tensor([[3, *[token] * count, 4]])
    given = {
        "image": {
            "image_pixel_values": torch.randn(1, 2, 3, 448, 448, generator=generator),
            "image_sizes": torch.tensor([[448, 448]]),
            "image_attention_mask": torch.ones(1, 2, 32, 32),
        },
        "audio": {
            "audio_input_features": torch.randn(1, 48, 80, generator=generator),
            "audio_embed_sizes": torch.tensor([count]),
        },
    }[kind]
    rows = compute(input_ids=ids, **given).pooler_output
    assert rows.shape == (count, config.hidden_size)
    embedded = torch.randn(1, count + 2, config.hidden_size, generator=generator)
    placed = model.base_model.embed_tokens_extend(ids, embedded, **given)
    torch.testing.assert_close(placed[0, 1:-1], rows)
    torch.testing.assert_close(placed[0, [0, -1]], embedded[0, [0, -1]])
