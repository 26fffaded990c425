from __future__ import annotations

import grpc
import pytest
from grpc_health.v1 import health, health_pb2

from tests.unit.twinlens.conftest import serving
from twinlens import Endpoint, NotReachableError, TwinlensError
from twinlens.cli import main
from twinlens.health import Health, check


class Handlers(grpc.GenericRpcHandler):
    """Passes calls to the real health servicer, so that our bytes meet the generated parsers."""

    def __init__(self, servicer: health.HealthServicer) -> None:
        self.servicer = servicer

    def service(self, details):
        return grpc.unary_unary_rpc_method_handler(
            self.servicer.Check,
            health_pb2.HealthCheckRequest.FromString,
            health_pb2.HealthCheckResponse.SerializeToString,
        )


@pytest.fixture
def address():
    servicer = health.HealthServicer()
    servicer.set("twinlens.v1.LlmService", health_pb2.HealthCheckResponse.SERVING)
    servicer.set("twinlens.v1.EncoderService", health_pb2.HealthCheckResponse.NOT_SERVING)
    with serving(handlers=(Handlers(servicer),)) as address:
        yield address


def test_the_numbers_are_the_protocols() -> None:
    theirs = health_pb2.HealthCheckResponse.ServingStatus.items()
    assert {name: int(value) for name, value in theirs} == {each.name: each.value for each in Health}


def test_a_serving_service_is_serving(address: str) -> None:
    assert check(Endpoint(address)) is Health.SERVING
    assert check(Endpoint(address), "twinlens.v1.LlmService") is Health.SERVING


def test_a_draining_service_is_not(address: str) -> None:
    assert check(Endpoint(address), "twinlens.v1.EncoderService") is Health.NOT_SERVING


def test_an_unknown_service_is_an_error(address: str) -> None:
    with pytest.raises(TwinlensError) as caught:
        check(Endpoint(address), "nobody")
    assert caught.value.code is grpc.StatusCode.NOT_FOUND


def test_a_closed_port_is_not_reachable() -> None:
    with pytest.raises(NotReachableError):
        check(Endpoint("127.0.0.1:1"))


def test_a_name_that_is_too_long_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="127"):
        check(Endpoint(address), "x" * 128)


@pytest.mark.parametrize(("arguments", "code"), [([], 0), (["--service", "twinlens.v1.EncoderService"], 1)])
def test_the_command_says_it_with_its_exit_code(address: str, arguments: list[str], code: int) -> None:
    assert main(["health", address, *arguments]) == code


def test_the_command_on_a_closed_port_exits_with_3() -> None:
    assert main(["health", "127.0.0.1:1", "--timeout", "2"]) == 3
