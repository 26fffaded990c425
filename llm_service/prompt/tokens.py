"""Special tokens and defaults that a checkpoint's JSON files name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from common.media.item import Modality
from llm_service.families.family import Family
from llm_service.families.registry import family_of


@dataclass(frozen=True, slots=True)
class MediaTokens:
    """The ids that mark media in a prompt: `placeholders` maps them to modalities, and `marks` has the ids of further
    tokens that the family puts there, by their names in the checkpoint."""

    placeholders: dict[int, Modality]
    marks: dict[str, int]

    @classmethod
    def of(
        cls, config: dict[str, Any], family: Family | None = None, named: Mapping[str, int] | None = None
    ) -> MediaTokens:
        """Reads them from config.json, for its own family unless one is given; missing ones are taken from those
        `named` by the tokenizer. Raises CheckpointError if one is missing, or the family is not served."""
        modalities = (family or family_of(config)).modalities
        ids = {**(named or {}), **config}
        try:
            placeholders = {
                layout.token if isinstance(layout.token, int) else int(ids[layout.token]): modality
                for modality, layout in modalities.items()
            }
            marks = {name: int(ids[name]) for layout in modalities.values() for name in layout.marks}
            return cls(placeholders, marks)
        except KeyError as error:
            raise CheckpointError(f"config.json has no {error.args[0]}") from error


def named_tokens(checkpoint: Checkpoint, added: Mapping[str, int]) -> dict[str, int]:
    """The ids of `added` tokens that tokenizer_config.json names, by these names."""
    settings = checkpoint.json("tokenizer_config.json")
    apart = [settings.get(name) for name in ("extra_special_tokens", "model_specific_special_tokens")]
    found: dict[str, int] = {}
    for names in (settings, *apart):
        for name, token in names.items() if isinstance(names, dict) else ():
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str) and text in added:
                found[name] = added[text]
    return found


def end_tokens(checkpoint: Checkpoint, vocab_size: int) -> frozenset[int]:
    """The tokens that end an answer: those of generation_config.json, else of config.json. Ids that the model does not
    have, such as -1 for none, are left out."""
    config = checkpoint.config
    stated = [checkpoint.json("generation_config.json"), config.get("text_config") or {}, config]
    found: int | list[int] = next(
        (given["eos_token_id"] for given in stated if given.get("eos_token_id") is not None), []
    )
    return frozenset(token for token in (found if isinstance(found, list) else [found]) if 0 <= token < vocab_size)


def check_same_tokens(checkpoint: Checkpoint, draft: Checkpoint) -> None:
    """Raises CheckpointError unless a draft model uses the same ids for the same tokens. Either may lack special tokens
    of the other."""
    words, marks = _vocabulary(checkpoint)
    own_words, own_marks = _vocabulary(draft)
    if own_words != words or any(marks[text] != own_marks[text] for text in marks.keys() & own_marks.keys()):
        raise CheckpointError(f"--draft-model: {draft.name} has another tokenizer than {checkpoint.name}")


def _vocabulary(checkpoint: Checkpoint) -> tuple[Any, dict[str, int]]:
    """The ordinary tokens of tokenizer.json, and the ids of added ones."""
    settings = checkpoint.tokenizer_settings()
    added = {each["content"]: int(each["id"]) for each in settings.get("added_tokens", [])}
    return settings.get("model", {}).get("vocab"), added
