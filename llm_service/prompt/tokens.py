"""Special tokens and defaults that a checkpoint's JSON files name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from common.checkpoint import Checkpoint, CheckpointError


@dataclass(frozen=True, slots=True)
class MediaTokens:
    """The ids that mark media in a prompt."""

    image: int
    video: int
    vision_start: int
    vision_end: int

    @classmethod
    def of(cls, config: dict[str, Any]) -> MediaTokens:
        """Reads them from config.json; raises CheckpointError where one is missing."""
        try:
            return cls(*(int(config[f"{name}_token_id"]) for name in ("image", "video", "vision_start", "vision_end")))
        except KeyError as error:
            raise CheckpointError(f"config.json has no {error.args[0]}") from error


def end_tokens(checkpoint: Checkpoint) -> frozenset[int]:
    """The tokens that end an answer: generation_config.json's, else config.json's; there may be one or several."""
    config = checkpoint.config
    stated = [checkpoint.json("generation_config.json"), config.get("text_config") or {}, config]
    found: int | list[int] = next(
        (given["eos_token_id"] for given in stated if given.get("eos_token_id") is not None), []
    )
    return frozenset(found if isinstance(found, list) else [found])
