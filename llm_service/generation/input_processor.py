"""From a request's prompt to its layout. Work that may take long is done in a thread, and holds up no other request."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from common.aio import tasks
from common.errors import InvalidInput
from common.media.item import Header
from llm_service.engine.prompt_identities import block_identities, keyed_runs
from llm_service.engine_client.client import EngineClient
from llm_service.prompt.builder import PromptBuilder
from llm_service.prompt_length import check_length
from llm_service.request import (
    ChatPrompt,
    Piece,
    PiecesPrompt,
    Prompt,
    PromptLayout,
    Request,
    TextPrompt,
    TokenPrompt,
)

_SHORT, _FEW_MESSAGES, _FEW_ROWS = 2048, 16, 4096
"""A prompt of at most so many characters or token ids, messages and media rows is laid out on the event loop, in less
than a millisecond."""


class InputProcessor:
    """Lays prompts out for an engine."""

    def __init__(self, prompts: PromptBuilder, engine: EngineClient) -> None:
        self._prompts = prompts
        self._engine = engine

    async def pieces(self, request: Request) -> Sequence[Piece]:
        """The prompt in pieces, with a slot for each item. Raises as `PromptBuilder.pieces`."""
        in_pieces = partial(self._prompts.pieces, closed=request.pooling is not None)
        modalities = [item.modality for item in request.media]
        return await tasks.compute(in_pieces, request.prompt, modalities, at_once=_is_short(request.prompt))

    async def layout(
        self, request: Request, pieces: Sequence[Piece], headers: Sequence[Header]
    ) -> tuple[PromptLayout, Sequence[Piece]]:
        """The prompt with the rows of its items, truncated if it asks for that, and the pieces that another service
        would lay out like this; none if no pieces can express it. Raises InvalidInput if it is empty or too long."""
        short = _is_short(request.prompt)
        few = sum(header.tokens for header in headers) <= _FEW_ROWS
        layout = await tasks.compute(self._prompts.layout, pieces, headers, at_once=short and few)
        if request.truncation is not None and len(layout.ids) > request.truncation.tokens:
            layout = await tasks.compute(self._prompts.truncated, layout, request.truncation, at_once=short)
            # As if the caller had truncated it; beside media, pieces cannot express the rest.
            pieces = [] if layout.spans else [layout.ids]
        self.check_length(request, layout)
        return layout, pieces

    def check_length(self, request: Request, layout: PromptLayout) -> None:
        """Raises InvalidInput if a prompt is empty, or does not fit the engine that serves now."""
        if not layout.ids:
            raise InvalidInput("the prompt has no tokens", reason="EMPTY_PROMPT", field="input")
        if (ready := self._engine.ready) is not None:
            check_length(len(layout.ids), ready.max_context, "input", answered=request.pooling is None)

    async def identified(self, request: Request, layout: PromptLayout) -> PromptLayout:
        """The layout with the identities of its full blocks, if an engine may find some of them."""
        if (size := self._engine.reusable_block_size) is None:
            return layout
        short = len(layout.ids) <= _SHORT
        return replace(layout, identities=await tasks.compute(_identities, request, layout, size, at_once=short))


def _identities(request: Request, layout: PromptLayout, block_size: int) -> list[bytes]:
    runs = keyed_runs((span.header.rows_key, span.runs) for span in layout.spans)
    adapter_digest = request.adapter.digest if request.adapter else b""
    return block_identities(array("i", layout.ids), layout.positions, runs, request.salt, adapter_digest, block_size)


def _is_short(prompt: Prompt) -> bool:
    """Whether laying a prompt out is faster than handing it to a thread."""
    match prompt:
        case TextPrompt(text):
            return len(text) <= _SHORT
        case TokenPrompt(ids):
            return len(ids) <= _SHORT
        case PiecesPrompt():
            return False
        case ChatPrompt(messages, tools):
            few = len(messages) <= _FEW_MESSAGES and not any(message.tool_calls for message in messages)
            if tools or prompt.variables or not few:
                return False
            parts = [part for message in messages for part in (*message.parts, message.reasoning)]
            return sum(len(part) for part in parts if isinstance(part, str)) <= _SHORT
