"""transformers, in less time: it writes down each configuration that it reads, though nobody reads what it writes."""

from __future__ import annotations

from typing import Any


def quicken() -> None:
    """Has a configuration be told by its class. All of it, in JSON, is a line of a log that is not kept, and a part of
    errors that are caught at once, as a field of several types is tried as each of them: a tenth of loading a model."""
    from transformers import PreTrainedConfig

    def told(config: Any) -> str:
        return f"<{type(config).__name__}>"

    PreTrainedConfig.__repr__ = told
