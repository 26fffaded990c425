"""The sampler against plain formulas, against transformers' own processors, and statistically."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from llm_service.engine.batch import uniform
from llm_service.plan import Draw, StepResult, TokenLogprobs
from llm_service.worker import sampler

VOCABULARY = 24
PROMPT, OUTPUT = [3, 5, 5, 9], [5, 7, 7, 7]
SEEN: dict[str, Any] = {"prompt": array("i", sorted(set(PROMPT))).tobytes(), "output": array("i", OUTPUT).tobytes()}
GRID = 1000


def sample(rows: torch.Tensor, draws: list[Draw]) -> StepResult:
    return sampler.draw(rows, draws, torch.empty(0, dtype=torch.int64)).result()


def logits(seed: int = 0) -> torch.Tensor:
    return 2.0 * torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed))


def draw(**settings: Any) -> Draw:
    return Draw(**{"at": 0, **SEEN, **settings})


def shares(row: torch.Tensor, **settings: Any) -> torch.Tensor:
    """How the interval of `uniform` is divided among the tokens: their probabilities, to 1 / GRID."""
    draws = [draw(uniform=(index + 0.5) / GRID, **settings) for index in range(GRID)]
    chosen = sample(row.expand(GRID, -1), draws).tokens
    return torch.bincount(torch.tensor(chosen), minlength=VOCABULARY) / GRID


def processed(row: torch.Tensor, *processors: Any) -> torch.Tensor:
    """Probabilities after transformers' processors, in this order."""
    ids = torch.tensor([PROMPT + OUTPUT])
    scores: torch.Tensor = LogitsProcessorList(processors)(ids, row.clone().unsqueeze(0))
    return scores[0].softmax(-1)


CASES: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "temperature": ({"temperature": 0.7}, [TemperatureLogitsWarper(0.7)]),
    "top-k": ({"temperature": 1.0, "top_k": 5}, [TopKLogitsWarper(5)]),
    "top-k above the vocabulary": ({"temperature": 1.0, "top_k": 1000}, []),
    "top-p": ({"temperature": 1.0, "top_p": 0.8}, [TopPLogitsWarper(0.8)]),
    "top-p so small that one token is left": ({"temperature": 1.0, "top_p": 1e-6}, [TopPLogitsWarper(1e-6)]),
    "min-p": ({"temperature": 1.0, "min_p": 0.1}, [MinPLogitsWarper(0.1)]),
    "repetition": (
        {"temperature": 1.0, "repetition_penalty": 1.7},
        [RepetitionPenaltyLogitsProcessor(1.7)],
    ),
    "everything": (
        {"temperature": 1.4, "top_k": 12, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.3},
        [
            RepetitionPenaltyLogitsProcessor(1.3),
            TemperatureLogitsWarper(1.4),
            TopKLogitsWarper(12),
            TopPLogitsWarper(0.9),
            MinPLogitsWarper(0.05),
        ],
    ),
}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_probabilities_are_those_of_the_references_processors(name: str, seed: int) -> None:
    settings, processors = CASES[name]
    row = logits(seed)
    wanted = processed(row, *processors)
    assert torch.allclose(shares(row, **settings), wanted, atol=1.01 / GRID)
    assert (shares(row, **settings)[wanted == 0.0] == 0).all()


def test_presence_and_frequency_are_taken_from_tokens_of_the_output_alone() -> None:
    row = logits(2)
    by_hand = row.clone()
    for token in set(OUTPUT):
        by_hand[token] -= 0.9 + 0.4 * OUTPUT.count(token)
    given = shares(row, temperature=1.0, presence_penalty=0.9, frequency_penalty=0.4)
    assert torch.allclose(given, by_hand.softmax(-1), atol=1.01 / GRID)


