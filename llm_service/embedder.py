"""A checkpoint's embeddings: as stated by the files of sentence-transformers beside it, else as usual for models of
this kind without such files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from common.errors import Internal, InvalidInput, Unsupported
from llm_service.request import Pooling

MODULES: Final = "modules.json"
"""The modules that sentence-transformers computes, in order."""

_MODES: Final = {
    "lasttoken": Pooling.LAST,
    "mean": Pooling.MEAN,
    "cls": Pooling.CLS,
    "pooling_mode_lasttoken": Pooling.LAST,
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "pooling_mode_cls_token": Pooling.CLS,
}
"""By their names in a pooling's config.json: one word, or, in older versions, a field for each."""
_SMALLEST = 1e-12
"""A vector that is shorter stays so."""


class _NotServedError(ValueError):
    """The embedding needs something that is not served; the message names it."""


@dataclass(frozen=True, slots=True)
class Embedder:
    """Embeddings with `dimensions` numbers, of length 1 if `normalized`. `why_not` says why there are none, if the
    checkpoint needs something that is not served."""

    dimensions: int
    pooling: Pooling = Pooling.LAST
    normalized: bool = True
    why_not: str = ""

    @classmethod
    def of(cls, checkpoint: Checkpoint, dimensions: int) -> Embedder:
        """The embeddings of a checkpoint whose hidden states have so many numbers. Without files that say otherwise
        they are the last token's, normalized."""
        try:
            modules = _modules(checkpoint)
            poolings = [path for kind, path in modules if kind == "Pooling"]
            pooling = _pooling(checkpoint.json(f"{poolings[0]}/config.json")) if poolings else Pooling.LAST
        except (_NotServedError, CheckpointError) as error:  # text is generated all the same
            return cls(dimensions, why_not=str(error))
        return cls(dimensions, pooling, not modules or any(kind == "Normalize" for kind, _ in modules))

    def check(self, dimensions: int | None) -> Pooling:
        """The pooling for an embedding of so many numbers. Raises Unsupported if there are no embeddings, InvalidInput
        if they have fewer numbers."""
        if self.why_not:
            raise Unsupported(f"embeddings of this model are not served: {self.why_not}", reason="NO_POOLING")
        if dimensions is not None and not 1 <= dimensions <= self.dimensions:
            why = f"dimensions must be between 1 and {self.dimensions}"
            raise InvalidInput(why, reason="OUT_OF_RANGE", field="dimensions")
        return self.pooling

    def vector(self, pooled: bytes, dimensions: int | None = None) -> np.ndarray:
        """The embedding, float32 [dimensions], of pooled hidden states, float32 [hidden]: its leading numbers. Raises
        Internal if it is not finite, for example if hidden states overflowed their type."""
        leading = np.frombuffer(pooled, np.float32)[:dimensions].astype(np.float64)
        if not np.isfinite(leading).all():
            raise Internal("the embedding is not finite", reason="EMBEDDING_NOT_FINITE")
        if self.normalized:
            leading = leading / max(float(np.linalg.norm(leading)), _SMALLEST)
        return leading.astype(np.float32)


def _modules(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    """(kind, folder) of each module behind the model itself; empty if the checkpoint does not say. Raises
    _NotServedError."""
    try:
        stated = checkpoint.text(MODULES)
        if stated is None:
            return []
        found = [(str(each["type"]).rpartition(".")[2], str(each["path"])) for each in json.loads(stated)]
    except (ValueError, TypeError, KeyError) as error:
        raise _NotServedError(f"its {MODULES} cannot be read") from error
    kinds = [kind for kind, _ in found]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise _NotServedError(f"its {MODULES} names {', '.join(kinds) or 'nothing'}")
    return found[1:]


def _pooling(config: dict[str, Any]) -> Pooling:
    """The pooling of a config. Raises _NotServedError if it is not one of ours, or there are several."""
    stated = config.get("pooling_mode")
    wanted = [stated] if stated is not None else [name for name in config if name.startswith("pooling_mode_")]
    wanted = [str(name) for name in wanted if stated is not None or config[name]]
    if len(wanted) != 1 or wanted[0] not in _MODES:
        raise _NotServedError(f"its pooling is {', '.join(wanted) or 'not said'}")
    pooling = _MODES[wanted[0]]
    if pooling.of_all and not config.get("include_prompt", True):
        raise _NotServedError("its pooling excludes the prompt")
    return pooling
