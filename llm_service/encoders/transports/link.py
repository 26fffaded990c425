"""Every way in which rows can come from an encoder, put together."""

from __future__ import annotations

from collections.abc import Callable

from common.wire import DType
from llm_service.encoders.transports.base import Transport
from llm_service.encoders.transports.cuda_ipc import CudaIpc
from llm_service.encoders.transports.inline import Inline
from llm_service.encoders.transports.shared_memory import SharedMemory
from llm_service.engine.mirrors import Mirrors


def transports_from(
    address: str,
    dtype: DType,
    *,
    shared_memory: bool,
    folder: str,
    mirrors: Mirrors | None,
    on_lost: Callable[[], None],
) -> list[Transport]:
    """Those from the encoder at an address, the shortest way first: through memory that is shared with it, where that
    is wanted, and of its devices where ranks have `mirrors`. `on_lost` is called when its process has ended."""
    inline = Inline(dtype)
    if not shared_memory:
        return [inline]
    memory = SharedMemory(address, folder, dtype, on_lost)
    return [memory, inline] if mirrors is None else [CudaIpc(memory, mirrors), memory, inline]
