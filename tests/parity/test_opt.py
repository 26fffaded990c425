"""BLIP-2's OPT by our decoder: places that are learned, norms and products with biases, and a ReLU without gates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from common.hf.classes import speaking, state_tokens
from common.hf.small_models import made_up
from llm_service.families.sight import SpanRule
from llm_service.layers.embeddings.learned_positions import PositionEmbedding
from llm_service.layers.linear.parallel import RowParallelLinear
from llm_service.layers.mlp import PlainReluMLP, squared_relu
from llm_service.layers.norms import BiasedLayerNorm, LayerNorm
from llm_service.layers.tensor_parallel import ALONE, TensorGroup
from llm_service.model_config.text import TextConfig
from llm_service.models.decoder import Decoder
from llm_service.models.hf.text import text_alone
from llm_service.models.loader import load_decoder
from llm_service.models.trial import try_ours_of
from llm_service.models.trial_chunks import logits_in_chunks
from llm_service.settings import CacheDtype
from testkit.hf_side import GREEDY, Served
from testkit.local_engine import misled_drafts
from testkit.reference import CACHE
from tests.parity.cases import RoundingCache
from tests.parity.graphed import graphed
from tests.parity.thread_ranks import on_ranks
from tools.models.drawn_prompts import drawn_prompt
from tools.models.prompts import PROMPTS
from tools.models.reference import TOKENS, Reference
from tools.models.tiny import config_of_recipe, make

CPU = torch.device("cpu")
ASKED = [PROMPTS["text"], PROMPTS["one picture"]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served.of(make("blip-2", tmp_path_factory.mktemp("blip2")))


@pytest.fixture(scope="module")
def said(served: Served) -> list[list[int]]:
    """By transformers."""
    library = Reference(served.folder)
    return [library.tokens(library.inputs(parts)) for parts in ASKED]


def small() -> Any:
    config = config_of_recipe("blip-2")
    state_tokens(config)
    return config


def test_biases_of_what_ranks_sum_up_count_once(served: Served) -> None:
    text = served.text()
    assert text is not None
    prompt = drawn_prompt(made_up(small(), text_alone))
    positions, end = torch.arange(len(prompt.ids)).expand(3, -1), len(prompt.ids)

    def logits(group: TensorGroup) -> tuple[Tensor, list[bool]]:
        decoder = load_decoder(Checkpoint(served.folder), torch.float32, CPU, group, text=text)
        biases = [part.bias for part in decoder.modules() if isinstance(part, RowParallelLinear)]
        counted = [bool(bias.any()) for bias in biases if bias is not None]
        return logits_in_chunks(decoder, prompt, positions, [(0, 20), (20, end)], []), counted

    with torch.inference_mode():
        expected, counted = logits(ALONE)
    assert len(counted) == 2 * text.config.layers
    assert all(counted), "biases of zero prove nothing"
    for rank, (found, counted) in enumerate(on_ranks(2, logits)):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert any(counted) == (rank == 0)


def test_keys_and_values_in_8_bits_are_those_of_a_cache_that_rounds(served: Served) -> None:
    library, asked = Reference(served.folder), PROMPTS["text"]
    given = library.inputs(asked)
    model = speaking(library.model)
    made = model.generate(**given, **{CACHE: RoundingCache()}, max_new_tokens=TOKENS, do_sample=False)
    said = served.engine(kv_cache_dtype=CacheDtype.INT8, step_tokens=16).run([served.prompt(asked)], GREEDY)[0].tokens
    assert said == made[0, given["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("drafts", [0, 4])
def test_steps_have_graphs(served: Served, said: list[list[int]], drafts: int) -> None:
    given: dict[str, Any] = {"hf": served.found, "text": served.text(), "drafts": drafts}
    engine, _ = graphed(served.folder, **given, draft=misled_drafts(said) if drafts else None)
    assert [outcome.tokens for outcome in engine.run([served.prompt(parts) for parts in ASKED], GREEDY)] == said
    graphs = engine.runner.graphs
    assert graphs is not None
    assert graphs.replays == engine.scheduler.counters.steps, "every step has a graph that fits it"
    assert (engine.scheduler.counters.accepted_draft_tokens > 0) == (drafts > 0)


def test_a_context_ends_where_places_do(served: Served) -> None:
    decoder = served.engine().decoder
    assert isinstance(decoder, Decoder)
    table = decoder.embed_positions
    assert table is not None
    last = torch.tensor([decoder.config.max_context(0) - 1], dtype=torch.int32)
    assert torch.equal(table(last), table.weight[-1:])


def _without_bias(norm: BiasedLayerNorm, x: Tensor) -> Tensor:
    return LayerNorm.forward(norm, x)


def _placed(shift: int) -> Callable[[PositionEmbedding, Tensor], Tensor]:
    return lambda table, places: table.weight[places.long() + shift]


@pytest.mark.parametrize(
    ("part", "name", "otherwise"),
    [
        (BiasedLayerNorm, "forward", _without_bias),
        (PlainReluMLP, "between", lambda _, x: squared_relu(x)),
        (PositionEmbedding, "forward", _placed(0)),
        (PositionEmbedding, "forward", lambda table, places: table.weight.new_zeros(1)),
        (RowParallelLinear, "forward", lambda linear, x: x @ linear.weight.t()),
    ],
    ids=["norms", "relu", "places", "no places", "biases"],
)
def test_a_text_that_computes_otherwise_is_told(
    part: type, name: str, otherwise: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the trial, whose small models have biases that are drawn."""
    assert try_ours_of(small(), drawn_prompt).spans is SpanRule.NOWHERE
    monkeypatch.setattr(part, name, otherwise)
    with pytest.raises(CheckpointError, match="the logits of our decoder are not transformers': they differ by"):
        try_ours_of(small(), drawn_prompt)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"word_embed_proj_dim": 32}, "embeddings of another width than layers have"),
        ({"do_layer_norm_before": False}, "norms of the sum that layers add to"),
        ({"_remove_final_layer_norm": True}, "layers without a norm behind them all"),
        ({"enable_bias": False}, "products without biases, of a text whose norms have some,"),
        ({"layer_norm_elementwise_affine": False}, "norms without weights"),
        ({"activation_function": "gelu"}, "activation gelu"),
        ({"activation_function": "silu"}, "activation silu"),
    ],
)
def test_what_its_text_may_ask_for_and_ours_lacks_is_refused(asked: dict[str, Any], why: str) -> None:
    text = small().text_config.to_dict()
    assert TextConfig.of(text).family.vocabulary.position_embeddings
    with pytest.raises(CheckpointError, match=f"{why} (are|is) not supported"):
        TextConfig.of(text | asked)


def test_a_relu_may_be_squared() -> None:
    config = small()
    config.text_config.activation_function = "relu2"
    assert try_ours_of(config, drawn_prompt).spans is SpanRule.NOWHERE
