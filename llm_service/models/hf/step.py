"""What transformers' layers use of ours during a step: attention, index choices and states."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from torch import Tensor, nn

from llm_service.layers.attention.general_backend import AttentionRule
from llm_service.layers.sparse_attention.index import Chosen, IndexQuery


class HfStep(Protocol):
    """What a layer asks for."""

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        """From a layer's attention, queries [n, heads, width], keys and values [n, kv_heads, …] → [n, heads, depth]."""
        ...

    def choose(self, layer: int, asked: IndexQuery) -> tuple[Chosen, ...]:
        """From a layer's number and its index queries to what the tokens of each chunk see."""
        ...

    def carry(self, layer: int, compute: Callable[[Tensor, Any], Tensor], tokens: Tensor) -> Tensor:
        """From a layer's number, a function of [b, n, hidden] and the states of b sequences (`states.Held`), and a
        batch of tokens [1, n, hidden] → [1, n, hidden]."""
        ...


_step: ContextVar[HfStep | None] = ContextVar("step", default=None)


@contextmanager
def computing(step: HfStep) -> Iterator[None]:
    """Within the context, transformers' layers use this step. There is one step at a time."""
    assert _step.get() is None, "a step within a step"
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


def this_step() -> HfStep:
    """That of the block around."""
    step = _step.get()
    assert step is not None, "it is called in a step alone"
    return step
