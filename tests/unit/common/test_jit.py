"""How parts of kernels are compiled."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from typing import Any

import numba
import pytest
from numba.core import event

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


def _none() -> Any:
    """What a kernel is compiled with that is not read from disk."""
    return type(numba.njit(lambda: None)._cache)()


def test_an_exact_part_keeps_to_what_is_written_whoever_calls_it() -> None:
    vector = numba.float32[::1]
    kernel = compiled(_thirds, parallel=False)
    kernel._cache = _none()
    kernel.compile((vector, vector))
    assert "arcp" in freedoms(_free_third)
    assert not freedoms(_third)


class _Looks(event.Listener):
    """Whether garbage is looked for when a pass begins."""

    def __init__(self) -> None:
        self.told: set[bool] = set()

    def on_start(self, _: Any) -> None:
        self.told.add(gc.isenabled())

    def on_end(self, _: Any) -> None:
        pass


@pytest.fixture
def garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.enable()
    yield
    if not enabled:
        gc.disable()


@pytest.mark.usefixtures("garbage_collection")
def test_nobody_looks_for_garbage_while_a_kernel_is_compiled_and_somebody_does_afterwards() -> None:
    vector = numba.float32[::1]
    kernel = compiled(_thirds, parallel=False)
    kernel._cache = _none()
    with event.install_listener("numba:run_pass", looks := _Looks()):
        kernel.compile((vector, vector))
    assert looks.told == {False}
    assert gc.isenabled()
