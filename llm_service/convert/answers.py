"""Converts events of a generation into the contract's messages."""

from __future__ import annotations

from collections.abc import Sequence

from common.media.convert import write_stages
from llm_service.generation.events import Begun, Delta, Embedded, Ended, PromptLogprobsDelta
from llm_service.plan import TokenLogprobs
from llm_service.prompt.chat_template import ChatTemplate
from llm_service.prompt.detokenizer import TokenTexts
from llm_service.request import Request
from twinlens.v1 import llm_pb2

_REASONS = {
    "stop": llm_pb2.FINISH_REASON_STOP,
    "length": llm_pb2.FINISH_REASON_LENGTH,
    "structure": llm_pb2.FINISH_REASON_STRUCTURE,
}


def started(request: Request, event: Begun, template: ChatTemplate) -> llm_pb2.GenerateResponse:
    """The prompt is laid out, and computing has begun."""
    spans = [
        llm_pb2.MediaSpan(
            item=span.item,
            start=span.begin,
            length=span.end - span.begin,
            rows=span.header.tokens,
            key=span.header.key,
            cached=span.header.cached,
        )
        for span in event.layout.spans
    ]
    told = llm_pb2.GenerateStarted(
        prompt_tokens=len(event.layout.ids),
        cached_tokens=event.cached,
        spans=spans,
        request_id=request.id,
        thinking=event.thinking,
        resumed_choices=len(request.resume),
        reasoning_begin=template.reasoning_marks[0],
        reasoning_end=template.reasoning_marks[1],
        reasoning_unread=not template.reads_reasoning,
        prompt_token_ids=event.layout.ids if request.return_prompt_token_ids else (),
    )
    return llm_pb2.GenerateResponse(started=told)


def delta(event: Delta, texts: TokenTexts) -> llm_pb2.GenerateResponse:
    """More of a choice."""
    logprobs = _logprobs(event.tokens, event.logprobs, texts)
    turns = [
        llm_pb2.TranscriptTurn(start_seconds=turn.start, end_seconds=turn.end, speaker=turn.speaker, text=turn.text)
        for turn in event.turns
    ]
    told = llm_pb2.GenerateDelta(
        index=event.choice, text=event.text, token_ids=event.tokens, logprobs=logprobs, turns=turns
    )
    return llm_pb2.GenerateResponse(delta=told)


def prompt_logprobs(event: PromptLogprobsDelta, texts: TokenTexts) -> llm_pb2.GenerateResponse:
    """How likely some of the prompt's tokens were."""
    logprobs = _logprobs(event.tokens, event.logprobs, texts)
    prompt = llm_pb2.PromptLogprobs(first=event.first, token_ids=event.tokens, logprobs=logprobs)
    return llm_pb2.GenerateResponse(delta=llm_pb2.GenerateDelta(prompt=prompt))


def finished(event: Ended, begun: Begun) -> llm_pb2.GenerateResponse:
    """A choice is complete."""
    usage = llm_pb2.Usage(
        prompt_tokens=len(begun.layout.ids),
        cached_tokens=begun.cached,
        completion_tokens=event.completion_tokens,
        reasoning_tokens=event.reasoning_tokens,
        draft_tokens=event.draft_tokens,
        accepted_draft_tokens=event.accepted_draft_tokens,
    )
    told = llm_pb2.GenerateFinished(
        index=event.choice,
        reason=_REASONS[event.reason],
        usage=usage,
        stop_text=event.stop_text,
        stop_token_id=event.stop_token,
        timings=write_stages(event.stages),
    )
    return llm_pb2.GenerateResponse(finished=told)


def tokenized(ids: Sequence[int], texts: TokenTexts | None) -> llm_pb2.TokenizeResponse:
    """Token ids, and their `texts` if given. Takes half a second for a megabyte of text."""
    return llm_pb2.TokenizeResponse(ids=ids, texts=map(texts.text_of, ids) if texts else ())


def embedded(request: Request, begun: Begun, event: Embedded, vector: Sequence[float]) -> llm_pb2.EmbedResponse:
    """A prompt's embedding: this vector."""
    return llm_pb2.EmbedResponse(
        values=vector,
        usage=llm_pb2.Usage(prompt_tokens=len(begun.layout.ids), cached_tokens=begun.cached),
        timings=write_stages(event.stages),
        request_id=request.id,
    )


def _logprobs(tokens: Sequence[int], given: Sequence[TokenLogprobs], texts: TokenTexts) -> list[llm_pb2.TokenLogprobs]:
    """One entry for each token, or none if no logprobs are given."""
    return [
        llm_pb2.TokenLogprobs(
            logprob=each.chosen,
            text=texts.text_of(token),
            text_bytes=texts.bytes_of(token),
            top=[
                llm_pb2.TopLogprob(
                    token_id=likely, logprob=value, text=texts.text_of(likely), text_bytes=texts.bytes_of(likely)
                )
                for likely, value in each.top
            ],
        )
        for token, each in zip(tokens, given, strict=False)
    ]
