"""How parts of kernels are compiled."""

from __future__ import annotations

import re
from typing import Any

import numba

from common.cpu.jit import compiled, exact, inner


@exact
def _third(x: Any) -> Any:
    return x / numba.float32(3.0) + numba.float32(1.0)


@inner
def _free_third(x: Any) -> Any:
    return x / numba.float32(3.0) + numba.float32(1.0)


def _thirds(out: Any, x: Any) -> None:
    out[0] = _third(x[0])
    out[1] = _free_third(x[1])


def freedoms(part: Any) -> set[str]:
    """What the compiler may do with quotients and sums of a part that was compiled."""
    (signature,) = part.signatures
    found = re.findall(r"= f(?:div|add)((?: [a-z]+)*) float", part.inspect_llvm(signature))
    assert found, "the part was compiled away"
    return {word for words in found for word in words.split()}


def test_an_exact_part_keeps_to_what_is_written_whoever_calls_it() -> None:
    vector = numba.float32[::1]
    kernel = compiled(_thirds, parallel=False)
    kernel._cache = type(numba.njit(lambda: None)._cache)()  # compiled here, not read from disk
    kernel.compile((vector, vector))
    assert "arcp" in freedoms(_free_third)
    assert not freedoms(_third)
