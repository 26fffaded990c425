from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import grpc
import pytest

from twinlens import InterruptedStreamError, NotReachableError, TwinlensError, v1
from twinlens.errors import STATUS_TRAILER, error_from


class Failure:
    """A failed call as gRPC presents it."""

    def __init__(self, code, details="", trailers=()):
        self._code, self._details, self._trailers = code, details, trailers

    def code(self):
        return self._code

    def details(self):
        return self._details

    def trailing_metadata(self):
        return self._trailers


def explained(status: v1.Status, code=grpc.StatusCode.INVALID_ARGUMENT) -> Failure:
    return Failure(code, "plain words", (("x", "y"), (STATUS_TRAILER, status.SerializeToString())))


def test_the_trailer_tells_reason_field_and_retry() -> None:
    status = v1.Status(code=8, message="too busy", reason="QUEUE_FULL", field="chat", retry_after_ms=1500)
    error = error_from(explained(status, grpc.StatusCode.RESOURCE_EXHAUSTED))
    assert (error.code, error.message) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "too busy")
    assert (error.reason, error.field, error.retry_after) == ("QUEUE_FULL", "chat", 1.5)
    assert error.retryable
    assert str(error) == "QUEUE_FULL: too busy (field chat)"


def test_an_error_without_retry_hint_has_none() -> None:
    error = error_from(explained(v1.Status(code=3, message="no")))
    assert error.retry_after is None
    assert not error.retryable


def test_a_hint_of_zero_is_a_hint() -> None:
    error = error_from(explained(v1.Status(code=14, message="restarting", retry_after_ms=0)))
    assert error.retry_after == 0
    assert error.retryable


@pytest.mark.parametrize("trailers", [None, (), ((STATUS_TRAILER, b"\xff\xff"),)])
def test_without_a_readable_trailer_the_plain_status_speaks(trailers) -> None:
    error = error_from(Failure(grpc.StatusCode.NOT_FOUND, "no such model", trailers))
    assert type(error) is TwinlensError
    assert (error.code, error.message, error.reason) == (grpc.StatusCode.NOT_FOUND, "no such model", "")
    assert str(error) == "NOT_FOUND: no such model"


def test_unavailable_without_a_trailer_means_that_no_service_answered() -> None:
    assert isinstance(error_from(Failure(grpc.StatusCode.UNAVAILABLE, "refused")), NotReachableError)


def test_unavailable_with_a_trailer_is_the_services_own_word() -> None:
    status = v1.Status(code=14, message="no encoder is up", reason="NO_ENCODER")
    error = error_from(explained(status, grpc.StatusCode.UNAVAILABLE))
    assert not isinstance(error, NotReachableError)
    assert error.retryable


def test_a_code_that_grpc_does_not_know_leaves_the_calls_own() -> None:
    error = error_from(explained(v1.Status(code=99, message="odd"), grpc.StatusCode.INTERNAL))
    assert error.code is grpc.StatusCode.INTERNAL


@pytest.mark.parametrize("crossed", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy])
@pytest.mark.parametrize(
    "error",
    [
        TwinlensError(grpc.StatusCode.NOT_FOUND, "no", reason="NOT_FOUND", field="model", retry_after=1.5),
        NotReachableError(grpc.StatusCode.UNAVAILABLE, "Connection refused"),
        InterruptedStreamError(grpc.StatusCode.UNAVAILABLE, "gone", events=2),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_of_a_process_of_a_pool_is_the_same_to_the_one_that_waits(
    error: TwinlensError, crossed: Callable[[TwinlensError], TwinlensError]
) -> None:
    other = crossed(error)
    assert type(other) is type(error)
    assert (str(other), vars(other), other.retryable) == (str(error), vars(error), error.retryable)
