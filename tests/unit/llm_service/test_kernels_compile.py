"""The Triton kernels become machine code for GPUs that are not here: their interpreter takes more than that does."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests import triton_interpreter
from tests.launch import ROOT

pytest.importorskip("triton")

_SHARED = 99 << 10
"""Bytes of shared memory that a program may take on every GPU since Ampere."""
_STACK = 2 << 10
"""Bytes that a thread may keep out of its registers: more is slow, and the driver sets as much of a GPU's memory aside
for every thread that can run there at once, a quarter of a million on an H100."""

_VERIFY = 192 if triton_interpreter.is_too_old() else 168
"""Triton 3.6 takes a sixth more, so that two programs run side by side in place of three."""
_ALL = ("bfloat16", "float16", "float32")
_COPYING = ("prefill bf16 128", "vision 64 bf16 72", "vision 128 bf16 72", "vision 128 fp16 64")
_COPYING += ("one row, int8", "one row, uint4", "experts, e4m3")
_REGISTERS = {
    "vision 64 bf16 72": 208,
    "vision 128 bf16 72": 208,
    "vision rotary bf16 72": 64,
    "vision rotary of the library bf16 72": 64,
}
_REGISTERS |= {
    "decode bf16 128": 96,
    "verify bf16 128": _VERIFY,
    "prefill bf16 128": 208,
}  # 5, 3 and 2 programs at once
_REGISTERS |= {"prefill bf16 256": 208, "windows bf16 256": 224, "decode bf16 512": 224, "prefill bf16 512": 224}
_REGISTERS |= {"int8 decode": 168, "int8 verify": 248, "int8 prefill": 208}
_REGISTERS |= {"latent decode bf16": 128, "latent verify bf16": 208, "latent prefill bf16": 208}
_REGISTERS |= {"plain latent decode bf16": 128}
_REGISTERS |= {"latent decode with sinks bf16": 128, "latent prefill with sinks bf16": 208}
_REGISTERS |= {"token scores bf16": 80, "pool scores bf16": 80}
_STATES = {"delta net system bf16": 168, "delta net invert bf16": 208}
_STATES |= {"KDA pairs bf16": 208, "KDA invert bf16": 208, "KDA fade bf16": 168, "KDA scan bf16": 208}
_WIDE_LATENTS = {"wide latents decode": 168, "wide latents prefill": 168}
_REGISTERS |= {f"one row, {number}": 168 for number in ("int8", "e4m3", "uint4", "e2m1")}
_REGISTERS |= {f"experts, {number}": 168 for number in ("int8", "e4m3", "uint4", "e2m1")}
_REGISTERS |= {f"many rows, {number}": 248 for number in ("int8", "e4m3", "uint4", "e2m1")}
"""On Hopper, of a thread: more would have fewer programs run side by side."""


@pytest.mark.parametrize(
    ("capability", "types", "states"),
    [
        (90, ("bfloat16",), ()),
        pytest.param(90, _ALL, ("bfloat16", "float32"), marks=pytest.mark.soak),
        pytest.param(80, _ALL, ("bfloat16", "float32"), marks=pytest.mark.soak),
        pytest.param(100, _ALL, (), marks=pytest.mark.soak),
    ],
)
def test_every_kernel_compiles_and_fits_a_multiprocessor(
    capability: int, types: tuple[str, ...], states: tuple[str, ...]
) -> None:
    """In a process of its own: whether kernels are interpreted is decided when they are defined. Those of layers with
    states take as long as all others together."""
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernel_compiler", str(capability)]
    command += [",".join(names) for names in (types, states) if names]
    done = subprocess.run(command, cwd=ROOT, env=environ, check=True, stdout=subprocess.PIPE, text=True)
    taken = json.loads(done.stdout)
    assert len(taken) == (124 if capability == 80 else 126) - (0 if types == _ALL else 58) + 22 * len(states)
    assert max(shared for shared, *_ in taken.values()) <= _SHARED, taken
    assert max(stack for _, stack, *_ in taken.values()) <= _STACK, taken
    for each in _COPYING:
        assert (types != _ALL and "fp16" in each) or taken[each][2], f"{each} reads element by element"
    if capability == 90:
        more = (_WIDE_LATENTS if types == _ALL else {}) | (_STATES if states else {})
        for each, registers in (_REGISTERS | more).items():
            assert taken[each][1] == 0, f"{each} spills registers"
            assert taken[each][3] <= registers, f"{each} takes {taken[each][3]} registers"
