"""Puts the events of a generation together into an answer."""

from __future__ import annotations

from dataclasses import dataclass, field

from twinlens.v1 import (
    FINISH_REASON_UNSPECIFIED,
    FinishReason,
    GenerateDelta,
    GenerateFinished,
    GenerateResponse,
    GenerateStarted,
    TokenLogprobs,
    TranscriptTurn,
    Usage,
)


@dataclass(slots=True)
class Completion:
    """One choice. `timings` is in seconds by stage; `logprobs` has one entry for each token, if asked for. For a
    transcript, `turns` say who speaks when, if the model tells that."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    reason: FinishReason = FINISH_REASON_UNSPECIFIED
    turns: list[TranscriptTurn] = field(default_factory=list)
    stop_text: str = ""
    stop_token_id: int | None = None
    usage: Usage = field(default_factory=Usage)
    timings: dict[str, float] = field(default_factory=dict)

    def add_delta(self, delta: GenerateDelta) -> None:
        """Appends new tokens."""
        self.text += delta.text
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        self.turns.extend(delta.turns)

    def finish(self, finished: GenerateFinished) -> None:
        """Notes how the choice ended."""
        self.reason = finished.reason
        self.stop_text = finished.stop_text
        self.stop_token_id = finished.stop_token_id if finished.HasField("stop_token_id") else None
        self.usage = finished.usage
        self.timings = {timing.stage: timing.seconds for timing in finished.timings}


@dataclass(slots=True)
class Answer:
    """The result of a generation so far. `started` says where the media are in the prompt.

    If `prompt_logprobs` were asked for, they and `prompt_token_ids` have one entry for each token of the prompt from
    the second on.
    """

    started: GenerateStarted = field(default_factory=GenerateStarted)
    choices: list[Completion] = field(default_factory=list)
    prompt_token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    def add(self, event: GenerateResponse) -> None:
        """Takes in the next event of the stream."""
        match event.WhichOneof("event"):
            case "started":
                self.started = event.started
            case "delta":
                self.prompt_token_ids.extend(event.delta.prompt.token_ids)
                self.prompt_logprobs.extend(event.delta.prompt.logprobs)
                self._choice(event.delta.index).add_delta(event.delta)
            case "finished":
                self._choice(event.finished.index).finish(event.finished)
            case _:  # an event of a newer service
                return

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.choices[0].text if self.choices else ""

    @property
    def turns(self) -> list[TranscriptTurn]:
        """The first choice's turns."""
        return self.choices[0].turns if self.choices else []

    @property
    def usage(self) -> Usage:
        """The first choice's token counts."""
        return self.choices[0].usage if self.choices else Usage()

    @property
    def timings(self) -> dict[str, float]:
        """The first choice's seconds by stage."""
        return self.choices[0].timings if self.choices else {}

    def _choice(self, index: int) -> Completion:
        while len(self.choices) <= index:
            self.choices.append(Completion())
        return self.choices[index]