def test_penalties_come_before_bias_and_bias_before_temperature() -> None:
    row = logits(3)
    by_hand = row.clone()
    for token in set(PROMPT + OUTPUT):
        by_hand[token] = by_hand[token] * 1.5 if by_hand[token] < 0 else by_hand[token] / 1.5
    by_hand[5] += 3.0
    by_hand[11] -= 2.0
    given = shares(row, temperature=2.0, repetition_penalty=1.5, logit_bias={5: 3.0, 11: -2.0})
    assert torch.allclose(given, (by_hand / 2.0).softmax(-1), atol=1.01 / GRID)


def test_banned_tokens_are_never_chosen() -> None:
    row = logits(4)
    likeliest = row.argsort(descending=True)[:2].tolist()
    assert shares(row, temperature=1.0, banned=tuple(likeliest))[likeliest].tolist() == [0.0, 0.0]
    assert sample(row.unsqueeze(0), [Draw(at=0, banned=tuple(likeliest))]).tokens[0] not in likeliest


def test_greedy_takes_the_highest_after_penalties_and_bias() -> None:
    row = torch.zeros(VOCABULARY)
    row[7], row[8], row[9] = 3.0, 2.0, 1.0
    plain, penalised, biased = sample(
        row.expand(3, -1),
        [Draw(at=0), draw(temperature=0.0, frequency_penalty=1.0), Draw(at=0, logit_bias={9: 5.0})],
    ).tokens
    assert (plain, penalised, biased) == (7, 8, 9)


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-60, 1e-310])
def test_the_smallest_temperatures_are_greedy(temperature: float) -> None:
    row = logits(5)
    draws = [Draw(at=0, temperature=temperature, uniform=chance) for chance in (0.0, 0.5, 0.999999)]
    assert sample(row.expand(3, -1), draws).tokens == [int(row.argmax())] * 3


@pytest.mark.parametrize("penalty", [1e-30, 1e-40, 1e-46, 5e-324])
def test_the_smallest_repetition_penalties_leave_the_likeliest_token_that_was_seen(penalty: float) -> None:
    row = torch.zeros(VOCABULARY)
    row[[5, 9, 11]] = torch.tensor([1.4, -0.3, 3.0])  # of those that were seen, 3 and 7 stand at zero
    draws = [draw(temperature=1.0, uniform=chance, repetition_penalty=penalty) for chance in (0.0, 0.5, 0.999999)]
    assert sample(row.expand(3, -1), draws).tokens == [5] * 3


def test_the_ends_of_the_interval_give_tokens_that_are_possible() -> None:
    row = logits(6)
    kept = set(row.argsort(descending=True)[:3].tolist())
    chances = [0.0, 1.0 - 2.0**-53]
    draws = [Draw(at=0, temperature=1.0, top_k=3, uniform=chance) for chance in chances]
    tokens = sample(row.expand(2, -1), draws).tokens
    assert set(tokens) <= kept
    assert tokens[0] != tokens[1]


def test_draws_of_one_seed_follow_the_distribution() -> None:
    """Pearson's chi-square with 23 degrees of freedom stays below its 0.9999 quantile."""
    row, count = 0.5 * logits(7), 6000
    draws = [Draw(at=0, temperature=1.0, uniform=uniform(42, 0, index)) for index in range(count)]
    seen = torch.bincount(torch.tensor(sample(row.expand(count, -1), draws).tokens), minlength=VOCABULARY)
    wanted = count * row.double().softmax(-1)
    assert float(((seen - wanted) ** 2 / wanted).sum()) < 58.6


def test_uniform_numbers_are_even_and_independent_of_their_neighbours() -> None:
    values = torch.tensor([uniform(seed, choice, n) for seed in range(10) for choice in range(5) for n in range(200)])
    assert float(values.min()) >= 0.0
    assert float(values.max()) < 1.0
    bins = torch.histc(values, 20, 0.0, 1.0)
    assert float(((bins - 500) ** 2 / 500).sum()) < 52.0  # 19 degrees of freedom, 0.9999 quantile
    assert abs(float(torch.corrcoef(torch.stack([values[:-1], values[1:]]))[0, 1])) < 0.04
    assert len({uniform(1, 11, 1), uniform(11, 1, 1), uniform(1, 1, 11), uniform(111, 0, 0)}) == 4
    assert uniform((1 << 64) - 1, 7, 9) == uniform((1 << 64) - 1, 7, 9)


