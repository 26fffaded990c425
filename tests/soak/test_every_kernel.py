"""Every form of the Triton kernels becomes machine code for GPUs that are not here."""

from __future__ import annotations

import pytest

from tests.unit.llm_service.test_kernels_compile import (
    COPYING,
    REGISTERS,
    compile_kernels,
    look_at_memory,
    look_at_registers,
)

_ALL = ("bfloat16", "float16", "float32"), ("bfloat16", "float32")
"""Of kernels, and of those of layers with states, which take as long as all others together."""
_REGISTERS = {"delta net system bf16": 168, "delta net invert bf16": 208}
_REGISTERS |= {"KDA pairs bf16": 208, "KDA invert bf16": 208, "KDA fade bf16": 168, "KDA scan bf16": 208}
_REGISTERS |= {"wide latents decode": 168, "wide latents prefill": 168}
"""On Hopper, of a thread, by kernels for layers with states, and over wide latents."""


@pytest.mark.soak
@pytest.mark.parametrize(
    ("capability", "types", "count"),
    [(90, _ALL, 172), (80, (("bfloat16",), ("bfloat16",)), 89), (100, (("bfloat16",),), 69)],
)
def test_every_kernel_compiles_and_fits_a_multiprocessor(
    capability: int, types: tuple[tuple[str, ...], ...], count: int
) -> None:
    """In every form on Hopper; on those before and after it in bfloat16, in which models are published."""
    taken = compile_kernels(str(capability), *map(",".join, types))
    assert len(taken) == count
    look_at_memory(taken)
    for each in (each for each in COPYING if capability == 90 or each in taken):
        assert taken[each][2], f"{each} reads element by element"
    if capability == 90:
        look_at_registers(REGISTERS | _REGISTERS, taken)
