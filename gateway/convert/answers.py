"""Converts an LLM service's answers into OpenAI's format."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from twinlens.v1 import llm_pb2

_FINISH = {
    llm_pb2.FINISH_REASON_STOP: "stop",
    llm_pb2.FINISH_REASON_LENGTH: "length",
    llm_pb2.FINISH_REASON_STRUCTURE: "stop",
}


def media_uuids(started: llm_pb2.GenerateStarted) -> list[str]:
    """The content keys of a request's media, which later requests can use instead of the media."""
    return [span.key.hex() for span in sorted(started.spans, key=lambda span: span.item)]


def named_by_ids(given: Iterable[llm_pb2.TokenLogprobs], ids: Iterable[int]) -> list[llm_pb2.TokenLogprobs]:
    """The same, with token numbers as texts, as for vLLM's `return_tokens_as_token_ids`: tokens that are parts of
    characters look alike otherwise."""
    return [
        llm_pb2.TokenLogprobs(
            logprob=each.logprob,
            text=_id_as_text(token),
            text_bytes=each.text_bytes,
            top=[
                llm_pb2.TopLogprob(
                    token_id=top.token_id,
                    logprob=top.logprob,
                    text=_id_as_text(top.token_id),
                    text_bytes=top.text_bytes,
                )
                for top in each.top
            ],
        )
        for each, token in zip(given, ids, strict=True)
    ]


def _id_as_text(token: int) -> str:
    return f"token_id:{token}"


def chat_logprobs(given: Iterable[llm_pb2.TokenLogprobs]) -> list[dict[str, Any]]:
    """How likely tokens were, as chat completions say it."""
    return [
        {
            "token": each.text,
            "logprob": each.logprob,
            "bytes": list(each.text_bytes),
            "top_logprobs": [
                {"token": top.text, "logprob": top.logprob, "bytes": list(top.text_bytes)} for top in each.top
            ],
        }
        for each in given
    ]


def finish(finished: llm_pb2.GenerateFinished) -> dict[str, Any]:
    """Why a choice ended; `stop_reason` is the stop text that was met, or the number of the stop token, as vLLM says
    it."""
    token = finished.stop_token_id if finished.HasField("stop_token_id") else None
    return {"finish_reason": _FINISH.get(finished.reason, "stop"), "stop_reason": finished.stop_text or token}


def usage(prompts: Iterable[Sequence[llm_pb2.GenerateFinished]]) -> dict[str, Any]:
    """Usage of all choices, grouped by prompt: each prompt counts once."""
    counted = [[each.usage for each in choices] for choices in prompts]
    prompt = sum(max(each.prompt_tokens for each in choices) for choices in counted if choices)
    cached = sum(max(each.cached_tokens for each in choices) for choices in counted if choices)
    answered = [each for choices in counted for each in choices]
    reasoning = {"reasoning_tokens": sum(each.reasoning_tokens for each in answered)}
    completion = sum(each.completion_tokens for each in answered)
    return {**usage_of(prompt, cached, completion), "completion_tokens_details": reasoning}


def usage_of(prompt: int, cached: int, completion: int) -> dict[str, Any]:
    """Usage: tokens of prompts, those found in the prefix cache, and tokens of answers."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
