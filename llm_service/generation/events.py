"""The events of a generation: Begun once, prompt logprobs, deltas, and Ended once for each choice; or Begun and
Embedded."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.telemetry.stages import Stage
from llm_service.plan import TokenLogprobs
from llm_service.prompt.transcript import Turn
from llm_service.request import PromptLayout


@dataclass(frozen=True, slots=True)
class Begun:
    """The prompt is laid out and computation has begun; `cached` of its tokens came from the prefix cache. `thinking`:
    the answer begins inside the model's reasoning."""

    layout: PromptLayout
    cached: int
    thinking: bool = False


@dataclass(frozen=True, slots=True)
class Computed:
    """The prompt's first `tokens` are computed, for one of its choices."""

    tokens: int


@dataclass(frozen=True, slots=True)
class PromptLogprobsDelta:
    """How likely the prompt's tokens were, from token `first` on."""

    first: int
    tokens: list[int]
    logprobs: list[TokenLogprobs]


@dataclass(slots=True)
class Delta:
    """New tokens of one choice and the text that is certain by now; `logprobs` has one for each token, or none. Of a
    transcript, the text is its words, and `turns` are complete with it."""

    choice: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    def add(self, text: str, token: int, logprobs: TokenLogprobs | None) -> None:
        """Adds a token and the text that it completes."""
        self.text += text
        self.tokens.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)


@dataclass(frozen=True, slots=True)
class Ended:
    """A choice is complete; `reason` is stop, length or structure, and `stop_token` is the one of `stop_token_ids` that
    ended it. `reasoning_tokens` counts its tokens of reasoning, and `accepted_draft_tokens` how many of `draft_tokens`
    were right. `stages` count from the request's arrival."""

    choice: int
    reason: str
    stop_text: str
    completion_tokens: int
    reasoning_tokens: int
    stages: dict[str, Stage]
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    stop_token: int | None = None


@dataclass(frozen=True, slots=True)
class Embedded:
    """The prompt is computed; `pooled` are its pooled hidden states, float32 [hidden]. `stages` count from the
    request's arrival."""

    pooled: bytes
    stages: dict[str, Stage]


Event = Begun | Computed | PromptLogprobsDelta | Delta | Ended | Embedded
