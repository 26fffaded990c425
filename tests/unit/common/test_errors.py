"""One table from error to status; every error is in it."""

from __future__ import annotations

import ast
import inspect
from http import HTTPStatus

import grpc
import pytest

from common import errors
from common.errors import OUTCOMES, TwinlensError, code_number, from_code, outcome

KINDS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, TwinlensError) and kind is not TwinlensError
]


def test_every_error_has_a_row_and_every_row_another_status() -> None:
    assert set(OUTCOMES) == set(KINDS)
    assert len({row.grpc for row in OUTCOMES.values()}) == len(OUTCOMES)


def test_the_tree_at_the_top_of_the_module_is_the_tree() -> None:
    text = ast.get_docstring(ast.parse(inspect.getsource(errors))) or ""
    drawn = {line.split()[1]: line.split()[-1] for line in text.splitlines() if line.lstrip().startswith(("├", "└"))}
    assert drawn == {kind.__name__: row.grpc.name for kind, row in OUTCOMES.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_crosses_the_wire_and_comes_back_as_itself(kind: type[TwinlensError]) -> None:
    sent = kind("a sentence", reason="WORD", field="a.b", retry_after=2.5)
    back = from_code(code_number(sent), sent.message, reason=sent.reason, field=sent.field, retry_after=2.5)
    assert type(back) is kind
    assert (back.message, back.reason, back.field, back.retry_after) == ("a sentence", "WORD", "a.b", 2.5)


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_has_a_stable_reason_of_its_own(kind: type[TwinlensError]) -> None:
    assert kind("x").reason == kind("x").reason.upper() != ""


def test_a_retry_hint_is_given_where_a_retry_can_help_at_once() -> None:
    for kind in (errors.Exhausted, errors.Unavailable):
        assert kind("full").retry_after == 1.0
        assert outcome(kind("full")).retryable
    assert errors.InvalidInput("bad").retry_after is None


def test_an_error_is_told_to_each_caller_at_a_field_of_its_own() -> None:
    shared = errors.Exhausted("full", reason="FULL", field="items[1].url", retry_after=3.0)
    own = shared.at("media[0]", instead_of="items[1]")
    assert (type(own), own.message, own.reason, own.retry_after) == (errors.Exhausted, "full", "FULL", 3.0)
    assert (own.field, shared.field) == ("media[0].url", "items[1].url")
    assert shared.at("media[0]").field == "media[0]"
    for elsewhere in ("items[2]", ""):
        assert shared.at("media[0]", instead_of=elsewhere).field == "items[1].url"


def test_a_number_that_is_no_error_of_ours_is_internal() -> None:
    for number in (0, 2, 6, 10, 11, 99, -1):
        assert type(from_code(number, "x")) is errors.Internal


def test_a_subclass_looks_like_its_nearest_listed_parent() -> None:
    class Special(errors.NotFound):
        pass

    assert outcome(Special("x")).grpc is grpc.StatusCode.NOT_FOUND


def test_our_faults_are_5xx_and_the_callers_4xx() -> None:
    theirs = {
        errors.InvalidInput, errors.Unauthenticated, errors.Forbidden, errors.NotFound, errors.Precondition,
        errors.Exhausted, errors.Cancelled,
    }  # fmt: skip
    for kind, row in OUTCOMES.items():
        assert isinstance(row.http, HTTPStatus)
        assert (row.http.value < 500) == (kind in theirs)
