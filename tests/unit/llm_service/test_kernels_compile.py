"""The Triton kernels become machine code for GPUs that are not here: their interpreter takes more than that does."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from testkit import triton_interpreter
from tests.launch import ROOT

pytest.importorskip("triton")

Taken = tuple[int, int, bool, int, str]
"""Of a kernel, as `tests.kernel_compiler` prints it."""

_SHARED = 99 << 10
"""Bytes of shared memory that a program may take on every GPU since Ampere."""
_STACK = 2 << 10
"""Bytes that a thread may keep out of its registers: more is slow, and the driver sets as much of a GPU's memory aside
for every thread that can run there at once, a quarter of a million on an H100."""

_VERIFY = 192 if triton_interpreter.is_too_old() else 168
"""Triton 3.6 takes a sixth more, so that two programs run side by side in place of three."""
COPYING = ("prefill bf16 128", "vision 64 bf16 72", "vision 128 bf16 72", "vision 128 fp16 64")
COPYING += ("one row, int8", "one row, uint4", "experts, e4m3")
COPYING += tuple(f"{rows}, int8 by int8" for rows in ("one row", "some rows", "many rows", "experts"))
PIXELS = {"resize along lines": 64, "resize along columns": 64, "patches": 64}
"""On each GPU, of a thread."""
REGISTERS = {
    "vision 64 bf16 72": 208,
    "vision 128 bf16 72": 208,
    "vision rotary bf16 72": 64,
    "vision rotary of transformers bf16 72": 64,
}
REGISTERS |= {
    "decode bf16 128": 96,
    "verify bf16 128": _VERIFY,
    "prefill bf16 128": 208,
}  # 5, 3 and 2 programs at once
REGISTERS |= {"prefill bf16 256": 208, "windows bf16 256": 224, "decode bf16 512": 224, "prefill bf16 512": 224}
REGISTERS |= PIXELS
REGISTERS |= {"e4m3 decode": 168, "e4m3 verify": 248, "e4m3 prefill": 208}
REGISTERS |= {"int8 decode": 168, "int8 verify": 248, "int8 prefill": 208}
REGISTERS |= {"latent decode bf16": 128, "latent verify bf16": 208, "latent prefill bf16": 208}
REGISTERS |= {"plain latent decode bf16": 128}
REGISTERS |= {"latent decode with sinks bf16": 128, "latent prefill with sinks bf16": 208}
REGISTERS |= {"token scores bf16": 80, "pool scores bf16": 80}
REGISTERS |= {f"one row, {number}": 168 for number in ("int8", "e4m3", "uint4", "e2m1")}
REGISTERS |= {f"experts, {number}": 168 for number in ("int8", "e4m3", "uint4", "e2m1")}
REGISTERS |= {f"many rows, {number}": 248 for number in ("int8", "e4m3", "uint4", "e2m1")}
REGISTERS |= {
    "round rows": 64,
    "round to e4m3, blocks": 64,
    "round to e4m3, rows": 64,
    "round rows of experts": 64,
    "join sums": 64,
    "one row, int8 by int8": 64,
    "some rows, int8 by int8": 96,
}
REGISTERS |= {"many rows, int8 by int8": 128, "experts, int8 by int8": 208}
"""On Hopper, of a thread: more would have fewer programs run side by side."""


def test_the_first_form_of_each_kernel_compiles_and_fits_a_multiprocessor() -> None:
    """Every form does in `tests/soak/test_every_kernel.py`, which takes minutes; here, on Hopper and in bfloat16, the
    first, without those of layers with states."""
    taken = compile_kernels("--first", "90", "bfloat16")
    assert set(taken) >= {"decode bf16 128", "vision 64 bf16 128", "latent decode bf16", "one row, int8", "draw"}
    assert len(taken) == 30
    look_at_memory(taken)
    assert taken["one row, int8"][2], "weights are read element by element"
    assert taken["one row, int8 by int8"][2], "weights are read element by element"
    look_at_registers({name: most for name, most in REGISTERS.items() if name in taken}, taken)


def compile_kernels(*given: str) -> dict[str, Taken]:
    """In a process of its own: whether kernels are interpreted is decided when they are defined."""
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environ["TRITON_DISABLE_LINE_INFO"] = "1"  # a seventh of the time, and nobody debugs what is made
    command = [sys.executable, "-m", "tests.kernel_compiler", *given]
    done = subprocess.run(command, cwd=ROOT, env=environ, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def look_at_memory(taken: dict[str, Taken]) -> None:
    assert max(shared for shared, *_ in taken.values()) <= _SHARED, taken
    assert max(stack for _, stack, *_ in taken.values()) <= _STACK, taken


def look_at_registers(most: dict[str, int], taken: dict[str, Taken]) -> None:
    for each, registers in most.items():
        assert taken[each][1] == 0, f"{each} spills registers"
        assert taken[each][3] <= registers, f"{each} takes {taken[each][3]} registers"