def test_logprobs_are_the_models_own_whatever_was_done_to_the_logits() -> None:
    row = logits(8)
    exact = row.double().log_softmax(-1)
    result = sample(row.unsqueeze(0), [draw(temperature=2.0, logit_bias={4: 50.0}, top_k=1, logprobs=5)])
    given = result.logprobs[0]
    assert isinstance(given, TokenLogprobs)
    assert result.tokens == [4]
    assert given.chosen == pytest.approx(float(exact[4]), abs=1e-12)
    assert [token for token, _ in given.top] == row.argsort(descending=True)[:5].tolist()
    assert [value for _, value in given.top] == pytest.approx([float(exact[t]) for t, _ in given.top], abs=1e-12)


def test_zero_logprobs_gives_the_chosen_tokens_alone() -> None:
    (given,) = sample(logits().unsqueeze(0), [Draw(at=0, logprobs=0)]).logprobs
    assert given is not None
    assert given.top == []
    assert sample(logits().unsqueeze(0), [Draw(at=0)]).logprobs == [None]


def test_a_token_does_not_depend_on_its_neighbours_in_the_batch() -> None:
    rows = torch.stack([logits(seed) for seed in range(6)])
    draws = [Draw(at=n, temperature=0.5 + n, top_p=0.9, uniform=uniform(n, 0, 0)) for n in range(6)]
    alone = [sample(rows[n : n + 1], [draws[n]]).tokens[0] for n in range(6)]
    assert sample(rows, draws).tokens == alone
    assert sample(rows.flip(0), draws[::-1]).tokens == alone[::-1]


@pytest.mark.parametrize("settings", [{"top_k": 3}, {"top_p": 0.38}])
def test_tokens_as_likely_as_the_last_one_kept_stay(settings: dict[str, Any]) -> None:
    row = torch.zeros(VOCABULARY)
    row[[3, 20]] = 2.0
    row[[5, 7, 15]] = 1.0  # the first of them is kept, so all are
    given = shares(row, temperature=1.0, **settings)
    assert given.nonzero().flatten().tolist() == [3, 5, 7, 15, 20]
    assert torch.equal(given > 0, processed(row, TopKLogitsWarper(3)) > 0)


def test_a_row_that_is_not_a_number_still_names_a_token_of_the_vocabulary() -> None:
    rows = torch.full((2, VOCABULARY), torch.nan)
    tokens = sample(rows, [Draw(at=0), Draw(at=0, temperature=1.0, top_p=0.9, uniform=0.7)]).tokens
    assert all(0 <= token < VOCABULARY for token in tokens)


def test_a_batch_of_everything_at_once_gives_what_each_gives_alone() -> None:
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.7, "banned": (1, 2)},
        {"output": SEEN["output"], "frequency_penalty": 0.7},
        {"temperature": 1.0, **SEEN, "repetition_penalty": 1.4, "logprobs": 2},
        {"temperature": 1.0, "logit_bias": {3: 4.0, 5: -4.0}, "logprobs": 0},
        {"temperature": 1.0, "allowed_mask": bytes([0b1010, 0, 0b11])},
        {"allowed_mask": bytes([0, 0xFF, 0]), "logprobs": 5},
        {"temperature": 2.0, "top_k": 4, "min_p": 0.2, "logprobs": 1},
    ]
    draws = [Draw(at=0, uniform=uniform(n, 0, 0), **kinds[n % len(kinds)]) for n in range(150)]
    rows = torch.stack([logits(seed) for seed in range(len(draws))])
    untouched = rows.clone()
    together = sample(rows, draws)
    assert torch.equal(rows, untouched)
    for n, draw in enumerate(draws):
        alone = sample(rows[n : n + 1], [draw])
        assert (together.tokens[n], together.logprobs[n]) == (alone.tokens[0], alone.logprobs[0])
