"""EAGLE-3 heads against plain operators over transformers' hidden states."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from common.shm.arena import SharedBuffer
from llm_service.model_config.served import ServedModel
from llm_service.models.loader import load_decoder
from llm_service.plan import Chunk, Draw, StepPlan
from llm_service.request import SamplingParams
from llm_service.worker.caches import Caches
from llm_service.worker.draft_loader import load_draft_model, load_eagle_head
from llm_service.worker.dummy_plans import appended
from llm_service.worker.model_runner import ModelRunner
from llm_service.worker.row_arena import RowArena
from testkit import reference
from testkit.checkpoints import Family
from testkit.local_engine import LocalEngine, Prompt, make_prompt
from tests.eagle_checkpoint import HEAD_DIM, HEADS, KV_HEADS, eagle_head
from tests.parity.cases import PARTS

from transformers import GraniteConfig, GraniteForCausalLM  # isort: skip

GREEDY = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.0)
FORMS: dict[str, dict[str, Any]] = {
    "as EAGLE has it": {},
    "with positions of media": {"mrope": True, "reads": (0, 2, 3)},
    "of speculators": {"speculators": True, "reads": (1, 2), "norm_before_fc": True},
    "with all words": {"words": None, "fc_norm": True, "norm_output": True, "own_embeddings": True},
    "of two layers": {"layers": 2, "norm_before_residual": True, "reads": (3, 1)},
    "with biases": {"attention_bias": True},
    "as EAGLE's first are": {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 40},
    "tied": {"words": None, "tie_word_embeddings": True},
}


class Reference:
    """All of a sequence anew for each draft."""

    def __init__(self, directory: Path, head: Path, reads: tuple[int, ...]) -> None:
        self.model: Any = reference.model(directory)
        self.text = self.model.model.language_model
        self.own = load_file(head / "model.safetensors")
        self.config, self.reads = Checkpoint(head).config, reads

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * self.own[f"{name}.weight"]

    def states(self, embeddings: torch.Tensor, positions: torch.Tensor, levels: dict[str, Any]) -> torch.Tensor:
        """What comes before the layers that are read, from transformers' layers themselves."""
        found: dict[int, torch.Tensor] = {}
        hooks = [
            layer.register_forward_pre_hook(
                lambda _, given, number=number: found.__setitem__(number, given[0][0].clone())
            )
            for number, layer in enumerate(self.text.layers)
        ]
        hooks.append(
            self.text.norm.register_forward_pre_hook(
                lambda _, given: found.__setitem__(len(self.text.layers), given[0][0].clone())
            )
        )
        try:
            self.text(inputs_embeds=embeddings[None], position_ids=positions[:, None], **levels)
        finally:
            for hook in hooks:
                hook.remove()
        return torch.cat([found[number] for number in self.reads], -1)

    def layer(self, name: str, x: torch.Tensor, inputs: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        n, pairs = len(x), HEAD_DIM // 2

        def product(part: str, of: torch.Tensor) -> torch.Tensor:
            bias = self.own.get(f"{name}self_attn.{part}_proj.bias", torch.zeros(1))
            return of @ self.own[f"{name}self_attn.{part}_proj.weight"].T + bias

        heads = [product(part, inputs).view(n, -1, HEAD_DIM).transpose(0, 1) for part in "qkv"]
        frequencies = 10000.0 ** (-torch.arange(pairs) / pairs)
        axes = torch.tensor([0, 0, 1, 1, 1, 2, 2, 2] if "rope_scaling" in self.config else [0] * pairs)
        angles = (positions[axes].T * frequencies).repeat(1, 2)

        def rotated(each: torch.Tensor) -> torch.Tensor:
            back, front = each.chunk(2, -1)
            return each * angles.cos() + torch.cat([-front, back], -1) * angles.sin()

        q, k, v = rotated(heads[0]), rotated(heads[1]), heads[2]
        k, v = (each.repeat_interleave(HEADS // KV_HEADS, 0) for each in (k, v))
        mixed = functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
        x = x + product("o", mixed.transpose(0, 1).flatten(1))
        normed = self.norm(x, f"{name}post_attention_layernorm")
        gate, up = (normed @ self.own[f"{name}mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        return x + (functional.silu(gate) * up) @ self.own[f"{name}mlp.down_proj.weight"].T

    @torch.inference_mode()
    def drafts(self, prompt: Prompt, output: list[int], count: int) -> list[int]:
        """The drafts behind an output of at least one token."""
        layout, config = prompt.layout, self.config
        ids = [*layout.ids, *output]
        embeddings = self.text.embed_tokens(torch.tensor(ids))
        nexts = embeddings.clone()
        if "embed_tokens.weight" in self.own:
            nexts = self.own["embed_tokens.weight"][torch.tensor(ids)]
        levels: list[torch.Tensor] = []
        places = torch.zeros(len(ids) - 1, dtype=torch.bool)
        for span, rows in zip(layout.spans, prompt.rows, strict=True):
            for run in span.runs:
                here = slice(run.begin, run.end)
                own = torch.as_tensor(rows[run.first_row : run.first_row + run.count])
                embeddings[here] = nexts[here] = own[:, 0]
                places[here] = True
                levels.append(own[:, 1:])
        known = len(ids) - 1
        mrope = torch.from_numpy(np.frombuffer(layout.positions, np.int32).reshape(3, -1).copy()).long()
        beyond = torch.arange(len(layout.ids), len(ids) + count) + layout.mrope_delta
        whole = torch.cat([mrope, beyond.expand(3, -1)], 1)
        deep: dict[str, Any] = {}
        if levels and levels[0].shape[1]:
            deep = {"visual_pos_masks": places[None], "deepstack_visual_embeds": list(torch.cat(levels).unbind(1))}
        hidden = self.states(embeddings[:known], whole[:, :known], deep)
        if config.get("norm_before_fc"):
            hidden = self.norm(hidden, "input_norm")
        if config.get("fc_norm"):
            parts = hidden.chunk(len(self.reads), -1)
            hidden = torch.cat([self.norm(part, f"fc_norm.{number}") for number, part in enumerate(parts)], -1)
        hidden = hidden @ self.own["fc.weight"].T
        positions = whole if "rope_scaling" in config else torch.arange(whole.shape[1]).expand(3, -1)
        nexts, drafts = nexts[1:], list[int]()
        table = self.own.get("embed_tokens.weight", self.text.embed_tokens.weight)
        for _ in range(count):
            first = "midlayer." if "midlayer.hidden_norm.weight" in self.own else "layers.0."
            normed = self.norm(hidden, f"{first}hidden_norm")
            inputs = torch.cat([self.norm(nexts, f"{first}input_layernorm"), normed], -1)
            here = positions[:, : len(inputs)].float()
            adds = config.get("norm_before_residual", "speculators_model_type" in config)
            out = self.layer(first, normed if adds else hidden, inputs, here)
            if "layers.1.input_layernorm.weight" in self.own:
                out = self.layer("layers.1.", out, self.norm(out, "layers.1.input_layernorm"), here)
            last = self.norm(out[-1:], "norm")
            word = int((last @ self.own.get("lm_head.weight", table).T).argmax())
            drafts.append(word + (int(self.own["d2t"][word]) if "d2t" in self.own else 0))
            hidden = torch.cat([hidden, last if config.get("norm_output") else out[-1:]])
            nexts = torch.cat([nexts, table[torch.tensor(drafts[-1:])]])
        return drafts


def drafts_of(engine: LocalEngine, prompt: Prompt) -> tuple[list[int], list[tuple[int, list[int]]]]:
    """What an engine answers, and the drafts that it had, by how many tokens were generated before them."""
    proposer = engine.runner.proposer
    assert proposer is not None
    found: list[tuple[int, list[int]]] = []
    propose = proposer.propose

    def watched(plan: StepPlan, chosen: list[int], hidden: torch.Tensor, /) -> Callable[[], list[list[int]]]:
        proposed = propose(plan, chosen, hidden)
        count = len(plan.draws) - 1
        given = np.frombuffer(plan.token_ids, np.int32)[len(plan.token_ids) // 4 - count :].tolist()
        right = next((n for n, token in enumerate(chosen[:-1]) if token != given[n]), len(chosen) - 1)
        context = plan.chunks[0].context + plan.chunks[0].count - count
        found.append((context + right + 1 - len(prompt.layout.ids), proposed()[0]))
        return proposed

    vars(proposer)["propose"] = watched
    (outcome,) = engine.run([prompt], GREEDY)
    return outcome.tokens, [(generated, drafts) for generated, drafts in found if drafts]


FAMILIES: tuple[Family, ...] = ("qwen3_vl", "qwen2_5_vl")
CROSSED = [(family, form) for form in FORMS for family in FAMILIES]
SOAKED = [pair for number, pair in enumerate(CROSSED) if number % 4 in (1, 2)]
"""A form has a family in the short suite, the next form the other one."""


@pytest.fixture(scope="module")
def answered(checkpoints: Callable[..., Path]) -> Callable[[Family], list[tuple[Prompt, list[int]]]]:
    """Prompts for a family's checkpoint, and what is said to each without drafts: once for all forms."""

    @cache
    def answer(family: Family) -> list[tuple[Prompt, list[int]]]:
        directory = checkpoints(family)
        prompts = [make_prompt(directory, parts) for parts in PARTS[:3]]
        return [(prompt, LocalEngine(directory).run([prompt], GREEDY)[0].tokens) for prompt in prompts]

    return answer


@pytest.mark.parametrize(
    ("family", "form"), [pytest.param(*pair, marks=pytest.mark.soak if pair in SOAKED else ()) for pair in CROSSED]
)
def test_drafts_are_those_of_the_reference(
    family: Family,
    form: str,
    checkpoints: Callable[..., Path],
    answered: Callable[[Family], list[tuple[Prompt, list[int]]]],
    tmp_path: Path,
) -> None:
    directory = checkpoints(family)
    head = eagle_head(directory, tmp_path / "head", **FORMS[form])
    for prompt, said in answered(family):
        engine = LocalEngine(directory, speculative_tokens=4, eagle=head)
        wanted = Reference(directory, head, engine.decoder.extracts)
        answer, told = drafts_of(engine, prompt)
        assert answer == said
        assert len(told) > 3
        for generated, drafts in told[:4]:
            assert drafts == wanted.drafts(prompt, said[:generated], len(drafts)), generated


def test_chunks_company_and_preemption_change_no_token(checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    directory = checkpoints("qwen3_vl")
    head, prompts = eagle_head(directory, tmp_path / "head"), [make_prompt(directory, parts) for parts in PARTS]
    for sampling in (GREEDY, SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.0, seed=3)):
        said = [outcome.tokens for outcome in LocalEngine(directory).run(prompts, sampling)]
        for given in ({}, {"step_tokens": 80, "blocks": 14, "prefix_cache": True}):
            engine = LocalEngine(directory, speculative_tokens=3, eagle=head, **given)
            assert [outcome.tokens for outcome in engine.run(prompts, sampling)] == said, given
            assert engine.scheduler.counters.draft_tokens > 0


def test_hidden_states_are_those_of_transformers_where_what_layers_add_is_multiplied(tmp_path: Path) -> None:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": 64}
    multipliers = {"embedding_multiplier": 6.0, "residual_multiplier": 0.25, "logits_scaling": 4.0}
    config = GraniteConfig(num_attention_heads=2, num_key_value_heads=1, **shape, **multipliers)
    torch.manual_seed(2)
    library = GraniteForCausalLM(config).eval()
    library.save_pretrained(tmp_path)
    decoder = load_decoder(Checkpoint(tmp_path), torch.float32, torch.device("cpu"))
    decoder.extracts = (0, 2, 3)
    ids = array("i", range(7, 20))
    buffer = SharedBuffer.create("test-rows", 1 << 12)
    caches = Caches(decoder.mixers(), 2, 16, torch.float32, decoder.device)
    arena, proposer = RowArena(buffer.view, 1, 32, torch.float32), Mock(propose=Mock(return_value=list))
    runner = ModelRunner(decoder, arena, caches, proposer=proposer, keeps_hidden=True)
    chunks, draws = [Chunk(0, len(ids), 0)], [Draw(at=len(ids) - 1)]
    positions = array("i", range(len(ids))) * 3
    runner.run(StepPlan(ids.tobytes(), positions.tobytes(), chunks, [], draws, appended=[appended(0, [0])]))
    (_, _, found), _ = proposer.propose.call_args
    states: list[torch.Tensor] = []
    for layer in (library.model.layers[0], library.model.layers[2], library.model.norm):
        layer.register_forward_pre_hook(lambda _, given: states.append(given[0][0].clone()))
    with torch.inference_mode():
        library(torch.tensor([ids.tolist()]))
    torch.testing.assert_close(found, torch.cat(states, -1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": None}, "not that of an EAGLE-3 head"),
        ({"reads": (1, 9, 30)}, r"reads layers \[2, 10, 31\] of a model with"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "of several layers is not supported"),
        ({"parallel_drafting": True}, "several tokens in one pass"),
        ({"draft_vocab_size": 300}, "d2t does not say"),
        ({"draft_vocab_size": "many"}, "of another kind"),
        ({"draft_vocab_size": -1}, "it has 1 layers and -1 words"),
        ({"draft_vocab_size": 1 << 70}, r"it says \d+ words, and is given 600"),
        ({"num_hidden_layers": 0, "layers": 2}, "it has 0 layers"),
        ({"rms_norm_eps": "much"}, "of another kind"),
        ({"eagle_config": [1]}, "of another kind"),
        ({"architectures": 5, "draft_vocab_size": None}, "not that of an EAGLE-3 head"),
        ({"eagle_aux_hidden_state_layer_ids": 3}, "layers 3, which are no numbers"),
        ({"eagle_aux_hidden_state_layer_ids": [1, "last"]}, "which are no numbers"),
        ({"words": None, "own_embeddings": True, "vocab_size": 100}, "it says 600 words, and is given 100"),
    ],
)
def test_a_head_that_cannot_be_used_is_refused(
    given: dict[str, Any], why: str, checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    directory = checkpoints("qwen3_vl")
    head = Checkpoint(eagle_head(directory, tmp_path / "head", **given))
    target = load_decoder(Checkpoint(directory), torch.float32, torch.device("cpu"))
    with pytest.raises(CheckpointError, match=f"--speculative-method eagle3: .*{why}"):
        load_eagle_head(head, target, Checkpoint(directory), torch.float32)
    assert target.extracts == ()


def test_words_that_are_one_number_are_refused(checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    directory = checkpoints("qwen3_vl")
    head = eagle_head(directory, tmp_path / "head")
    save_file({**load_file(head / "model.safetensors"), "d2t": torch.tensor(0)}, head / "model.safetensors")
    target = load_decoder(Checkpoint(directory), torch.float32, torch.device("cpu"))
    with pytest.raises(CheckpointError, match="d2t does not say what tokens"):
        load_eagle_head(Checkpoint(head), target, Checkpoint(directory), torch.float32)


def test_a_head_whose_weights_are_pickled_is_refused_with_the_way_out(
    checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    directory = checkpoints("qwen3_vl")
    head = eagle_head(directory, tmp_path / "head")
    (head / "model.safetensors").rename(head / "pytorch_model.bin")
    target = load_decoder(Checkpoint(directory), torch.float32, torch.device("cpu"))
    with pytest.raises(CheckpointError, match=r"eagle3: .*pytorch_model\.bin, a pickle, .*: convert them to "):
        load_eagle_head(Checkpoint(head), target, Checkpoint(directory), torch.float32)


def test_a_head_is_no_draft_model(checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    checkpoint = Checkpoint(checkpoints("qwen3_vl"))
    head = Checkpoint(eagle_head(checkpoint.folder, tmp_path / "head"))
    with pytest.raises(CheckpointError, match="for --speculative-method eagle3"):
        load_draft_model(head, ServedModel.of(checkpoint), torch.float32, torch.device("cpu"))
