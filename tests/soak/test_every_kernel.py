"""Every form of the Triton kernels becomes machine code for Hopper, which is not here. Before and after it, those do
whose products take other instructions there, from memory laid out for these, each under its plainest mask. What has no
such products Triton makes into the same TTGIR for 8.0 and 9.0.
"""

from __future__ import annotations

import pytest

from tests.unit.llm_service.test_kernels_compile import (
    COPYING,
    PIXELS,
    REGISTERS,
    Taken,
    compile_kernels,
    look_at_memory,
    look_at_registers,
)

_REGISTERS = {"delta net system bf16": 168, "delta net invert bf16": 208}
_REGISTERS |= {"KDA pairs bf16": 208, "KDA invert bf16": 208, "KDA fade bf16": 168, "KDA scan bf16": 208}
_REGISTERS |= {"wide latents decode": 168, "wide latents prefill": 168}
"""On Hopper, of a thread, by kernels for layers with states, and over wide latents."""

_PRODUCTS = {80: "mma.sync", 90: "wgmma", 100: "tcgen05"}
"""By what tensor cores multiply large tiles."""
_DECIDED = ("prefill bf16 128", "prefill bf16 256", "int8 prefill", "vision 64 bf16 72", "vision 128 bf16 72")
_DECIDED += ("token scores bf16", "delta net system bf16", "delta net scan bf16", "Mamba-2 scan bf16", "KDA scan bf16")
_DECIDED += ("one row, int8", "one row, uint4", *(f"many rows, {each}" for each in ("int8", "e4m3", "uint4", "e2m1")))
_WHOLE = tuple(f"{rows}, int8 by int8" for rows in ("one row", "some rows", "many rows", "experts"))
"""Of whole numbers, for which Triton takes none of Blackwell's own instructions."""
_FP8 = ("experts, e4m3 by e4m3, blocks", "experts, e4m3 by e4m3, one scale")
"""With 8 bits on both sides, for which Ampere has no instruction."""


@pytest.mark.soak
def test_every_kernel_compiles_and_fits_a_multiprocessor() -> None:
    """On Hopper, in all types."""
    taken = compile_kernels("90", "bfloat16,float16,float32", "bfloat16,float32")
    assert len(taken) == 189
    look_at_memory(taken)
    for each in COPYING:
        assert taken[each][2], f"{each} reads element by element"
    look_at_registers(REGISTERS | _REGISTERS, taken)
    look_at_products(90, taken, _DECIDED + _FP8 + _WHOLE)


@pytest.mark.soak
@pytest.mark.parametrize(("capability", "names"), [(80, _DECIDED), (100, _DECIDED + _FP8)])
def test_kernels_fit_multiprocessors_before_and_after_hopper(capability: int, names: tuple[str, ...]) -> None:
    """In bfloat16, in which models are published; with what makes patches, which each picture goes through."""
    taken = compile_kernels(str(capability), "bfloat16", "bfloat16", "--only", *names, *_WHOLE, *PIXELS)
    look_at_memory(taken)
    look_at_registers(dict.fromkeys(_WHOLE, 208) | PIXELS, taken)
    for each in set(COPYING).intersection(taken):
        assert taken[each][2], f"{each} reads element by element"
    look_at_products(capability, taken, names)
    look_at_products(80, taken, _WHOLE)


def look_at_products(capability: int, taken: dict[str, Taken], names: tuple[str, ...]) -> None:
    for each in names:
        assert taken[each][4] == _PRODUCTS[capability], f"{each} multiplies by {taken[each][4] or 'no tensor core'}"
