"""What Gemma 3n's text has beside Gemma 4's parts: streams, a second residual, gates that are cut, tables of marks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from common.checkpoints.checkpoint import CheckpointError
from common.hf import small_models
from common.hf.classes import mark_tables_of
from llm_service.layers.embeddings.media_marks import MarkedEmbedding
from llm_service.layers.mlp import CutMLP
from llm_service.layers.residual.altup import AltUp, Laurel, StreamsIn, StreamsOut
from llm_service.layers.tensor_parallel import ALONE, TensorGroup
from llm_service.model_config.feed_forward import Activation
from llm_service.model_config.layer_shapes import LayerInputs
from llm_service.model_config.text import TextConfig
from llm_service.models.filling import InMemory, targets
from llm_service.models.hf.decoder import HfDecoder
from llm_service.models.hf.names import named_tensors
from llm_service.models.hf.text import text_alone
from llm_service.models.trial import try_ours_of, with_media
from tests.parity.thread_ranks import on_ranks
from tools.models.drawn_prompts import drawn_prompt
from tools.models.tiny import config_of_recipe


@pytest.fixture(scope="module")
def model() -> Any:
    return small_models.made_up(config_of_recipe("gemma3n"), text_alone)


@pytest.fixture(scope="module")
def shape(model: Any) -> TextConfig:
    return with_media(TextConfig.of(model.config.text_config.to_dict()), model)


def read(module: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Fills a part from transformers' tensors by their names within it."""
    for name, (_, place) in targets(module):
        place(InMemory(tensors[name]))


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


@torch.inference_mode()
def test_streams_are_predicted_and_corrected_as_those_of_transformers(model: Any, shape: TextConfig) -> None:
    layer = model.base_model.language_model.layers[0]
    altup, laurel = AltUp(shape, torch.float32), Laurel(shape, torch.float32)
    read(altup, dict(layer.altup.state_dict()))
    read(laurel, dict(layer.laurel.state_dict()))
    streams, made = noise(5, 4, 64), noise(5, 64)
    theirs = streams.transpose(0, 1).unsqueeze(1)  # [count, 1, n, hidden]
    predicted = layer.altup.predict(theirs)
    torch.testing.assert_close(altup.predict(streams), predicted[:, 0].transpose(0, 1), rtol=1e-4, atol=1e-5)
    corrected = layer.altup.correct(predicted, made[None])
    ours = altup.correct(altup.predict(streams), made)
    torch.testing.assert_close(ours, corrected[:, 0].transpose(0, 1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(laurel(made), layer.laurel(made), rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_streams_are_as_large_as_what_they_are_made_of(model: Any, shape: TextConfig) -> None:
    tensors = dict(named_tensors(model))
    inwards, outwards = StreamsIn(shape, torch.float32), StreamsOut(shape, torch.float32)
    read(inwards, tensors)
    read(outwards, tensors)
    streams = inwards(noise(3, 64)).view(3, 4, 64)
    sizes = streams.square().mean(-1)
    torch.testing.assert_close(sizes, sizes[:, :1].expand(-1, 4))
    assert torch.equal(streams[:, 0], noise(3, 64))
    text = model.base_model.language_model
    others = [part(streams[:, at + 1]) for at, part in enumerate(text.altup_unembed_projections)]
    wanted = streams[:, 0].square().mean(-1, keepdim=True).sqrt()
    alike = [each * wanted / each.square().mean(-1, keepdim=True).sqrt() for each in others]
    expected = text.norm(torch.stack([streams[:, 0], *alike]).mean(0))
    torch.testing.assert_close(outwards.after_adding(streams.flatten(1), None)[1], expected, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_gates_are_cut_by_what_all_ranks_have(model: Any) -> None:
    theirs, x = model.base_model.language_model.layers[0].mlp, noise(6, 64)
    assert theirs.activation_sparsity == 0.9

    def compute(group: TensorGroup) -> Tensor:
        made = CutMLP(64, 96, group, torch.float32, activation=Activation.GELU, share=0.9)
        read(made, dict(theirs.state_dict()))
        return made(x)

    for found in (compute(ALONE), *on_ranks(2, compute)):
        torch.testing.assert_close(found, theirs(x), rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_marks_are_looked_up_in_tables_of_their_own(model: Any, shape: TextConfig) -> None:
    first = [table.vocab_offset for table in mark_tables_of(model).values()]
    assert [(table.first, table.count) for table in shape.mark_tables] == [(each, 2) for each in first]
    tokens = shape.table_rows or shape.vocab_size
    made = MarkedEmbedding(shape.mark_tables, tokens, 64, ALONE, torch.float32, scale=8.0)
    for name, place in made.targets("embed_tokens").items():
        place(InMemory(dict(named_tensors(model))[name]))
    ids = torch.arange(first[0] - 2, shape.vocab_size)
    expected = HfDecoder(copy.deepcopy(model), torch.float32, torch.device("cpu")).embed_tokens(ids)
    torch.testing.assert_close(made(ids), expected, rtol=1e-4, atol=1e-5)


def test_our_decoder_gives_transformers_logits() -> None:
    assert not try_ours_of(config_of_recipe("gemma3n"), drawn_prompt).adds_rows


def test_feed_forward_parts_may_be_of_different_sizes() -> None:
    config = config_of_recipe("gemma3n")
    config.text_config.intermediate_size = [96, 64, 80, 64, 96, 96]
    shape = TextConfig.of(config.text_config.to_dict())
    assert [shape.layer_kind(layer).inner for layer in range(2)] == [96, 64]
    assert not try_ours_of(config, drawn_prompt).adds_rows


def test_what_it_lacks_is_refused_by_name(model: Any) -> None:
    text = model.config.text_config.to_dict()
    rows = text["vocab_size_per_layer_input"]
    assert TextConfig.of(text).layer_inputs == LayerInputs(8, None, rows)
    assert rows < text["vocab_size"]
    refused = {
        "another stream than the first": {"altup_active_idx": 1},
        "intermediate_size is not of each layer": {"intermediate_size": [64, 96]},
    }
    for why, settings in refused.items():
        with pytest.raises(CheckpointError, match=why):
            TextConfig.of({**text, **settings})
