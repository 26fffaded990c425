"""What is asked of every LLM service: what came of it at each, and what a caller gets who asked for all of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

import grpc

from common.errors import TwinlensError, Unavailable
from gateway.errors import NotEverywhere
from gateway.services import LlmService, error_of

T = TypeVar("T")


async def asked(service: LlmService, call: Callable[[LlmService], Awaitable[T]]) -> T | TwinlensError:
    """What a call of one service gave, or what it failed with."""
    try:
        return await call(service)
    except grpc.aio.AioRpcError as error:
        return error_of(error)
    except grpc.aio.UsageError:  # it is on no list any more, and its channel has been closed
        return Unavailable("the LLM service cannot be reached", reason="NO_LLM_SERVICE")


def done_everywhere(outcomes: Mapping[LlmService, T | TwinlensError]) -> dict[LlmService, T]:
    """What each service gave. Raises what all of them refused it for, or NotEverywhere where only some did, or they
    refused it for different reasons."""
    failed = {service: each for service, each in outcomes.items() if isinstance(each, TwinlensError)}
    if len(failed) == len(outcomes) and len({error.reason for error in failed.values()}) == 1:
        raise next(iter(failed.values()))
    if failed:
        raise NotEverywhere({service.address: failed.get(service) for service in outcomes})
    return {service: each for service, each in outcomes.items() if not isinstance(each, TwinlensError)}
