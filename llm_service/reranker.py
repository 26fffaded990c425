"""Whether a checkpoint is a reranker, which scores a document for a query by the logits of two tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from common.errors import InvalidInput
from common.telemetry import log
from llm_service.embedder import MODULES
from llm_service.prompt.builder import PromptBuilder
from llm_service.request import ChatPrompt, Message

_log = log.get("reranker")

_NAME: Final = "qwen3-vl-reranker"
"""In the name of checkpoints that were published without files of sentence-transformers."""
_TYPES: Final = ("qwen3_vl", "qwen3_vl_moe")
_TAUGHT: Final = (
    "<|im_start|>system\nJudge.<|im_end|>\n<|im_start|>user\n<Query>:q\n<Document>:d<|im_end|>\n<|im_start|>assistant\n"
)
_CONVERSATION: Final = ChatPrompt((Message("system", ("Judge.",)), Message("user", ("<Query>:q", "\n<Document>:d"))))
"""A conversation, and how it is laid out for the models that are known to be taught so."""


@dataclass(frozen=True, slots=True)
class Reranker:
    """The tokens whose logits say that a document is relevant, or is not."""

    true_token: int
    false_token: int

    @classmethod
    def of(cls, checkpoint: Checkpoint, prompts: PromptBuilder) -> Reranker | None:
        """The reranker of a checkpoint; None if it states none, or is not known to be prompted like rerankers."""
        score = _score(checkpoint)
        if score is None:
            return None
        if checkpoint.config.get("model_type") not in _TYPES:
            why = "it is not known how to prompt this kind"
        elif not _is_taught(prompts):
            why = "its chat template lays out conversations in another way"
        elif (found := _tokens(score, prompts)) is None:
            why = "its two tokens are not known"
        else:
            return cls(*found)
        _log.warning("a reranker is not served as a reranker", cause=why)
        return None


def _is_taught(prompts: PromptBuilder) -> bool:
    """Whether the chat template lays out conversations as those models do."""
    try:
        return "".join(text for text, _ in prompts.template.render(_CONVERSATION)) == _TAUGHT
    except InvalidInput:
        return False


def _score(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """The checkpoint's settings of its score, which may be empty; None if it is not a reranker."""
    stated = checkpoint.text(MODULES)
    if stated is None:
        return {} if _NAME in checkpoint.name.lower() else None
    try:
        last = json.loads(stated)[-1]
        if str(last["type"]).rpartition(".")[2] != "LogitScore":
            return None
        return checkpoint.json(f"{last['path']}/config.json")  # it may be missing: some have a wrong path
    except (ValueError, TypeError, LookupError, CheckpointError):
        return None


def _tokens(score: dict[str, Any], prompts: PromptBuilder) -> tuple[int, int] | None:
    """The tokens that are stated, else `yes` and `no`."""
    yes, no = prompts.encode("yes"), prompts.encode("no")
    usual = (yes[0], no[0]) if len(yes) == len(no) == 1 else (None, None)
    found = score.get("true_token_id", usual[0]), score.get("false_token_id", usual[1])
    match found:
        case (int(true), int(false)) if min(true, false) >= 0 and max(true, false) < prompts.vocab_size:
            return true, false
        case _:
            return None
