"""Kernels that Triton compiles while requests wait: told by its own hook, with what it hands to that."""

from __future__ import annotations

import inspect
import re

import pytest
import triton
from structlog.testing import capture_logs
from triton import knobs
from triton.runtime.jit import JITFunction

from common.gpu.late_compiles import LateCompiles


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> LateCompiles:
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", None)
    late = LateCompiles()
    late.watch()
    return late


def compile_one(name: str) -> None:
    """As Triton ends a compilation."""
    hook = knobs.runtime.jit_post_compile_hook
    assert hook is not None
    hook(key="", repr=f"{name}[num_warps=4]", fn=None, compile={}, is_manual_warmup=False, already_compiled=False)


def test_each_is_counted_and_named(watched: LateCompiles) -> None:
    with capture_logs() as said:
        compile_one("decode_kernel")
        compile_one("prefill_kernel")
    assert watched.count == 2
    assert [line["kernel"] for line in said] == ["decode_kernel[num_warps=4]", "prefill_kernel[num_warps=4]"]


def test_what_is_taken_counts_once(watched: LateCompiles) -> None:
    compile_one("tower_kernel")
    assert (watched.take(), watched.take()) == (1, 0)


def test_triton_calls_a_hook_so() -> None:
    """`_compiled` relies on the name of one argument."""
    assert re.search(r"return hook\(.*?\brepr=repr\b", inspect.getsource(JITFunction._call_hook), re.DOTALL)
    assert triton.__version__ >= "3.6"
