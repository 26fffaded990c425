"""Requests to all LLM services: their outcomes, and the common result."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

import grpc

from common.errors import TwinlensError, Unavailable
from gateway.errors import NotEverywhere
from gateway.services import LlmService, error_of

T = TypeVar("T")


async def asked(service: LlmService, call: Callable[[LlmService], Awaitable[T]]) -> T | TwinlensError:
    """The result of a call to one service, or its error."""
    try:
        return await call(service)
    except grpc.aio.AioRpcError as error:
        return error_of(error)
    except grpc.aio.UsageError:  # it is on no list any more, and its channel has been closed
        return Unavailable("the LLM service cannot be reached", reason="NO_LLM_SERVICE")


def done_everywhere(outcomes: Mapping[LlmService, T | TwinlensError]) -> dict[LlmService, T]:
    """The results of all services. Raises the common error of all, or NotEverywhere if only some failed, or they failed
    for different reasons."""
    failed = {service: each for service, each in outcomes.items() if isinstance(each, TwinlensError)}
    if len(failed) == len(outcomes) and len({error.reason for error in failed.values()}) == 1:
        raise next(iter(failed.values()))
    if failed:
        raise NotEverywhere({service.address: failed.get(service) for service in outcomes})
    return {service: each for service, each in outcomes.items() if not isinstance(each, TwinlensError)}
