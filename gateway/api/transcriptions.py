"""`POST /v1/audio/transcriptions`: its body and responses."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from gateway.api.fields import Int, RequestFields
from gateway.convert import answers, prompt_inputs, sampling_params
from gateway.generation import Generations
from gateway.multipart import read_form
from gateway.request_context import context_of
from gateway.stream import DONE, EventStream, Last, event, json_answer
from gateway.subtitles import Cue, as_srt, as_vtt
from twinlens.v1 import llm_pb2, media_pb2

Events = AsyncGenerator[llm_pb2.GenerateResponse]
Objects = list[dict[str, Any]]
_GREEDY = 0.0
"""The temperature of a request that names none, as OpenAI has it."""


_SUBTITLES: Final = {"srt": (as_srt, "application/x-subrip"), "vtt": (as_vtt, "text/vtt")}


class TranscriptionRequest(RequestFields):
    """The fields of a form besides its file."""

    without_effect: ClassVar[dict[str, tuple[Any, ...]]] = {
        "chunking_strategy": ("auto",),
        "stream_include_usage": ("true",),
    }

    language: str | None = None
    prompt: str | None = None
    response_format: Literal["json", "text", "srt", "vtt", "diarized_json"] = "json"
    include: Literal["logprobs"] | None = Field(None, alias="include[]")
    max_completion_tokens: Int | None = None

    @model_validator(mode="after")
    def _has_a_place_for_what_is_included(self) -> TranscriptionRequest:
        if self.stream and self.response_format in _SUBTITLES:
            raise ValueError("srt and vtt cannot be streamed")
        if self.with_logprobs and self.response_format in ("text", *_SUBTITLES) and not self.stream:
            raise ValueError("plain text cannot carry logprobs")
        return self

    @property
    def with_turns(self) -> bool:
        """Whether it should tell who speaks when."""
        return self.response_format in ("diarized_json", *_SUBTITLES)

    @property
    def with_logprobs(self) -> bool:
        """It is wanted how likely tokens were."""
        return self.include is not None


@dataclass(slots=True)
class _Transcript:
    """The transcript so far."""

    words: list[str] = field(default_factory=list)
    turns: Objects = field(default_factory=list)
    logprobs: Objects = field(default_factory=list)
    sound_tokens: int = 0
    finished: llm_pb2.GenerateFinished = field(default_factory=llm_pb2.GenerateFinished)

    async def read(self, events: Events) -> AsyncGenerator[tuple[str, Objects, Objects]]:
        """Takes it in: new words, how likely their tokens were, and the turns that are complete with them."""
        async with aclosing(events) as each:
            async for said in each:
                match said.WhichOneof("event"):
                    case "started":
                        self.sound_tokens = sum(span.rows for span in said.started.spans)
                    case "delta":
                        yield (said.delta.text, *self._add(said.delta))
                    case "finished":
                        self.finished = said.finished
                    case _:  # an event of a newer service
                        continue

    def _add(self, delta: llm_pb2.GenerateDelta) -> tuple[Objects, Objects]:
        logprobs = [
            {"token": each.text, "logprob": each.logprob, "bytes": list(each.text_bytes)} for each in delta.logprobs
        ]
        turns = [
            {
                "type": "transcript.text.segment",
                "id": f"seg_{number}",
                "start": turn.start_seconds,
                "end": turn.end_seconds,
                "speaker": turn.speaker,
                "text": turn.text,
            }
            for number, turn in enumerate(delta.turns, len(self.turns))
        ]
        self.words.append(delta.text)
        self.logprobs += logprobs
        self.turns += turns
        return logprobs, turns

    @property
    def text(self) -> str:
        """All words."""
        return "".join(self.words)

    @property
    def cues(self) -> list[Cue]:
        """The turns, for subtitles."""
        return [Cue(turn["start"], turn["end"], turn["speaker"], turn["text"]) for turn in self.turns]

    def ending(self, *, with_logprobs: bool) -> dict[str, Any]:
        """Fields at its end besides the words: log-probabilities if asked for, the finish reason, and usage."""
        counted = self.finished.usage
        prompt, answer = counted.prompt_tokens, counted.completion_tokens
        details = {"audio_tokens": self.sound_tokens, "text_tokens": prompt - self.sound_tokens}
        return {
            **({"logprobs": self.logprobs} if with_logprobs else {}),
            "finish_reason": answers.finish(self.finished)["finish_reason"],
            "usage": {
                "type": "tokens",
                "input_tokens": prompt,
                "input_token_details": details,
                "output_tokens": answer,
                "total_tokens": prompt + answer,
            },
        }


class Transcriptions:
    """Answers requests for the words of a sound."""

    def __init__(self, generations: Generations) -> None:
        self._generations = generations

    async def answer(self, request: Request) -> Response:
        """One request, streamed or whole."""
        context = context_of(request, "transcriptions")
        asked, sound = await read_form(context, request.headers, TranscriptionRequest, "file")
        message = _message(asked, sound, context.id)
        del sound
        events = self._generations.events(message, context, context.body_lease.release)
        del message
        if asked.stream:
            return EventStream(_chunks(events, asked))
        said = _Transcript()
        async for _ in said.read(events):
            pass
        if asked.response_format == "text":
            return PlainTextResponse(said.text)
        if asked.response_format in _SUBTITLES:
            written, kind = _SUBTITLES[asked.response_format]
            return PlainTextResponse(written(said.cues), media_type=kind)
        turns = {"task": "transcribe", "segments": said.turns} if asked.response_format == "diarized_json" else {}
        return json_answer({"text": said.text, **turns, **said.ending(with_logprobs=asked.with_logprobs)})


def _message(asked: TranscriptionRequest, sound: bytes, request_id: str) -> llm_pb2.GenerateRequest:
    """The LLM service's request."""
    params = sampling_params.choice(asked, asked.max_completion_tokens)
    if asked.temperature is None:
        params.temperature = _GREEDY
    if asked.with_logprobs:
        params.logprobs = 0
    wanted = llm_pb2.TranscriptionInput(
        audio=media_pb2.Media(modality=media_pb2.MODALITY_AUDIO, data=sound),
        language=asked.language or "",
        prompt=asked.prompt or "",
        turns=asked.with_turns,
    )
    return prompt_inputs.generate_request(asked, params, request_id, transcription=wanted)


async def _chunks(events: Events, asked: TranscriptionRequest) -> AsyncGenerator[bytes]:
    said = _Transcript()
    async with aclosing(said.read(events)) as deltas:
        async for text, logprobs, turns in deltas:
            if text or (asked.with_logprobs and logprobs):
                beside = {"logprobs": logprobs} if asked.with_logprobs else {}
                yield event({"type": "transcript.text.delta", "delta": text, **beside})
            for turn in turns if asked.response_format == "diarized_json" else ():
                yield event(turn)
    yield Last(
        event({"type": "transcript.text.done", "text": said.text, **said.ending(with_logprobs=asked.with_logprobs)})
        + DONE
    )
