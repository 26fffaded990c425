"""Figures say what caches gave, and there are none where a cache had what should be new."""

from __future__ import annotations

import asyncio
import doctest
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import early_prefill, hits, sides
from benchmarks.__main__ import print_tables
from benchmarks.hits import Hits, NotNewError, added, check_new, no_wrong_figures, since, told
from benchmarks.sides import TITLES, Timed, measure
from benchmarks.workload import CONCURRENT, Plan, Question


class Engine:
    """An engine that counts every picture it was asked about before; it takes a second for a token."""

    name = "engine"

    def __init__(self) -> None:
        self.seen: set[object] = set()
        self.found = 0

    def look(self, question: Question) -> None:
        self.found += question.picture in self.seen
        self.seen.add(question.picture)

    async def ask(self, question: Question, tokens: int) -> Timed:
        self.look(question)
        return Timed(1.0, float(tokens), tokens, {"vit": 0.5})

    async def together(self, questions: Sequence[Question], tokens: int) -> float:
        for question in questions:
            self.look(question)
        return float(tokens)

    async def hits(self) -> Hits:
        return {"pictures": self.found}


async def test_every_row_is_measured_with_its_hits() -> None:
    measured = await measure(Engine(), Plan.new(runs=3), tokens=4)
    assert list(measured.figures) == list(TITLES)
    assert {name: found["pictures"] for name, found in measured.hits.items() if found["pictures"]} == {
        "ttft_repeated_picture": 3,
        "ttft_repeated_prompt": 3,
    }
    assert measured.figures["per_token"] == 1.0
    assert [measured.figures[f"tokens_per_second_{many}"] for many in CONCURRENT] == list(CONCURRENT)
    assert measured.stages == {"vit": 0.5}


async def test_pictures_of_a_smaller_round_in_a_larger_one_leave_no_figures() -> None:
    plan = Plan.new(runs=1)
    plan.together[8] = [[*plan.together[4][0], *plan.together[8][0][4:]]]
    with pytest.raises(NotNewError, match=r"engine, tokens/s at 8 concurrent: .* 4 pictures"):
        await measure(Engine(), plan, tokens=4)


async def test_a_warm_up_that_asks_what_is_measured_leaves_no_figures() -> None:
    plan = Plan.new(runs=2)
    plan.warm_up[0] = plan.first[0]
    with pytest.raises(NotNewError, match="new picture"):
        await measure(Engine(), plan, tokens=4)


def test_a_program_ends_with_a_sentence_and_not_well() -> None:
    with pytest.raises(SystemExit, match=r"^No figures, .* a row: .* 16 prefix tokens$"), no_wrong_figures():
        check_new("a row", {"prefix tokens": 16, "rows": 0})


def test_hits_are_told_and_added() -> None:
    check_new("a row", {"rows": 0})
    assert since({"rows": 2}, {"rows": 5, "store": 1}) == {"rows": 3, "store": 1}
    assert added([{"rows": 2}, {"rows": 1, "store": 4}, {}]) == {"rows": 3, "store": 4}
    assert told({}) == "has no cache"


async def test_the_services_counters_are_read() -> None:
    def stub(**load: int) -> Any:
        async def get_load(request: object) -> SimpleNamespace:
            return SimpleNamespace(**load)

        return SimpleNamespace(GetLoad=get_load)

    llm = stub(prefix_hit_tokens=32, row_hits=2, headers_known=3)
    found = await hits.of_services(llm, stub(store_hits=1), stub(store_hits=4))
    assert found == {hits.PREFIX: 32, hits.ROWS: 2, hits.HEADERS: 3, hits.STORE: 5}


@pytest.mark.parametrize("module", [hits, early_prefill, sides], ids=lambda module: module.__name__)
def test_examples_hold(module: Any) -> None:
    assert doctest.testmod(module).failed == 0


def test_both_tables_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    one = asyncio.run(measure(Engine(), Plan.new(runs=3), tokens=4))
    print_tables({"transformers": [one], "twinlens": [one, one]})
    lines = capsys.readouterr().out.splitlines()
    assert "| TTFT, new picture | 1000.0 ms | 1000.0 ms | 1.00 |" in lines
    assert "| TTFT, *repeated* picture, new question | 3 pictures | 6 pictures |" in lines
    assert "| tokens/s at 16 concurrent | nothing | nothing |" in lines
    assert "Stages of a new picture: vit 500.0 ms" in lines
