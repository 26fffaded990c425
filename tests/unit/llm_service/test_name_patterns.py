"""Patterns of modules' names fit what peft has them fit, and none takes long."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_service.model_config.name_patterns import Budget, NamePattern, PatternError

NAMES = [
    f"model.language_model.layers.{layer}.{part}"
    for layer in (0, 1, 2, 10, 12, 21)
    for part in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj", "mlp.shared_expert.down_proj")
]
WRITTEN = [
    "q_proj",
    "^model.language_model.layers.1.mlp.up_proj",
    "language_model",
    "layers.1.*q_proj",
    r".*\.q_proj",
    r"layers\.[0-9]+\.self_attn\.(q|k)_proj",
    r"layers\.(?:[0-5]|1\d|2[^0])\..*",
    r"model\.language_model\.layers\.(10|12)\..*_proj$",
    r"layers.\d{2}.*(up|down)_proj",
    r"(self_attn\.)?[qk]_proj|mlp.up_proj",
    r"layers\.\d+?\.mlp\.(shared_expert\.)?(up|down)_proj",
    r"\D*1\D*",
    r"[\w.]+(q_proj){1}",
    r"(|x)up_proj",
    "up_proj ",
    "(q|)",
]


def of_peft(pattern: str, name: str) -> bool:
    """As peft asks, in `get_pattern_key`; `tests/parity/test_adapters.py` has it read a table of these patterns."""
    return re.match(rf"(.*\.)?({pattern})$", name) is not None


@pytest.mark.parametrize("pattern", WRITTEN)
def test_a_pattern_fits_what_it_fits_for_peft(pattern: str) -> None:
    read, budget = NamePattern(pattern), Budget()
    assert [read.fits(name, budget) for name in NAMES] == [of_peft(pattern, name) for name in NAMES]


def patterns() -> st.SearchStrategy[str]:
    one = st.sampled_from(["a", "b", ".", r"\.", r"\w", "[ab]", "[^a]", "^", "$"])
    repeat = st.sampled_from(["", "", "*", "+", "?", "*?", "{2}", "{1,2}", "{2,}"])

    def wider(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        grouped = st.tuples(inner, repeat).map(lambda pair: f"({pair[0]}){pair[1]}")
        return st.one_of(grouped, st.tuples(inner, inner).map("".join), st.tuples(inner, inner).map("|".join))

    return st.recursive(
        st.tuples(one, repeat).map(lambda pair: pair[0] + (pair[1] if pair[0] not in "^$" else "")),
        wider,
        max_leaves=6,
    )


@given(patterns(), st.text("ab.", max_size=7))
def test_any_pattern_fits_what_it_fits_for_python(pattern: str, name: str) -> None:
    assert NamePattern(pattern).fits(name, Budget()) == of_peft(pattern, name)


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("(a+)+$", "a" * 200 + "!"),
        ("(a|a)*b", "a" * 200),
        ("(a|aa)+c", "a" * 200),
        ("((a*)*)*b", "a" * 200),
        (".*.*.*.*.*.*.*.*x", "a" * 200),
        ("(a?){200}a{200}", "a" * 199),
    ],
)
def test_no_pattern_is_gone_back_in(pattern: str, name: str) -> None:
    begun = time.thread_time()
    assert not NamePattern(pattern).fits(name, Budget())
    assert time.thread_time() - begun < 2


def test_what_takes_too_long_is_refused() -> None:
    read, budget = NamePattern("(((a{1,9999}b?){1,9999}c?){1,9999}d?){1,9999}e"), Budget()
    begun = time.thread_time()
    with pytest.raises(PatternError, match="takes too long"):
        [read.fits("a" * 200, budget) for _ in range(1000)]
    assert time.thread_time() - begun < 5


@pytest.mark.parametrize(
    "pattern",
    [
        *("(?!a)b", "(?<=a)b", "(?i)a", "(?P<x>a)", r"(a)\1", r"\ba", "a*+", "a++", "a**", "(?>a)", r"\Aa", r"\x41"),
        *("*a", "+", "(", ")", "a)", "(a", "[", "[b-a]", "[[a]]", "[a&&b]", "a{2", "a{,2}", "a{3,2}", "a\\", "]"),
        *("x" * 1025, "(" * 500 + ")" * 500, "a{99999}"),
    ],
)
def test_what_is_not_read_is_refused(pattern: str) -> None:
    with pytest.raises(PatternError, match=r"has what is not read here|more than 1024 characters"):
        NamePattern(pattern)
