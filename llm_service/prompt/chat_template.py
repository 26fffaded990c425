"""The checkpoint's chat template, kept apart from what users write.

A template sees a marker in place of each text; the texts come in only after it has run. So nothing that a user writes
can look like a part of the template, and a template that inspects its input cannot be steered by it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.checkpoint import Checkpoint, CheckpointError
from common.errors import InvalidInput
from llm_service.request import MediaItem, Message

ROLES = ("system", "user", "assistant")

# What a template raises over a conversation of a shape that it does not know: its own errors, and Python's.
_TEMPLATE_FAILURES = (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError)


class ChatTemplate:
    """A compiled template; `render` gives (piece, is the caller's) pairs."""

    def __init__(self, source: str, variables: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse
        environment.filters["tojson"] = _to_json
        self._template = environment.from_string(source)
        self._variables = variables

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> ChatTemplate:
        """Finds the template where checkpoints keep it; raises CheckpointError where there is none."""
        settings = checkpoint.json("tokenizer_config.json")
        source = (
            checkpoint.text("chat_template.jinja")
            or checkpoint.json("chat_template.json").get("chat_template")
            or settings.get("chat_template")
        )
        if not isinstance(source, str):
            raise CheckpointError("the checkpoint has no chat template")
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        return cls(source, {name: settings[name] for name in names if isinstance(settings.get(name), str)})

    def render(self, messages: Sequence[Message]) -> list[tuple[str, bool]]:
        """The laid-out conversation as (text, whether the caller wrote it); media stand as the template has them.

        Raises InvalidInput for a role that is not known, or a conversation that the template refuses.
        """
        mark = f"\ue000{secrets.token_hex(8)}:"
        texts: list[str] = []
        laid = [self._message(index, message, texts, mark) for index, message in enumerate(messages)]
        try:
            rendered = self._template.render(messages=laid, add_generation_prompt=True, **self._variables)
        except _TEMPLATE_FAILURES as error:
            raise InvalidInput(
                "the model's chat template refuses this conversation", reason="CHAT_REFUSED", field="chat.messages"
            ) from error
        parts = re.split(f"{mark}(\\d+)\ue001", rendered)
        return [(texts[int(part)], True) if index % 2 else (part, False) for index, part in enumerate(parts) if part]

    def _message(self, index: int, message: Message, texts: list[str], mark: str) -> dict[str, Any]:
        if message.role not in ROLES:
            raise InvalidInput(
                f"a message's role must be one of {', '.join(ROLES)}",
                reason="UNKNOWN_ROLE",
                field=f"chat.messages[{index}].role",
            )
        content: list[dict[str, str]] = []
        for part in message.parts:
            if isinstance(part, MediaItem):
                content.append({"type": part.modality, part.modality: "here"})
            else:
                content.append({"type": "text", "text": f"{mark}{len(texts)}\ue001"})
                texts.append(part)
        if all(part["type"] == "text" for part in content):
            return {"role": message.role, "content": "".join(part["text"] for part in content)}
        return {"role": message.role, "content": content}


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, **options: Any) -> str:
    import json

    return json.dumps(value, ensure_ascii=False, **options)
