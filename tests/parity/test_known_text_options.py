"""What is for families of ours alone is for every model whose text our decoder computes: quantised weights, ranks,
adapters, drafts, graphs, and kernels for CPUs."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from common.hf.classes import config_of, layers_of_levels
from common.hf.models import describe
from llm_service.layers.cpu import selection
from llm_service.layers.tensor_parallel import ALONE, TensorGroup
from llm_service.models.decoder import Decoder
from llm_service.models.known_text import known_text
from llm_service.models.loader import load_decoder
from llm_service.worker.draft_loader import load_eagle_head
from llm_service.worker.weights import describe as weights_of
from testkit.hf_side import GREEDY, Served, foreseen
from testkit.local_engine import Prompt
from tests.adapters import ATTENTION
from tests.eagle_checkpoint import eagle_head
from tests.parity.cases import drawn_logits
from tests.parity.graphed import PEOPLE, graphed
from tests.parity.thread_ranks import on_ranks
from tests.peft_reference import PeftReference
from tests.quantized import FORMATS, quantize_checkpoint
from tools.models.prompts import PROMPTS
from tools.models.reference import TOKENS, Reference
from tools.models.tiny import make

CPU = torch.device("cpu")
FEED_FORWARD = ("gate_proj", "up_proj", "gate_up_proj", "down_proj", "w1", "w2", "w3", "fc1", "fc2")
_MORE = "hyperclovax_vision_v2", "cohere2_vision", "cosmos3_edge", "kimi_k25", "molmo2"
_SOAKED = [pytest.param(kind, marks=pytest.mark.soak) for kind in _MORE]
"""Parts that multiply what they add, that are beside each other, that have no gates, latent attention, and matrices
that are one in a checkpoint."""
_INDEXED = [
    pytest.param(kind, marks=pytest.mark.soak)
    for kind in ("dots3_note", "mistral_large4", "minimax_m3_vl", "glm5_next")
]
"""Latents in windows, and where an index chooses what is seen, tokens, blocks or pools, for a layer or for several."""
_FEW = "phi4_multimodal", "gemma3n"
_FEWER = [pytest.param(kind, marks=pytest.mark.soak) for kind in _FEW]
"""Queries, keys and values that are one matrix everywhere, and adapters of the checkpoint's own; streams, and gates
that count by what all ranks have."""
_OWN = "chameleon", "blip-2"
_OWN_NAMES = [pytest.param(kind, marks=pytest.mark.soak) for kind in _OWN]
"""Norms of each head's own, and biases of all products, under other names than most."""
_FORMS = "fp8 in blocks", "awq"
TEXT = "language_model.model."
TEXTS = {
    "molmo2": "model.transformer.blocks.",
    "phi4_multimodal": "model.layers.",
    "gemma3n": "model.language_model.layers.",
    "chameleon": "model.layers.",
    "blip-2": "language_model.model.decoder.layers.",
}
"""How names of the text's tensors begin, as checkpoints are saved, and those of its layers in others."""
_LAYERS_WITHIN = {
    "idefics3": r"model\.text_model",
    "chameleon": "model",
    "blip-2": r"language_model\.model\.decoder",
}
"""And in memory, as patterns."""


@pytest.fixture(scope="module")
def internvl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("internvl", tmp_path_factory.mktemp("internvl"))


@pytest.fixture(scope="module")
def served(internvl: Path) -> Served:
    return Served.of(internvl)


@pytest.fixture(scope="module")
def prompts(served: Served) -> list[Prompt]:
    return [served.prompt(parts) for parts in PROMPTS.values()]


@pytest.fixture(scope="module")
def said(internvl: Path) -> list[list[int]]:
    """By transformers."""
    library = Reference(internvl)
    return [library.tokens(library.inputs(parts)) for parts in PROMPTS.values()]


