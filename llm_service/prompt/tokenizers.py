"""A checkpoint's tokenizer in two forms: without special tokens, for callers' texts, and with the marks of answers
shown."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer

from common.checkpoints.checkpoint import CheckpointError
from llm_service.families.transcription import ASR_TEXT
from llm_service.prompt.output_marks import SHOWN

_SHOWN = SHOWN | {ASR_TEXT}
_BEFORE = "\n"
"""A text that never merges with the following word into one token."""


class PlainTokenizer:
    """A tokenizer without special tokens, for stretches of a prompt that was cut at these. Some tokenizers put a mark
    before the first word of a text; a stretch behind a special token is not the first."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._first = self._later = Tokenizer.from_str(json.dumps(settings))
        before = settings.get("pre_tokenizer") or {}
        if before.get("type") == "Metaspace" and before.get("prepend_scheme") == "first":
            later = {**settings, "pre_tokenizer": {**before, "prepend_scheme": "never"}}
            self._later = Tokenizer.from_str(json.dumps(later))

    def ids(self, text: str, *, first: bool) -> list[int]:
        """The ids of a stretch; `first` if the prompt begins with it."""
        tokenizer = self._first if first else self._later
        # A batch of one: `encode` would let no other thread run, the event loop's included, for seconds a megabyte.
        ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def ids_behind(self, text: str) -> list[int]:
        """The ids of a text behind another one, without the mark that some tokenizers put before each text."""
        before, both = self.ids(_BEFORE, first=False), self.ids(_BEFORE + text, first=False)
        return both[len(before) :] if both[: len(before)] == before else self.ids(text, first=False)


def showing_marks(settings: dict[str, Any]) -> Tokenizer:
    """A tokenizer that keeps in decoded texts the marks that callers parse, even if they are special tokens, which are
    otherwise skipped. Raises CheckpointError for an unknown kind of tokenizer."""
    added = [
        {**each, "special": False} if each["content"] in _SHOWN else each for each in settings.get("added_tokens", [])
    ]
    try:
        return Tokenizer.from_str(json.dumps({**settings, "added_tokens": added}))
    except Exception as error:  # tokenizers raises nothing narrower
        raise CheckpointError(f"tokenizer.json has an unknown form: {str(error).splitlines()[0]}") from error
