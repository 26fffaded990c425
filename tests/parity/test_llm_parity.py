"""The LLM side against transformers: token ids, positions, and 64 greedy tokens, however prefill is cut and mixed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from common.checkpoints.checkpoint import Checkpoint
from llm_service.engine.sequence import Sequence
from llm_service.engine.state_slots import SnapshotPlace
from llm_service.layers.attention.backend import PagedChunk
from llm_service.models.loader import load_decoder
from llm_service.request import SamplingParams
from llm_service.worker.caches import Caches
from testkit import reference
from testkit.checkpoints import Family, make_checkpoint
from testkit.local_engine import LocalEngine, Prompt, make_prompt
from tests.parity.cases import PROMPTS, coarse_picture

GREEDY = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
BRIEF = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
"""Of what depends on how a prompt is computed: more than a block holds."""


KINDS = [
    *((family, torch.float32) for family in ("qwen3_vl", "qwen3_5")),
    *(
        pytest.param((family, torch.float32), marks=pytest.mark.soak)
        for family in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl_moe", "qwen3_5_moe", "qwen4_exp")
    ),
]
STORED = [
    ("qwen2_vl", torch.bfloat16),
    pytest.param(("qwen3_vl", torch.float16), marks=pytest.mark.soak),
    pytest.param(("qwen3_vl_moe", torch.bfloat16), marks=pytest.mark.soak),
]
"""As models are published. All compute in float32."""


@pytest.fixture(scope="module", params=[*KINDS, *STORED], ids=lambda kind: "-".join(map(str, kind)))
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, dtype = request.param
    return make_checkpoint(family, tmp_path_factory.mktemp(family), dtype=dtype)


@pytest.fixture(scope="module")
def prompts(directory: Path) -> dict[str, Prompt]:
    return {name: make_prompt(directory, parts) for name, parts in PROMPTS.items()}


@pytest.fixture(scope="module")
def expected(directory: Path, prompts: dict[str, Prompt]) -> dict[str, list[int]]:
    """The reference's tokens."""
    tokens = {name: reference.reference_generate(directory, prompt.inputs) for name, prompt in prompts.items()}
    assert len(set(map(tuple, tokens.values()))) == len(tokens), "the prompts prove nothing"
    return tokens


def begun(tokens: list[int]) -> list[int]:
    """What a brief answer has of a whole one."""
    return tokens[: BRIEF.max_tokens]


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_have_the_references_ids_and_positions(prompts: dict[str, Prompt], name: str) -> None:
    prompt = prompts[name]
    assert prompt.layout.ids == prompt.inputs["input_ids"][0].tolist()
    ours = np.frombuffer(prompt.layout.positions, np.int32).reshape(3, -1)
    assert np.array_equal(ours, prompt.inputs["position_ids"][:, 0].numpy())
    assert prompt.layout.mrope_delta == int(prompt.inputs["rope_deltas"])


def test_greedy_tokens_equal_the_references_whatever_the_chunks_and_the_company(
    directory: Path, prompts: dict[str, Prompt], expected: dict[str, list[int]]
) -> None:
    whole, chunked = LocalEngine(directory), LocalEngine(directory, step_tokens=16)
    for name, prompt in prompts.items():
        assert whole.run([prompt], GREEDY)[0].tokens == expected[name], name
        assert chunked.run([prompt], BRIEF)[0].tokens == begun(expected[name]), f"{name}, in chunks of 16"

    company = LocalEngine(directory, step_tokens=48, max_running=8)
    together = [*prompts, "one image", "text", "video"]
    outcomes = company.run([prompts[name] for name in together], GREEDY)
    for name, outcome in zip(together, outcomes, strict=True):
        assert outcome.tokens == expected[name], f"{name}, beside 7 others"


def test_two_pictures_give_different_answers(directory: Path) -> None:
    engine = LocalEngine(directory)
    prompts = [make_prompt(directory, [coarse_picture(seed, 120, 90), "What is it?"]) for seed in (11, 12)]
    first, second = engine.run(prompts, BRIEF)
    assert first.tokens != second.tokens