@pytest.mark.parametrize(
    "form",
    [
        "awq",
        *(
            pytest.param(form, marks=pytest.mark.soak)
            for form in ("fp8 in blocks", "gptq", "pack-quantized, with zeros")
        ),
    ],
)
def test_tokens_of_quantised_weights_are_those_of_transformers_on_the_weights_that_they_are(
    internvl: Path, form: str, tmp_path: Path
) -> None:
    """Pictures as well: the tower, which is not quantised, is read from the same checkpoint."""
    quantized, wide = quantize_checkpoint(internvl, FORMATS[form], tmp_path, TEXT)
    served, library = Served.of(quantized), Reference(wide)
    asked = [PROMPTS["text"], PROMPTS["one picture"]]
    expected = [library.tokens(library.inputs(parts)) for parts in asked]
    engine = served.engine(step_tokens=48)
    assert isinstance(engine.decoder, Decoder)
    method = json.loads((quantized / "config.json").read_text())["quantization_config"]["quant_method"]
    assert weights_of(engine.decoder, method).bits in (4, 8)
    outcomes = engine.run([served.prompt(parts) for parts in asked], GREEDY)
    assert [outcome.tokens for outcome in outcomes] == expected


@pytest.mark.parametrize("form", ["fp8 in blocks", "gptq", "modelopt FP8"])
def test_a_tower_whose_weights_are_quantised_is_refused(internvl: Path, form: str, tmp_path: Path) -> None:
    folder = shutil.copytree(internvl, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.startswith("vision_tower.") and "attention.q_proj.weight" in name)
    _, made, _ = FORMATS[form](tensors.pop(name))
    named = {f"{name.removesuffix('weight')}{part}": tensor for part, tensor in made.items()}
    save_file(tensors | named, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"transformers is to compute model\.vision_tower\..*, whose weight is quan"
    ):
        Served.of(folder)


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        *(("glm4v", form) for form in _FORMS),
        *(
            pytest.param(kind, form, marks=pytest.mark.soak)
            for kind, form in zip(("gemma3", "gemma4", *_MORE, *_FEW, *_OWN), itertools.cycle(_FORMS))
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of transformers' processors
def test_quantised_weights_of_texts_that_stack_otherwise_are_as_well(kind: str, form: str, tmp_path: Path) -> None:
    named = TEXTS.get(kind, TEXT)
    quantized, wide = quantize_checkpoint(make(kind, tmp_path / "plain"), FORMATS[form], tmp_path, named)
    served, library = Served.of(quantized), Reference(wide)
    engine = served.engine(step_tokens=160 if kind == "molmo2" else 80)
    assert isinstance(engine.decoder, Decoder)
    prompt = served.prompt(PROMPTS["one picture"])
    outcome = engine.run([prompt], GREEDY, [served.adapter(prompt)])[0]
    assert outcome.tokens == library.tokens(library.inputs(PROMPTS["one picture"]))


def test_weights_in_int8_are_rounded_and_say_nearly_the_same(served: Served, prompts: list[Prompt]) -> None:
    plain, engine = served.engine(), served.engine(weight_dtype="int8")
    assert weights_of(engine.decoder, "int8").bits == 8
    whole, rounded = drawn_logits(plain.decoder), drawn_logits(engine.decoder)
    assert 0 < (whole - rounded).norm() / whole.norm() < 0.06
    assert all(outcome.ended for outcome in engine.run(prompts, GREEDY))


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["ernie4_5_vl_moe", "llama4", "muse_spark", "nemotron_h_omni"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of transformers' processors
def test_logits_of_ranks_with_whole_experts_are_those_of_one(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each kind of layers with experts."""
    monkeypatch.setattr(selection, "allows_panels", lambda: False)  # whose kernels take one thread's calls at a time
    checkpoint = Checkpoint(make(kind, tmp_path))
    text = known_text(checkpoint, describe(tmp_path))
    assert text is not None

    def logits(group: TensorGroup) -> Tensor:
        return drawn_logits(load_decoder(checkpoint, torch.float32, CPU, group, text=text), kind)

    expected = logits(ALONE)
    for found in on_ranks(2, logits, expert_parallel=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "kind",
    ["internvl", *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("gemma3", "glm4v")), *_SOAKED, *_FEWER],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of transformers' processors
def test_logits_of_two_ranks_are_those_of_one(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "allows_panels", lambda: False)  # whose kernels take one thread's calls at a time
    checkpoint = Checkpoint(make(kind, tmp_path))
    text = known_text(checkpoint, describe(tmp_path))
    assert text is not None

    def logits(group: TensorGroup) -> tuple[Tensor, int]:
        decoder = load_decoder(checkpoint, torch.float32, CPU, group, text=text)
        return drawn_logits(decoder, kind), weights_of(decoder, "").bytes

    expected, all_weights = logits(ALONE)
    for found, weights in on_ranks(2, logits):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert weights < (0.8 if kind == "gemma3n" else 0.7) * all_weights


@pytest.mark.parametrize(
    "kind",
    [
        "gemma3",
        "lfm2_vl",
        *(
            pytest.param(kind, marks=pytest.mark.soak)
            for kind in ("internvl", "idefics3", "gemma4", "glm4v", "lfm3_vl")
        ),
        *_SOAKED,
        *_INDEXED,
        *_OWN_NAMES,
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of transformers' processors
def test_tokens_with_adapters_are_those_of_peft(kind: str, tmp_path: Path) -> None:
    directory = make(kind, tmp_path / "model")
    path = _LAYERS_WITHIN.get(kind, r"model\.language_model")
    mixers = (*ATTENTION, "in_proj", "out_proj")  # of short convolutions, and of LFM2's attention
    mixers = (*mixers, "f_a_proj", "f_b_proj", "b_proj", "g_a_proj", "g_b_proj")  # of Kimi Delta Attention
    peft = PeftReference(
        directory,
        tmp_path,
        [
            {"r": 4, "lora_alpha": 16, "target_modules": rf"{path}\.layers\..*\.({'|'.join(mixers)})"},
            {"r": 2, "lora_alpha": 8, "target_modules": rf"{path}\.layers\..*\.({'|'.join(FEED_FORWARD)})"},
        ],
    )
    served, library = Served.of(directory), Reference(directory)
    prompt, inputs = served.prompt(PROMPTS["one picture"]), library.inputs(PROMPTS["one picture"])
    expected = [peft.generate(number, inputs, TOKENS) for number in range(3)]
    assert len(set(map(tuple, expected))) == 3, "the adapters prove nothing"
    numbers = [1, 0, 2, 1]
    outcomes = served.engine(adapters=peft.folders, step_tokens=80).run([prompt] * 4, GREEDY, numbers)
    assert [outcome.tokens for outcome in outcomes] == [expected[number] for number in numbers]


def test_drafts_change_no_token(served: Served, prompts: list[Prompt], said: list[list[int]]) -> None:
    """Those of prompt look-up; and the text alone, as a model of its own, proposes what it would say."""
    engine = served.engine(speculative_tokens=4)
    assert [outcome.tokens for outcome in engine.run(prompts, GREEDY)] == said
    assert engine.scheduler.counters.draft_tokens > 0


def test_drafts_change_no_token_where_layers_keep_states(tmp_path: Path) -> None:
    """Of each three drafts the last is wrong, and what layers kept of it is not gone on from."""
    served, library = Served.of(make("lfm2_vl", tmp_path)), Reference(tmp_path)
    parts = PROMPTS["one picture"]
    prompt, expected = served.prompt(parts), library.tokens(library.inputs(parts))
    engine = served.engine(speculative_tokens=3, draft=foreseen(prompt, expected))
    assert engine.run([prompt], GREEDY)[0].tokens == expected
    counters = engine.scheduler.counters
    assert 0 < counters.accepted_draft_tokens < counters.draft_tokens


def test_the_text_as_a_model_of_its_own_proposes_what_it_says(
    internvl: Path, served: Served, prompts: list[Prompt], said: list[list[int]], tmp_path: Path
) -> None:
    config = json.loads((internvl / "config.json").read_text())["text_config"]
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    tensors = load_file(internvl / "model.safetensors").items()
    text = {name.removeprefix("language_model."): each for name, each in tensors if name.startswith(TEXT)}
    save_file(text, tmp_path / "model.safetensors", {"format": "pt"})
    engine = served.engine(speculative_tokens=4, draft_model=tmp_path)
    assert [outcome.tokens for outcome in engine.run(prompts[:1], GREEDY)] == said[:1]
    counters = engine.scheduler.counters
    assert counters.accepted_draft_tokens == counters.draft_tokens > 0
    assert [outcome.tokens for outcome in engine.run(prompts, GREEDY)] == said


def test_a_draft_head_for_several_ranks_has_their_whole_table_of_tokens(
    internvl: Path, served: Served, tmp_path: Path
) -> None:
    checkpoint, text = Checkpoint(internvl), served.text()
    whole = load_decoder(checkpoint, torch.float32, CPU, text=text)
    part = load_decoder(checkpoint, torch.float32, CPU, TensorGroup(0, 2), text=text)
    head = Checkpoint(eagle_head(internvl, tmp_path / "head", words=80))
    drafting = load_eagle_head(head, part, checkpoint, torch.float32, text=text)
    tokens = torch.arange(whole.config.vocab_size)
    assert torch.equal(drafting.decoder.embed_tokens(tokens), whole.embed_tokens(tokens))


def test_tokens_are_the_same_with_graphs(
    internvl: Path, served: Served, prompts: list[Prompt], said: list[list[int]]
) -> None:
    engine, _ = graphed(internvl, hf=served.found, text=served.text())
    assert [outcome.tokens for outcome in engine.run(prompts, GREEDY)] == said
    graphs = engine.runner.graphs
    assert graphs is not None
    assert graphs.replays == engine.scheduler.counters.steps, "every step has a graph that fits it"


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["gemma3n", "phi4_multimodal", "molmo2"])
def test_streams_and_tables_of_marks_and_longer_sequences_are_no_bar_to_graphs(kind: str, tmp_path: Path) -> None:
    """Of Phi-4's steps those with an adapter, and of Molmo 2's those with rows, are computed without."""
    served, library = Served.of(make(kind, tmp_path)), Reference(tmp_path)
    expected = [library.tokens(library.inputs(parts)) for parts in PROMPTS.values()]
    prompts = [served.prompt(parts) for parts in PROMPTS.values()]
    engine, _ = graphed(tmp_path, hf=served.found, text=served.text(), step_tokens=1024)
    outcomes = engine.run(prompts, GREEDY, [served.adapter(prompt) for prompt in prompts])
    assert [outcome.tokens for outcome in outcomes] == expected
    assert [outcome.tokens for outcome in engine.run(prompts[:1], GREEDY)] == expected[:1]
    graphs = engine.runner.graphs
    assert graphs is not None
    assert graphs.replays >= TOKENS - 1


@pytest.mark.soak
@pytest.mark.parametrize("attention", ["", "triton"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of transformers' processors
def test_steps_over_latents_have_graphs_and_drafts_too(attention: str, tmp_path: Path) -> None:
    served, library = Served.of(make("kimi_k25", tmp_path)), Reference(tmp_path)
    expected = [library.tokens(library.inputs(parts)) for parts in PROMPTS.values()]
    engine, _ = graphed(tmp_path, attention, drafts=4, hf=served.found, text=served.text())
    outcomes = engine.run(list(map(served.prompt, PROMPTS.values())), GREEDY)
    assert [outcome.tokens for outcome in outcomes] == expected
    graphs = engine.runner.graphs
    assert graphs is not None
    assert graphs.replays == engine.scheduler.counters.steps, "every step has a graph that fits it"
    assert engine.scheduler.counters.draft_tokens > 0


def test_levels_of_rows_are_added_before_the_layers_that_are_named_with_graphs_too(tmp_path: Path) -> None:
    """Granite Vision's: the first is among no embeddings."""
    served, library = Served.of(make("granite4_vision", tmp_path)), Reference(tmp_path)
    expected = [library.tokens(library.inputs(parts)) for parts in PROMPTS.values()]
    engine, _ = graphed(tmp_path, hf=served.found, text=served.text())
    assert isinstance(engine.decoder, Decoder)
    assert engine.decoder.config.level_layers == tuple(layers_of_levels(config_of(tmp_path)))
    assert [outcome.tokens for outcome in engine.run(list(map(served.prompt, PROMPTS.values())), GREEDY)] == expected
    graphs = engine.runner.graphs
    assert graphs is not None
    assert graphs.replays > 0


def test_steps_with_rows_that_see_each_other_have_no_graph(tmp_path: Path) -> None:
    served, library = Served.of(make("gemma3", tmp_path)), Reference(tmp_path)
    expected = [library.tokens(library.inputs(parts)) for parts in PROMPTS.values()]
    engine, _ = graphed(tmp_path, hf=served.found, text=served.text())
    assert [outcome.tokens for outcome in engine.run(list(map(served.prompt, PROMPTS.values())), GREEDY)] == expected
    graphs = engine.runner.graphs
    assert graphs is not None
    assert 0 < graphs.replays < engine.scheduler.counters.steps


def test_transformers_decoder_cannot_be_captured(internvl: Path, served: Served) -> None:
    engine = served.engine(by_hf=True, max_running=PEOPLE)
    assert engine.runner.not_capturable() == "--attention general launches other kernels for other lengths"


def test_kernels_for_cpus_compute(served: Served) -> None:
    engine = served.engine()
    assert bool(engine.decoder.kernels()) == selection.allows_panels()
