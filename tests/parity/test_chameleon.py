"""Chameleon's text by our decoder: heads each of which is normed by weights of its own, norms behind parts of layers,
and tokens of pictures, which are never said."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from common.hf.small_models import made_up
from llm_service.families.family import LayerNorms
from llm_service.families.sight import SpanRule
from llm_service.layers.self_attention.qk_norms import HeadNorms
from llm_service.layers.tensor_parallel import ALONE, TensorGroup
from llm_service.model_config.text import TextConfig
from llm_service.models.decoder import Decoder
from llm_service.models.hf.text import text_alone
from llm_service.models.loader import load_decoder
from llm_service.models.trial import try_ours_of
from llm_service.models.trial_chunks import logits_in_chunks
from llm_service.settings import CacheDtype
from testkit.hf_side import GREEDY, Served, compare
from testkit.reference import CACHE
from tests.parity.cases import RoundingCache
from tests.parity.graphed import graphed
from tests.parity.thread_ranks import on_ranks
from tools.models.drawn_prompts import drawn_prompt
from tools.models.prompts import PROMPTS
from tools.models.reference import TOKENS, Reference
from tools.models.tiny import config_of_recipe, make

CPU = torch.device("cpu")
LEAST = torch.finfo(torch.float32).min


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("chameleon", tmp_path_factory.mktemp("chameleon"))


@pytest.fixture(scope="module")
def served(folder: Path) -> Served:
    return Served.of(folder)


def test_norms_may_be_behind_parts_of_layers(tmp_path: Path) -> None:
    """As the large one has them."""
    folder = make("chameleon", tmp_path)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"swin_norm": True}))
    found = compare(Served.of(folder))
    assert {"one picture", "our decoder"} <= found


def test_ranks_have_their_heads_norms_and_their_part_of_what_is_never_said(served: Served) -> None:
    """Of which one more token is, so that both have some."""
    known = served.text()
    assert known is not None
    text = replace(known, config=replace(known.config, unsaid=(5, *known.config.unsaid)))
    unsaid, half = torch.tensor(text.config.unsaid), text.config.vocab_size // 2
    assert (unsaid >= half).any()
    prompt = drawn_prompt(made_up(config_of_recipe("chameleon"), text_alone))
    positions, end = torch.arange(len(prompt.ids)).expand(3, -1), len(prompt.ids)

    def logits(group: TensorGroup) -> Tensor:
        decoder = load_decoder(Checkpoint(served.folder), torch.float32, CPU, group, text=text)
        return logits_in_chunks(decoder, prompt, positions, [(0, 20), (20, end)], [])

    with torch.inference_mode():
        expected = logits(ALONE)
    assert torch.equal((expected == LEAST).all(0).nonzero().flatten(), unsaid)
    for found in on_ranks(2, logits):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_no_token_is_said_that_never_is_however_likely(folder: Path, tmp_path: Path) -> None:
    loud = shutil.copytree(folder, tmp_path / "model")
    served = Served.of(loud)
    unsaid = torch.tensor(TextConfig.of(served.found.text).unsaid)
    tensors = load_file(loud / "model.safetensors")
    of_head = tensors["lm_head.weight"][unsaid]
    tensors["lm_head.weight"][unsaid] = torch.randn(of_head.shape, generator=torch.Generator().manual_seed(1)) * 9
    save_file(tensors, loud / "model.safetensors", {"format": "pt"})
    engine, library = served.engine(), Reference(loud)
    assert isinstance(engine.decoder, Decoder)
    with torch.inference_mode():
        hidden = torch.randn(9, engine.decoder.hidden_size, generator=torch.Generator().manual_seed(2))
        assert torch.isin(engine.decoder.lm_head(hidden).argmax(-1), unsaid).all()
        assert not torch.isin(engine.decoder.likeliest(hidden), unsaid).any()
    said = engine.run([served.prompt(parts) for parts in PROMPTS.values()], GREEDY)
    assert [outcome.tokens for outcome in said] == [library.tokens(library.inputs(parts)) for parts in PROMPTS.values()]


def test_keys_and_values_in_8_bits_are_those_of_a_cache_that_rounds(served: Served) -> None:
    library, asked = Reference(served.folder), PROMPTS["one picture"]
    given = library.inputs(asked)
    made = library.model.generate(**given, **{CACHE: RoundingCache()}, max_new_tokens=TOKENS, do_sample=False)
    engine = served.engine(kv_cache_dtype=CacheDtype.INT8, step_tokens=48)
    said = engine.run([served.prompt(asked)], GREEDY)[0].tokens
    assert said == made[0, given["input_ids"].shape[1] :].tolist()


def test_steps_have_graphs_and_drafts(served: Served) -> None:
    library = Reference(served.folder)
    expected = [library.tokens(library.inputs(parts)) for parts in PROMPTS.values()]
    engine, _ = graphed(served.folder, drafts=4, hf=served.found, text=served.text())
    outcomes = engine.run([served.prompt(parts) for parts in PROMPTS.values()], GREEDY)
    assert [outcome.tokens for outcome in outcomes] == expected
    graphs = engine.runner.graphs
    assert graphs is not None
    assert graphs.replays == engine.scheduler.counters.steps, "every step has a graph that fits it"


@pytest.mark.parametrize("what", ["weights", "biases", "heads", "norms", "tokens"])
def test_a_text_that_computes_otherwise_is_told(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the trial, whose small models have norms of drawn weights."""
    config = config_of_recipe("chameleon")
    assert try_ours_of(config, drawn_prompt).spans is SpanRule.NOWHERE
    config, right = config_of_recipe("chameleon"), HeadNorms.forward
    if what == "norms":
        config.swin_norm = True
        monkeypatch.setattr(LayerNorms, "behind", property(lambda norms: norms))
    elif what == "tokens":
        of = TextConfig.of
        monkeypatch.setattr(TextConfig, "of", lambda *given: replace(of(*given), unsaid=of(*given).unsaid[1:]))
    else:

        def forward(norms: HeadNorms, heads: Tensor) -> Tensor:
            if what == "weights":
                norms.weight.fill_(1.0)
            elif what == "biases":
                norms.bias.zero_()
            else:
                norms.weight[:], norms.bias[:] = norms.weight[:1].clone(), norms.bias[:1].clone()
            return right(norms, heads)

        monkeypatch.setattr(HeadNorms, "forward", forward)
    with pytest.raises(CheckpointError, match="the logits of our decoder are not transformers': they differ by"):
        try_ours_of(config, drawn_prompt)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"attention_bias": True}, r"q_proj\.bias"),
        ({"mlp_bias": True}, r"proj\.bias"),
        ({"hidden_act": "gelu"}, "activation gelu is not supported"),
        ({"hidden_act": "relu2"}, "activation relu2 is not supported"),
    ],
)
def test_what_its_text_may_ask_for_and_ours_lacks_is_refused(asked: dict[str, Any], why: str) -> None:
    config = config_of_recipe("chameleon")
    for name, value in asked.items():
        setattr(config, name, value)
    with pytest.raises(CheckpointError, match=why):
        try_ours_of(config, drawn_prompt)
