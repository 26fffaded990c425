"""What steps ask of a text model, whoever computes it: our `Decoder`, or transformers' layers as an `HfDecoder`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from llm_service.families.chunk_rule import ChunkRule
from llm_service.layers.attention.backend import MakesBackend
from llm_service.layers.mixer import CachedPart
from llm_service.layers.tensor_parallel import TensorGroup


@dataclass(frozen=True, slots=True)
class Deepstack:
    """Rows to add after the first layers, or before those that the decoder names: level i, `values[i]` [m, hidden], to
    positions `index` int64 [m], or, if that is None, to all positions in order."""

    index: Tensor | None
    values: Tensor

    def taking_first(self, hidden: Tensor) -> Deepstack:
        """Makes the rows' values in `hidden` [n, hidden] the first level, before the others, and sets them to zero
        there."""
        assert self.index is not None, "rows have places"
        first = hidden[self.index].unsqueeze(0)
        hidden.index_fill_(0, self.index, 0.0)
        return Deepstack(self.index, torch.cat([first, self.values]))

    def add_to(self, hidden: Tensor, level: int, scale: float = 1.0) -> None:
        """Adds a level times a number, in place."""
        if self.index is None:
            hidden.add_(self.values[level], alpha=scale)
        else:
            hidden.index_add_(0, self.index, self.values[level], alpha=scale)


class Model(Protocol):
    """One rank's part of a text model: embeddings in, hidden states out, and logits on demand. It knows nothing of
    requests."""

    dtype: torch.dtype
    kv_dtype: torch.dtype
    """The type of keys and values."""
    group: TensorGroup

    @property
    def device(self) -> torch.device:
        """The device of its weights."""
        ...

    @property
    def hidden_size(self) -> int:
        """Width of hidden states between layers."""
        ...

    @property
    def entry_size(self) -> int:
        """Width of a token's input."""
        ...

    @property
    def exit_size(self) -> int:
        """Width of a token's output."""
        ...

    @property
    def position_rows(self) -> int:
        """Number of rows of positions: one for each axis; of four, the first is a token's own number."""
        ...

    @property
    def vocabulary(self) -> int | None:
        """Number of a token's logits; None if only a step tells."""
        ...

    @property
    def chunk_rule(self) -> ChunkRule:
        """Where a prompt may be cut, given what its tokens see."""
        ...

    @property
    def forgets_answers(self) -> bool:
        """A token of an answer sees other tokens than it would in a prompt."""
        ...

    @property
    def adds_rows(self) -> bool:
        """Whether rows are added to the token embeddings at their positions."""
        ...

    @property
    def adds_first_level(self) -> bool:
        """Whether the first level of rows is added behind a layer, as the others are, and does not stand among
        embeddings."""
        ...

    @property
    def shares_keys(self) -> bool:
        """Whether layers that share earlier keys and values compute no more than wanted places (`at_places`)."""
        ...

    @property
    def decodes_alone(self) -> bool:
        """Whether graphs have no steps but those of one token a sequence."""
        ...

    @property
    def may_wait(self) -> bool:
        """Whether its code may have the host wait for the device, so that a step is tried before any is captured."""
        ...

    @property
    def keeps_small_cache(self) -> bool:
        """Whether keys and values can be kept in 8 bits, where its layers' kinds allow it."""
        ...

    @property
    def layers(self) -> nn.ModuleList:
        """Layers of ours: a process may leave its cores to others between two of them, and torch may compile them."""
        ...

    def weights(self) -> nn.Module:
        """All that has any."""
        ...

    def mixers(self) -> Sequence[CachedPart]:
        """What keeps something of sequences, in the order of caches and batches."""
        ...

    def attention(self, asked: str, /) -> str | MakesBackend:
        """The back end of attention, by its name or what makes it, where `asked` is configured."""
        ...

    def embed_tokens(self, token_ids: Tensor, /) -> Tensor:
        """int [n] → [n, hidden]."""
        ...

    def join(self, embeddings: Tensor, hidden: Tensor, /) -> Tensor:
        """Embeddings of the next tokens and hidden states, [n, hidden] each → the input of the first layer of a draft
        head. Others have none."""
        ...

    def ids_of_layers(self, token_ids: Tensor, rows: Iterable[tuple[int, int]], /) -> Tensor | None:
        """What layers are told of tokens, int [n], besides embeddings, where rows are at [begin, end) each; None if
        they need nothing."""
        ...

    def __call__(
        self,
        hidden: Tensor,
        positions: Tensor,
        caches: Sequence[Any],
        batches: Sequence[Any],
        deepstack: Deepstack | None,
        places: Tensor | None = None,
        *,
        token_ids: Tensor | None = None,
        at_places: Sequence[Any] | None = None,
    ) -> Tensor:
        """See `Decoder.forward`."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[m, hidden] → float32 [m, vocabulary], on every rank."""
        ...

    def likeliest(self, hidden: Tensor) -> Tensor:
        """[m, hidden] → int64 [m], the tokens with the highest logits, of equal ones the first, on every rank."""
        ...

    def kernels(self) -> set[str]:
        """Names of our kernels for CPUs that this needs, as `common.cpu.jit.find` takes them."""
        ...

    def compile_layers(self) -> None:
        """Has torch compile the parts of `layers` before and after attention, at their next use."""
        ...

    def not_capturable(self) -> str:
        """Why there are no graphs, as far as it is known before a step was tried; empty if there can be."""
        ...