def test_preemption_and_cached_prefixes_change_no_token(
    directory: Path, prompts: dict[str, Prompt], expected: dict[str, list[int]]
) -> None:
    asked, right = list(prompts.values()), list(expected.values())
    longest = max(len(prompt.layout.ids) for prompt in asked)
    tight = LocalEngine(directory, blocks=(longest + 64) // 16 + 6, step_tokens=64, prefix_cache=True)
    assert [outcome.tokens for outcome in tight.run(asked, GREEDY)] == right
    assert tight.scheduler.counters.preemptions > 0, "the cache was not tight enough to prove anything"

    roomy = LocalEngine(directory, prefix_cache=True)
    roomy.run(asked, GREEDY)
    again = roomy.run(asked, GREEDY)
    assert [outcome.tokens for outcome in again] == right
    if roomy.runner.caches.state_slots:
        lengths = [len(prompt.layout.ids) for prompt in asked]
        assert [outcome.cached for outcome in again] == [(length - 1) // 64 * 64 for length in lengths]
    else:
        assert all(outcome.cached >= len(p.layout.ids) - 17 for outcome, p in zip(again, asked, strict=True))


def test_blocks_that_come_back_from_the_host_change_no_token(
    directory: Path, prompts: dict[str, Prompt], expected: dict[str, list[int]]
) -> None:
    """One prompt after the other, each of which takes the blocks of those before it."""
    asked, right = list(prompts.values()), list(map(begun, expected.values()))
    if LocalEngine(directory).runner.caches.state_slots:
        pytest.skip("its layers keep states")
    longest = max(len(prompt.layout.ids) for prompt in asked)
    engine = LocalEngine(directory, blocks=(longest + BRIEF.max_tokens) // 16 + 1, prefix_cache=True, host_blocks=200)
    for again in range(2):
        outcomes = [engine.run([prompt], BRIEF)[0] for prompt in asked]
        assert [outcome.tokens for outcome in outcomes] == right
        if again:
            assert all(outcome.cached >= len(p.layout.ids) - 17 for outcome, p in zip(outcomes, asked, strict=True))
    assert engine.scheduler.state().kv_blocks_loaded > sum(len(prompt.layout.ids) for prompt in asked) // 32


@pytest.mark.parametrize(
    ("family", "overlap"),
    [
        ("qwen3_5", True),
        pytest.param("qwen3_5_moe", False, marks=pytest.mark.soak),
        pytest.param("qwen3_5", False, marks=pytest.mark.soak),
        pytest.param("qwen3_5_moe", True, marks=pytest.mark.soak),
        pytest.param("qwen4_exp", True, marks=pytest.mark.soak),
    ],
)
def test_a_hit_at_each_possible_place_changes_no_token(
    family: Family, overlap: bool, checkpoints: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoints(family)
    prompt = make_prompt(folder, ["Look at this. " * 12, coarse_picture(31, 520, 420), "What is it? " * 12])
    count, span = len(prompt.layout.ids), prompt.layout.spans[0]
    places = [*range(64, count, 64)]
    assert any(span.begin < place < span.end for place in places), "one of them is within the picture"
    undisturbed = LocalEngine(folder).run([prompt], BRIEF)[0].tokens
    engine = LocalEngine(folder, prefix_cache=True, overlap=overlap)
    with monkeypatch.context() as everywhere:
        of = dict.fromkeys(places, SnapshotPlace.OPENING)
        everywhere.setattr(Sequence, "branches", lambda _, begin, end: {p: of[p] for p in places if begin < p <= end})
        assert engine.run([prompt], BRIEF)[0].tokens == undisturbed
    states = engine.scheduler.blocks._states
    for place in reversed(places):
        for identity, snapshot in [*states._snapshots.items()]:
            if snapshot.tokens > place:
                states.forget(identity)
        hit = engine.run([prompt], BRIEF)[0]
        assert (hit.cached, hit.tokens) == (place, undisturbed)


def test_sharing_follows_text_picture_and_tenant(directory: Path) -> None:
    engine = LocalEngine(directory, prefix_cache=True, block_size=4)
    if engine.runner.caches.state_slots:
        pytest.skip("the prompts are shorter than what lies between two snapshots")
    image, other = coarse_picture(21, 120, 90), coarse_picture(22, 120, 90)
    question = "What is in the picture, and where?"
    base = make_prompt(directory, [image, question])
    swapped = make_prompt(directory, [other, question])
    engine.run([base], BRIEF)
    assert engine.run([base], BRIEF)[0].cached > base.layout.spans[0].end
    assert engine.run([swapped], BRIEF)[0].cached <= base.layout.spans[0].begin
    assert engine.run([make_prompt(directory, ["Well?", image])], BRIEF)[0].cached < base.layout.spans[0].end
    tenant = make_prompt(directory, [image, question])
    tenant.salt = "another tenant"
    assert engine.run([tenant], BRIEF)[0].cached == 0


def test_logits_are_the_references(directory: Path, prompts: dict[str, Prompt]) -> None:
    prompt = prompts["one image"]
    logits = reference.reference_logits(directory, prompt.inputs)[-1].double().log_softmax(-1)
    engine = LocalEngine(directory)
    engine.submit(prompt, SamplingParams(max_tokens=1, temperature=0.0, logprobs=20))
    step, _ = engine.scheduler.schedule()
    assert step is not None
    given = engine.runner.run(step.plan).logprobs[0]
    assert given is not None
    for token, value in given.top:
        assert torch.isclose(logits[token], torch.tensor(value).double(), rtol=1e-4), token


@pytest.mark.parametrize(
    "family",
    [
        *("qwen2_vl", "qwen3_vl", "qwen3_5_moe"),
        *(
            pytest.param(each, marks=pytest.mark.soak)
            for each in ("qwen2_5_vl", "qwen3_vl_moe", "qwen3_5", "qwen4_exp")
        ),
    ],
)
def test_both_layouts_and_shards_hold_the_same_model(family: Family, checkpoints: Callable[..., Path]) -> None:
    answers = []
    for settings in ({"layout": "hub"}, {"layout": "saved", "sharded": True}):
        folder = checkpoints(family, **settings)
        answers.append(LocalEngine(folder).run([make_prompt(folder, PROMPTS["one image"])], BRIEF)[0].tokens)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_stays_near_the_reference(
    directory: Path, prompts: dict[str, Prompt], dtype: torch.dtype
) -> None:
    prompt = prompts["text"]
    expected = reference.reference_logits(directory, prompt.inputs).float()
    decoder = load_decoder(Checkpoint(directory), dtype, torch.device("cpu"))
    count, caches = (
        len(prompt.layout.ids),
        Caches(decoder.mixers(), 8, 16, decoder.kv_dtype, decoder.device, state_slots=1),
    )
    batches = caches.batches([PagedChunk(0, count, list(range(-(-count // 16))))], [0])
    positions = torch.from_numpy(np.frombuffer(prompt.layout.positions, np.int32).reshape(3, -1).copy())
    with torch.inference_mode():
        ids = torch.tensor(prompt.layout.ids)
        hidden = decoder(decoder.embed_tokens(ids), positions, caches.layers, batches, None, token_ids=ids)
        given = decoder.logits(hidden)
    # Of all places: where two experts are nearly alike for a token, rounding may have it go to the other one.
    assert torch.nn.functional.cosine_similarity(given, expected, dim=1).median() > 0.995


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_positions_that_reach_further_by_yarn_are_the_reference_s(
    family: Family, checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    """As the makers of both say how to serve longer contexts: a line of config.json."""
    folder = shutil.copytree(checkpoints(family), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    text["rope_scaling"] |= {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    text["rope_scaling"].pop("type", None)
    (folder / "config.json").write_text(json.dumps(config))
    prompts = [make_prompt(folder, PROMPTS[name]) for name in ("one image", "video")]
    plain = LocalEngine(checkpoints(family)).run(prompts, BRIEF)
    found = [outcome.tokens for outcome in LocalEngine(folder, step_tokens=48).run(prompts, BRIEF)]
    assert found == [reference.reference_generate(folder, prompt.inputs, BRIEF.max_tokens) for prompt in prompts]
    assert found != [outcome.tokens for outcome in plain], "the scaling proves nothing"
