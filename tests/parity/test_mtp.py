"""Qwen3.5's layer for multi-token prediction against plain operators around transformers' own layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from llm_service.models.loader import load_decoder
from llm_service.plan import StepPlan
from llm_service.request import SamplingParams
from llm_service.worker.draft_loader import load_mtp_layer
from testkit import reference
from testkit.local_engine import LocalEngine, Prompt, make_prompt
from tests.mtp_checkpoint import with_mtp_layer
from tests.parity.cases import PARTS

GREEDY = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.0)


@pytest.fixture(scope="module")
def directory(checkpoints: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_mtp_layer(checkpoints("qwen3_5"), tmp_path_factory.mktemp("mtp"))


@pytest.fixture(scope="module")
def prompts(directory: Path) -> list[Prompt]:
    return [make_prompt(directory, parts) for parts in PARTS]


class Reference:
    """All of a sequence anew for each draft."""

    def __init__(self, directory: Path) -> None:
        self.model: Any = reference.model(directory)
        text = self.model.model.language_model
        kind = text.layers[3]
        weights = load_file(directory / "model.safetensors")
        self.own = {name.removeprefix("mtp."): each for name, each in weights.items() if name.startswith("mtp.")}
        self.layer = type(kind)(text.config, 3).eval()
        inner = "layers.0."
        self.layer.load_state_dict({n.removeprefix(inner): w for n, w in self.own.items() if n.startswith(inner)})
        self.text = text

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * (1 + self.own[f"{name}.weight"])

    @torch.inference_mode()
    def drafts(self, prompt: Prompt, output: list[int], count: int) -> list[int]:
        """The drafts behind an output of at least one token."""
        layout = prompt.layout
        ids = [*layout.ids, *output]
        embeddings = self.text.embed_tokens(torch.tensor(ids))
        for span, rows in zip(layout.spans, prompt.rows, strict=True):
            for run in span.runs:
                embeddings[run.begin : run.end] = rows[run.first_row : run.first_row + run.count, 0]
        places = np.frombuffer(layout.positions, np.int32).reshape(3, -1)
        beyond = np.tile(np.arange(len(layout.ids), len(ids) + count) + layout.mrope_delta, (3, 1))
        positions = torch.from_numpy(np.concatenate([places, beyond], axis=1)).long()
        known = len(ids) - 1
        hidden = self.text(
            inputs_embeds=embeddings[None, :known], position_ids=positions[:, None, :known]
        ).last_hidden_state[0]
        nexts, drafts = embeddings[1:], list[int]()
        for _ in range(count):
            both = torch.cat([self.norm(nexts, "pre_fc_norm_embedding"), self.norm(hidden, "pre_fc_norm_hidden")], -1)
            x = (both @ self.own["fc.weight"].T)[None]
            n = x.shape[1]
            mask = torch.full((n, n), -torch.inf).triu(1)[None, None]
            rotary = self.text.rotary_emb(x, positions[:, None, :n])
            out = self.layer(x, position_embeddings=rotary, attention_mask=mask)
            out = out[0] if isinstance(out, tuple) else out
            last = self.norm(out[0, -1:], "norm")
            drafts.append(int(self.model.lm_head(last).argmax()))
            hidden = torch.cat([hidden, last])
            nexts = torch.cat([nexts, self.text.embed_tokens(torch.tensor(drafts[-1:]))])
        return drafts


@pytest.mark.parametrize("number", range(len(PARTS)))
def test_drafts_are_those_of_the_reference(directory: Path, prompts: list[Prompt], number: int) -> None:
    (said,) = LocalEngine(directory).run([prompts[number]], GREEDY)
    engine, wanted = LocalEngine(directory, speculative_tokens=4, mtp=True), Reference(directory)
    proposer = engine.runner.proposer
    assert proposer is not None
    found: list[tuple[int, list[int]]] = []
    propose = proposer.propose

    def watched(plan: StepPlan, chosen: list[int], hidden: torch.Tensor, /) -> Callable[[], list[list[int]]]:
        proposed = propose(plan, chosen, hidden)
        context = plan.chunks[0].context + plan.chunks[0].count - (len(plan.draws) - 1)
        right = next((n for n, token in enumerate(chosen[:-1]) if token != _drafts(plan)[n]), len(chosen) - 1)
        found.append((context + right + 1 - len(prompts[number].layout.ids), proposed()[0]))
        return proposed

    vars(proposer)["propose"] = watched
    (outcome,) = engine.run([prompts[number]], GREEDY)
    assert outcome.tokens == said.tokens
    told = [(generated, drafts) for generated, drafts in found if drafts]
    assert len(told) > 3
    for generated, drafts in told[:6]:
        assert drafts == wanted.drafts(prompts[number], said.tokens[:generated], len(drafts)), generated


def _drafts(plan: StepPlan) -> list[int]:
    count = len(plan.draws) - 1
    return np.frombuffer(plan.token_ids, np.int32)[len(plan.token_ids) // 4 - count :].tolist()


def test_chunks_company_and_preemption_change_no_token(directory: Path, prompts: list[Prompt]) -> None:
    for sampling in (GREEDY, SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.0, seed=3)):
        said = [outcome.tokens for outcome in LocalEngine(directory).run(prompts, sampling)]
        for given in ({}, {"step_tokens": 80, "blocks": 14, "prefix_cache": True}):
            engine = LocalEngine(directory, speculative_tokens=3, mtp=True, **given)
            assert [outcome.tokens for outcome in engine.run(prompts, sampling)] == said, given
            assert engine.scheduler.counters.draft_tokens > 0


def test_a_checkpoint_without_that_layer_is_refused(checkpoints: Callable[..., Path]) -> None:
    checkpoint = Checkpoint(checkpoints("qwen3_5"))
    decoder = load_decoder(checkpoint, torch.float32, torch.device("cpu"))
    with pytest.raises(CheckpointError, match=r"--speculative-method mtp: .* there are no weights mtp"):
        load_mtp_layer(checkpoint, decoder, torch.float32)
