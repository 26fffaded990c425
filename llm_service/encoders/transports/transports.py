"""All transports of rows from an encoder."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from common.rows.wire import DType
from llm_service.encoders.transports.base import Transport
from llm_service.encoders.transports.cuda_ipc import CudaIpc
from llm_service.encoders.transports.inline import Inline
from llm_service.encoders.transports.nixl import Nixl
from llm_service.encoders.transports.nixl_reader import NixlReader
from llm_service.encoders.transports.shared_memory import SharedMemory
from llm_service.engine_client.mirrors import Mirrors


def transports_from(
    address: str,
    dtype: DType,
    *,
    shared_memory: bool,
    folder: str,
    mirrors: Mirrors | None,
    nixl: NixlReader | None,
    on_lost: Callable[[], None],
    release: Callable[[str], Awaitable[bool | None]],
) -> list[Transport]:
    """The transports from the encoder at an address, the shortest first: through shared memory, if wanted, and its
    devices' memory if ranks have `mirrors`; through memory read by `nixl`, if there is one. `on_lost` is called when
    its process has ended, and `release` with the name of a lease that is used up: see `Nixl`."""
    ways: list[Transport] = [Inline(dtype)]
    if nixl is not None:
        ways.insert(0, Nixl(address, nixl, release))
    if shared_memory:
        memory = SharedMemory(address, folder, dtype, on_lost)
        ways.insert(0, memory)
        if mirrors is not None:
            ways.insert(0, CudaIpc(memory, mirrors))
    return ways
